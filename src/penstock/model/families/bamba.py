"""Reads Bamba: Mamba2 in most layers, attention with RoPE on half of each head in the others, and an MLP after each.
Its GGUF files use Granite 4's architecture name.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from penstock.errors import MalformedFile
from penstock.model import config_hf, decoder
from penstock.model.config_reader import COUNTS, ConfigReader
from penstock.model.families import falconh1, granitehybrid, mamba2_mixer
from penstock.model.spec import ModelSpec

ROTATED = 0.5  # share of each head
HUGGING_FACE = falconh1.HUGGING_FACE
GGUF, read_gguf = granitehybrid.GGUF, granitehybrid.read_gguf
build = partial(decoder.build, mixer=mamba2_mixer.mixer)


def read_hf(config: ConfigReader) -> ModelSpec:
    config.require("hidden_act", ("silu",), "silu")
    config.ignore("num_logits_to_keep", "use_mamba_kernels", "z_loss_coefficient")
    rope = config_hf.rope_fields(config).with_defaults({"partial_rotary_factor": ROTATED})
    spec = config_hf.read_decoder(config, "bamba", partial=True, scaling=rope)
    rotated = 2 * len(spec.attn.rope.inv_freq)
    config.require("attn_rotary_emb", (rotated,), rotated)
    attentive = config.array("attn_layer_indices", COUNTS)
    if not attentive or max(attentive) >= spec.layers:
        raise MalformedFile(
            f"attn_layer_indices in config.json must name some of the {spec.layers} layers; got {list(attentive)}"
        )
    mamba = mamba2_mixer.read_hf(config, spec.eps, config.size("mamba_expand", 2) * spec.dim)
    biases = config_hf.read_biases(config) | mamba2_mixer.read_biases(config)
    recurrent = frozenset(range(spec.layers)) - frozenset(attentive)
    return mamba2_mixer.with_mamba2(replace(spec, biases=biases), mamba, recurrent)

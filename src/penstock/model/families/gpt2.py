"""Reads GPT-2: layer norms, learned positions, an MLP without a gate, and biases everywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from penstock.model import decoder, names
from penstock.model.config_reader import MAX_LAYERS, ConfigReader
from penstock.model.gguf import config as gguf_config
from penstock.model.spec import AttentionSpec, ModelSpec, RopeSpec
from penstock.model.tensor import Tensor

TOP = {"wte": "embed", "wpe": "positions", "ln_f": "norm"}
PARTS = {
    "ln_1": "attn_norm", "attn.c_attn": "qkv", "attn.c_proj": "o",
    "ln_2": "mlp_norm", "mlp.c_fc": "up", "mlp.c_proj": "down",
}  # fmt: skip
HUGGING_FACE = names.Naming(  # optionally prefixed by the outer model
    top=TOP | {f"transformer.{theirs}": ours for theirs, ours in TOP.items()} | {"lm_head": "head"},
    layer=re.compile(rf"(?:transformer\.)?h\.{names.NUMBER}\.(.+)"),
    parts=PARTS,
    ignored=re.compile(r".+\.attn\.(masked_)?bias"),  # a causal mask
    transposed=frozenset(("qkv", "o", "up", "down")),
)
GGUF = names.GGUF.but(qkv="attn_qkv")._replace(top={**names.GGUF.top, "position_embd": "positions"})
BIASES = frozenset(("q", "k", "v", "o", "up", "down", "attn_norm", "mlp_norm", "norm"))
ACTS = {
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
    **{"gelu": "gelu", "relu": "relu", "silu": "silu"},
}
NEUTRAL = (
    *("attn_pdrop", "n_ctx", "reorder_and_upcast_attn", "task_specific_params", "gradient_checkpointing"),
    *(f"summary_{what}" for what in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")),
    *("id2label", "label2id", "_num_labels", "output_past", "predict_special_tokens"),  # classifiers only
)

build_with_layer_norms = partial(decoder.build, mlp=decoder.plain_mlp, norm=decoder.layer_norm)
build = partial(build_with_layer_norms, learned_positions=True)


def read_hf(config: ConfigReader) -> ModelSpec:
    config.ignore(*NEUTRAL)
    config.require("add_cross_attention", (False,), False)
    config.require("n_special", (0,), 0)
    config.require("activation_function", tuple(ACTS), "gelu_new")
    dim, heads = config.size("n_embd"), config.size("n_head")
    spec = ModelSpec(
        arch="gpt2",
        layers=config.size("n_layer", most=MAX_LAYERS),
        dim=dim,
        hidden=config.size("n_inner", 4 * dim),
        vocab=config.size("vocab_size"),
        max_len=config.size("n_positions"),
        eps=config.number("layer_norm_epsilon", 1e-5),
        attn=AttentionSpec(heads, heads, dim // heads, RopeSpec((), interleaved=False)),
        act=ACTS[config.text("activation_function", "gelu_new")],
        tied=config.flag("tie_word_embeddings", True),
        biases=BIASES,
    )
    if not config.flag("scale_attn_weights", True):
        spec = replace(spec, attn=replace(spec.attn, multiplier=1.0))
    if not config.flag("scale_attn_by_inverse_layer_idx", False):
        return spec
    scales = [spec.attn.scale / (layer + 1) for layer in range(spec.layers)]
    return spec.with_attention([replace(spec.attn, multiplier=scale) for scale in scales])


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    eps = gguf_config.LAYER_EPS
    config.refuse_others({eps, *(key for key in gguf_config.KEYS if not key.startswith("rope."))})
    spec = gguf_config.read_decoder(config, tensors, "gpt2", interleaved=False, eps_key=eps)
    attn = replace(spec.attn, rope=RopeSpec((), interleaved=False))
    return replace(spec, attn=attn, act="gelu_tanh", biases=BIASES)

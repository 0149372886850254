"""Reads Falcon-H1: parallel attention and Mamba2 in every layer, and multipliers at almost every projection.

Hugging Face configs list the multipliers; GGUF files have them in their weights. Those of x, B and C are folded into
the convolution, and the key multiplier into the score scale. The MLP's first multiplier applies to its input, and so to
both gate and up; its output is divided by it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.model import config_hf, decoder, names
from penstock.model.config_reader import NUMBERS, ConfigReader
from penstock.model.decoder import scaled
from penstock.model.families import mamba2_mixer
from penstock.model.gguf import config as gguf_config
from penstock.model.ops import Ops, V
from penstock.model.packer import Packer
from penstock.model.recurrence import Mamba2Spec
from penstock.model.spec import BranchScales, ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE.but(
    **mamba2_mixer.within("mamba"),
    **{"mlp_norm": "pre_ff_layernorm", "gate": "feed_forward.gate_proj", "up": "feed_forward.up_proj"},
    down="feed_forward.down_proj",
)._replace(top={"model.embed_tokens": "embed", "model.final_layernorm": "norm", "lm_head": "head"})
GGUF = names.GGUF.but(**mamba2_mixer.GGUF_PARTS)
NEUTRAL = (  # training and initialization
    *("num_logits_to_keep", "mamba_use_mlp", "mlp_expansion_factor", "attn_layer_indices"),
    *("time_step_floor", "time_step_max", "time_step_min", "time_step_rank"),
)
NO_SCALES = BranchScales()


@dataclass(frozen=True, slots=True)
class ScaledPart:
    """Applies a part between two multipliers."""

    part: decoder.Part
    before: float
    after: float

    def __call__(self, ops: Ops[V], x: V) -> V:
        return scaled(ops, self.part(ops, scaled(ops, x, self.before)), self.after)


@dataclass(frozen=True, slots=True)
class Branches:
    """Computes attention and Mamba2 on the same input, and adds their outputs."""

    attention: decoder.Part
    mamba: decoder.Part

    def __call__(self, ops: Ops[V], x: V) -> V:
        return ops.add(self.mamba(ops, x), self.attention(ops, x))


def mixer(spec: ModelSpec, pack: Packer, layer: int) -> Branches:
    s = spec.branch_scales or NO_SCALES
    attention = ScaledPart(decoder.attention(spec, pack, layer), s.attention_in, s.attention_out)
    return Branches(attention, ScaledPart(mamba2_mixer.mamba2(spec, pack, layer, s.convolved), s.ssm_in, s.ssm_out))


def mlp(spec: ModelSpec, pack: Packer, layer: int) -> ScaledPart:
    s = spec.branch_scales or NO_SCALES
    return ScaledPart(decoder.mlp_or_experts(spec, pack, layer), s.gate, s.down / s.gate)


def build(spec: ModelSpec, pack: Packer) -> decoder.Decoder:
    return decoder.build(spec, pack, mixer=mixer, mlp=mlp)


def in_all_layers(spec: ModelSpec, mamba: Mamba2Spec) -> ModelSpec:
    every = frozenset(range(spec.layers))
    return replace(mamba2_mixer.with_mamba2(spec, mamba, every), attentive=every)


# ---- configs ----


def read_hf(config: ConfigReader) -> ModelSpec:
    config.require("hidden_act", ("silu",), "silu")
    for key in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        config.require(key, (False,), False)
    config.ignore(*NEUTRAL)
    spec = config_hf.read_decoder(config, "falconh1")
    multipliers = read_multipliers(config)
    keys = config.number("key_multiplier", 1.0)
    z, *convolved, dt = multipliers["ssm_multipliers"]
    gate, down = multipliers["mlp_multipliers"]
    scales = BranchScales(
        attention_in=config.number("attention_in_multiplier", 1.0),
        attention_out=config.number("attention_out_multiplier", 1.0),
        ssm_in=config.number("ssm_in_multiplier", 1.0),
        ssm_out=config.number("ssm_out_multiplier", 1.0),
        convolved=tuple(convolved),
        gate=gate,
        down=down,
    )
    spec = replace(
        spec,
        attn=replace(spec.attn, multiplier=spec.attn.scale * keys),
        biases=mamba2_mixer.read_biases(config),
        branch_scales=scales,
        embed_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=config.number("lm_head_multiplier", 1.0),
    )
    return in_all_layers(spec, replace(read_mamba(config, spec), z_scale=z, dt_scale=dt))


def read_multipliers(config: ConfigReader) -> dict[str, tuple[float, ...]]:
    """Reads the lists of multipliers; defaults are ones."""
    counts = {"ssm_multipliers": 5, "mlp_multipliers": 2}
    return {
        key: config.array(key, NUMBERS, count) if key in config else (1.0,) * count for key, count in counts.items()
    }


def read_mamba(config: ConfigReader, spec: ModelSpec) -> Mamba2Spec:
    """Reads Mamba2's sizes; its norm is optional."""
    inner = config.size("mamba_expand", 2) * spec.dim
    mamba = mamba2_mixer.read_hf(config, spec.eps, config.size("mamba_d_ssm", inner))
    normed, first = config.flag("mamba_rms_norm", False), config.flag("mamba_norm_before_gate", True)
    if normed and first:
        raise config.unsupported("mamba_norm_before_gate", True, ("false where mamba_rms_norm is true",))
    return replace(mamba, norm_groups=mamba.groups if normed else 0)


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    keys = mamba2_mixer.GGUF_KEYS
    spec = gguf_config.read_decoder(config, tensors, "falconh1", interleaved=False, keys=keys)
    mamba = mamba2_mixer.read_gguf(config, spec.eps)
    normed = any(name.endswith("ssm_norm.weight") for name in tensors)
    return in_all_layers(spec, mamba if normed else replace(mamba, norm_groups=0))

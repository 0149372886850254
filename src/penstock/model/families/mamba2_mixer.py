"""Reads and builds Mamba2 layers, which several families use instead of attention, in parallel to it, or as layers of
their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import MalformedFile
from penstock.model import decoder
from penstock.model.config_reader import ConfigReader, bounds, size_or_auto
from penstock.model.ops import Mamba2Weights, Ops, V, Weight
from penstock.model.packer import Packer
from penstock.model.recurrence import Mamba2Spec
from penstock.model.spec import ModelSpec

HUGGING_FACE_PARTS = {  # canonical name: module in a Hugging Face folder
    "ssm_in": "in_proj",
    "conv": "conv1d",
    "decay_log": "A_log",
    "dt": "dt_bias",
    "skip": "D",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
GGUF_PARTS = {
    "ssm_in": "ssm_in",
    "conv": "ssm_conv1d",
    "decay": "ssm_a",
    "dt": "ssm_dt.bias",
    "skip": "ssm_d",
    "ssm_norm": "ssm_norm",
    "ssm_out": "ssm_out",
}
GGUF_KEYS = ("ssm.conv_kernel", "ssm.group_count", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank")
LINEAR, FULL = ("linear_attention", "mamba"), ("full_attention", "attention")  # newer and older names of layer types


def within(module: str) -> dict[str, str]:
    return {ours: f"{module}.{theirs}" for ours, theirs in HUGGING_FACE_PARTS.items()}


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Computes Mamba2 with its projections."""

    layer: int  # index among layers with a state
    spec: Mamba2Spec
    inputs: Weight
    weights: Mamba2Weights
    o: Weight

    def __call__(self, ops: Ops[V], x: V) -> V:
        zxbcdt = ops.linear(x, self.inputs)
        return ops.linear(ops.mamba2(self.layer, zxbcdt, self.weights, self.spec), self.o)


def mixer(spec: ModelSpec, pack: Packer, layer: int) -> decoder.Part:
    return mamba2(spec, pack, layer) if layer in spec.recurrent else decoder.attention(spec, pack, layer)


def mamba2(spec: ModelSpec, pack: Packer, layer: int, scales: Sequence[float] = (1, 1, 1)) -> Mamba2:
    """Builds a layer's Mamba2. `scales` multiply x, B and C before the convolution."""
    m, name = spec.recurrence, f"layers.{layer}"
    assert isinstance(m, Mamba2Spec)
    bias, gain = f"{name}.conv.bias", f"{name}.ssm_norm"
    channels = np.repeat(np.array(scales, np.float32), (m.inner, *[m.groups * m.state_dim] * 2))
    taps = np.repeat(channels, m.conv_width)
    weights = Mamba2Weights(
        conv=pack.computed(f"{name}.conv", len(taps), lambda values: values * taps),
        conv_bias=pack.vector(bias, m.width) if pack.has(bias) else None,
        decay=decay(m, pack, name),
        dt_bias=pack.vector(f"{name}.dt", m.heads),
        skip=pack.vector(f"{name}.skip", m.heads),
        gain=pack.vector(gain, m.inner) if m.norm_groups else None,
    )
    return Mamba2(
        layer=spec.state_layer(layer),
        spec=m,
        inputs=pack.matrix((f"{name}.ssm_in", m.in_width), width=spec.dim),
        weights=weights,
        o=pack.matrix((f"{name}.ssm_out", spec.dim), width=m.inner),
    )


def decay(m: Mamba2Spec, pack: Packer, name: str) -> Weight:
    """Packs the decay of each head's state. Hugging Face folders store its logarithm."""
    if pack.has(f"{name}.decay"):
        return pack.vector(f"{name}.decay", m.heads)
    return pack.computed(f"{name}.decay_log", m.heads, lambda log: -np.exp(log))


# ---- configs ----


def read_hf(config: ConfigReader, eps: float, inner: int) -> Mamba2Spec:
    """Reads the `mamba_` sizes. `inner` is the width of all heads."""
    config.ignore("mamba_chunk_size")  # chunking does not affect the result
    heads = config.size("mamba_n_heads")
    head_dim = size_or_auto(config, "mamba_d_head", inner // heads)
    if heads * head_dim != inner:
        raise MalformedFile(
            f"mamba_n_heads = {heads} with mamba_d_head = {head_dim} in config.json make no width of {inner}"
        )
    least, most = bounds(config, "time_step_limit")
    return Mamba2Spec(
        heads=heads,
        head_dim=head_dim,
        state_dim=config.size("mamba_d_state"),
        groups=config.size("mamba_n_groups", 1),
        conv_width=config.size("mamba_d_conv", 4),
        eps=eps,
        dt_min=least,
        dt_max=most,
    )


def read_biases(config: ConfigReader) -> frozenset[str]:
    conv = ("conv",) if config.flag("mamba_conv_bias", True) else ()
    return frozenset((*conv, *(("ssm_in", "ssm_out") if config.flag("mamba_proj_bias", False) else ())))


def read_kinds(config: ConfigReader, layers: int) -> frozenset[int]:
    """Reads the Mamba2 layers from `layer_types`; the others have attention."""
    kinds = config.strings("layer_types")
    if len(kinds) != layers or not {*LINEAR, *FULL}.issuperset(kinds):
        raise config.unsupported("layer_types", kinds, (f"{LINEAR[0]} or {FULL[0]} for each layer",))
    return frozenset(i for i, kind in enumerate(kinds) if kind in LINEAR)


def read_gguf(config: ConfigReader, eps: float) -> Mamba2Spec:
    heads, inner, groups = (
        config.size("ssm.time_step_rank"),
        config.size("ssm.inner_size"),
        config.size("ssm.group_count"),
    )
    if inner % heads:
        raise MalformedFile(f"ssm.inner_size = {inner} in the GGUF metadata is not a multiple of {heads} heads")
    return Mamba2Spec(
        heads=heads,
        head_dim=inner // heads,
        state_dim=config.size("ssm.state_size"),
        groups=groups,
        conv_width=config.size("ssm.conv_kernel"),
        eps=eps,
        norm_groups=groups,
    )


def with_mamba2(spec: ModelSpec, mamba: Mamba2Spec, recurrent: frozenset[int]) -> ModelSpec:
    return replace(spec, recurrence=mamba if recurrent else None, recurrent=recurrent)

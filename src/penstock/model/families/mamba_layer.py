"""Builds Mamba layers: a causal convolution, and a selective scan whose time steps, B and C are projected from its
output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.model.families.lfm2 import conv_weights
from penstock.model.ops import ConvWeights, Ops, ScanWeights, V, Weight
from penstock.model.packer import Packer
from penstock.model.recurrence import ConvSpec, MambaSpec, ScanSpec
from penstock.model.spec import ModelSpec

GGUF_KEYS = ("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank")
HUGGING_FACE_PARTS = {  # after the mixer's name
    "ssm_in": "in_proj",
    "conv": "conv1d",
    "ssm_x": "x_proj",
    "ssm_dt": "dt_proj",
    "decay_log": "A_log",
    "skip": "D",
    "ssm_out": "out_proj",
}
GGUF_PARTS = {
    "ssm_in": "ssm_in",
    "conv": "ssm_conv1d",
    "ssm_x": "ssm_x",
    "ssm_dt": "ssm_dt",
    "decay": "ssm_a",
    "skip": "ssm_d",
    "ssm_out": "ssm_out",
}


def mamba_spec(width: int, conv_width: int, state_size: int, dt_rank: int) -> MambaSpec:
    """Returns the spec of a layer with `width` channels."""
    return MambaSpec(ConvSpec(width, conv_width), ScanSpec(width, state_size), dt_rank)


@dataclass(frozen=True, slots=True)
class MambaLayer:
    """Computes a Mamba layer, with one state for the convolution and one for the scan."""

    layer: int  # index among layers with states
    spec: MambaSpec
    eps: float
    xz: Weight
    conv: ConvWeights
    projections: tuple[Weight, ...]  # outputs: time step rank, b, c
    norms: tuple[Weight, ...]  # norms of the projections, or none
    dt: Weight
    scan: ScanWeights
    o: Weight

    def __call__(self, ops: Ops[V], x: V) -> V:
        xz = ops.linear(x, self.xz)
        u = ops.causal_conv(2 * self.layer, xz, self.conv, self.spec.conv)
        projected = [ops.linear(u, weight) for weight in self.projections]
        if self.norms:
            pairs = zip(projected, self.norms, strict=True)
            projected = [ops.add_norm(value, None, gain, self.eps)[0] for value, gain in pairs]
        dt, b, c = projected
        y = ops.selective_scan(2 * self.layer + 1, u, ops.linear(dt, self.dt), b, c, xz, self.scan, self.spec.scan)
        return ops.linear(y, self.o)


def mamba_layer(spec: ModelSpec, pack: Packer, layer: int) -> MambaLayer:
    m, name = spec.recurrence, f"layers.{layer}"
    assert isinstance(m, MambaSpec)
    width, size = m.scan.width, m.scan.state_size
    sizes = {"dt": m.dt_rank, "b": size, "c": size}
    ends = np.cumsum(list(sizes.values())).tolist()
    spans = zip([0, *ends], ends, strict=False)
    norms = {f"{name}.{part}_norm": count for part, count in sizes.items()}
    return MambaLayer(
        layer=spec.state_layer(layer),
        spec=m,
        eps=spec.eps,
        xz=pack.matrix((f"{name}.ssm_in", 2 * width), width=spec.dim),
        conv=conv_weights(m.conv, pack, name),
        projections=tuple(pack.matrix((f"{name}.ssm_x", ends[-1], [span]), width=width) for span in spans),
        norms=tuple(pack.vector(norm, count) for norm, count in norms.items()) if pack.has(next(iter(norms))) else (),
        dt=pack.matrix((f"{name}.ssm_dt", width), width=m.dt_rank),
        scan=ScanWeights(decay(m.scan, pack, name), pack.vector(f"{name}.skip", width)),
        o=pack.matrix((f"{name}.ssm_out", spec.dim), width=width),
    )


def decay(scan: ScanSpec, pack: Packer, name: str) -> Weight:
    """Packs the scan's decay. Some files store its logarithm."""
    if pack.has(f"{name}.decay"):
        return pack.vector(f"{name}.decay", scan.state_floats)
    return pack.computed(f"{name}.decay_log", scan.state_floats, lambda log: -np.exp(log))

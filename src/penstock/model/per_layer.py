"""Builds Gemma 3n's and Gemma 4's per-layer embeddings: an extra input of each layer that depends only on the token.

A second table has a slice of each token's row for each layer. It is only looked up, so it keeps the file's format.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.model.decoder import Norm, rms_norm
from penstock.model.ops import Ops, V, Weight
from penstock.model.packer import Packer
from penstock.model.spec import ModelSpec, PerLayerSpec


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """Computes the inputs of all layers from the step's tokens and their embeddings."""

    spec: PerLayerSpec
    table: Weight
    projection: Weight
    gain: Weight  # divided by the root of 2, because two parts are added
    eps: float  # the epsilon of the projection's norm

    def __call__(self, ops: Ops[V], x: V) -> V:
        """Maps embeddings [T, dim] to [T, layers * width]."""
        projected = ops.norm_runs(ops.linear(x, self.projection), self.gain, self.eps)
        return ops.add(ops.scale(ops.embed(self.table, partial=True), (self.spec.width / 2) ** 0.5), projected)


@dataclass(frozen=True, slots=True)
class PerLayerGate:
    """Computes a layer's contribution from its per-layer input."""

    first: int
    act: str
    gate: Weight
    projection: Weight
    norm: Norm

    def __call__(self, ops: Ops[V], x: V, inputs: V) -> V:
        """Maps [T, dim] and the inputs of all layers to [T, dim]."""
        gated = ops.gate_columns(ops.linear(x, self.gate), inputs, self.first, self.act)
        y, _ = self.norm(ops, ops.linear(gated, self.projection))
        return y


def build_inputs(spec: ModelSpec, pack: Packer) -> PerLayerInputs:
    assert spec.per_layer
    width = spec.per_layer.width
    return PerLayerInputs(
        spec.per_layer,
        pack.matrix(("per_layer_embed", spec.per_layer.vocab), width=spec.layers * width),
        pack.matrix(("per_layer_in", spec.layers * width), width=spec.dim),
        pack.computed("per_layer_norm", width, lambda gain: gain * np.float32(0.5**0.5)),
        spec.eps * spec.dim,
    )


def build_gate(spec: ModelSpec, pack: Packer, layer: int) -> PerLayerGate:
    assert spec.per_layer
    name, width = f"layers.{layer}", spec.per_layer.width
    return PerLayerGate(
        layer * width,
        spec.act,
        pack.matrix((f"{name}.per_layer_gate", width), width=spec.dim),
        pack.matrix((f"{name}.per_layer_out", spec.dim), width=width),
        rms_norm(spec, pack, f"{name}.after_per_layer_norm"),
    )

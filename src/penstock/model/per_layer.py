"""Builds per-layer embeddings: what each layer of Gemma 3n and 4 adds to its output, given the token itself.

A second table has a slice of each token's row for each layer. It is looked up and never multiplied with, so it stays in
the format that it is stored in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.model.decoder import Norm, rms_norm
from penstock.model.ops import Ops, V, Weight
from penstock.model.spec import ModelSpec, PerLayerSpec
from penstock.model.weights import Packer


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """Computes the inputs of all layers from the step's tokens and from their embeddings."""

    spec: PerLayerSpec
    table: Weight
    projection: Weight
    gain: Weight  # over the root of 2, because two parts are added
    eps: float  # for what is projected before it is scaled

    def __call__(self, ops: Ops[V], x: V) -> V:
        """Maps the embeddings [T, dim] to [T, layers * width]."""
        projected = ops.norm_runs(ops.linear(x, self.projection), self.gain, self.eps)
        return ops.add(ops.scale(ops.embed(self.table, partial=True), (self.spec.width / 2) ** 0.5), projected)


@dataclass(frozen=True, slots=True)
class PerLayerGate:
    """Computes what a layer's input adds to its output."""

    first: int  # column of the layer's input
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
    """Builds what computes the inputs of all layers."""
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
    """Builds a layer's part."""
    assert spec.per_layer
    name, width = f"layers.{layer}", spec.per_layer.width
    return PerLayerGate(
        layer * width,
        spec.act,
        pack.matrix((f"{name}.per_layer_gate", width), width=spec.dim),
        pack.matrix((f"{name}.per_layer_out", spec.dim), width=width),
        rms_norm(spec, pack, f"{name}.after_per_layer_norm"),
    )

"""Packs checkpoints into weights that have a shape and no values: what recording a forward pass needs, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.model.load import load_model, open_checkpoint
from penstock.model.ops import ExpertWeights
from penstock.model.program import TAKES_OVER, Capabilities, OpNode, Program, Recorder
from penstock.model.registry import PackedModel
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Stack, Tensor


@dataclass(frozen=True, eq=False)
class Shaped:
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def width(self) -> int:
        return self.shape[1]


class ShapePacker:
    def pack_matrix(self, parts: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Shaped:
        return Shaped((sum(part.shape[0] for part in parts), parts[0].shape[1]))

    def pack_vector(self, tensor: Tensor) -> Shaped:
        return Shaped(tensor.shape)

    def pack_heads(self, tensor: Tensor) -> Shaped:
        return Shaped(tensor.shape)

    def pack_experts(self, up: Sequence[Stack], down: Sequence[Stack], choice_bias: Tensor | None) -> ExpertWeights:
        return ExpertWeights([self.pack_matrix(*one) for one in up], [self.pack_matrix(*one) for one in down], None)


def shaped_model(path: Path) -> tuple[ModelSpec, PackedModel]:
    """Returns what a checkpoint is, and a model of it that can be recorded."""
    checkpoint = open_checkpoint(path)
    return checkpoint.spec, load_model(checkpoint, ShapePacker())


def recorded(model: Any) -> list[OpNode]:
    """Returns the nodes of a forward pass as its ops were called: nothing is fused."""
    recorder = Recorder()
    model.forward(recorder)
    return recorder.nodes


def execute(program: Program, can: Capabilities) -> None:
    """Runs a program over the names of values in place of numbers: every buffer must still hold what a node reads."""
    held: dict[int, int | None] = {}
    for node, places in zip(program.nodes, program.places, strict=True):
        sources = places[: len(node.inputs)]
        targets = places[len(node.inputs) : len(node.inputs) + len(node.outputs)]
        scratch = places[len(node.inputs) + len(node.outputs) :]
        for value, place in zip(node.inputs, sources, strict=True):
            assert held.get(place) == value.id, f"{node.op} reads a value whose buffer was written again"
        assert len({*targets, *scratch}) == len(targets) + len(scratch), f"{node.op} writes two things to one buffer"
        overwritten = {*targets, *scratch} & set(sources)
        if overwritten:
            assert node.op in can.in_place, f"{node.op} writes over what it reads"
            output, source = TAKES_OVER[node.op]
            assert overwritten == set(targets[output : output + 1]) == set(sources[source : source + 1])
        for value, place in zip(node.outputs, targets, strict=True):
            buffer = program.buffers[place]
            assert (buffer.symbol, buffer.width) == (value.symbol, value.width)
            assert can.uniform or buffer.precision == value.precision
            held[place] = value.id
        assert [program.buffers[place] for place in scratch] == list(can.scratch(node))
        held |= dict.fromkeys(scratch)
    assert held[program.answer_buffer] == program.answer.id
    if program.pooled is not None:
        assert program.pooled_buffer is not None
        assert held[program.pooled_buffer] == program.pooled.id

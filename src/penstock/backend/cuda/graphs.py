"""CUDA graphs of steps in which every row is one token: one launch in place of hundreds."""

from __future__ import annotations

from typing import Any

import torch

from penstock.backend.cuda.inputs import Fields, Shape
from penstock.backend.cuda.ops import Program


def bucket(rows: int) -> int:
    """How many rows a step of so many is padded to."""
    for size in (1, 2, 4, 8, 16):
        if rows <= size:
            return size
    return -(-rows // 8) * 8 if rows <= 64 else -(-rows // 16) * 16


class Graphs:
    """A shape runs launch by launch the first time, so that no first token waits for a capture, and from its second
    time on as a graph. All graphs use the program's own buffers."""

    def __init__(self, program: Program, capture: bool) -> None:
        self._program = program
        self._capture = capture
        self._graphs: dict[Shape, Any] = {}
        self._seen: set[Shape] = set()

    def run(self, shape: Shape, step: Fields) -> Any:
        """The forward pass of a step; returns its answer, [S, *]."""
        if self._capture and not shape.tiles and shape in self._seen:
            if shape not in self._graphs:
                self._graphs[shape] = self._captured(step)
            self._graphs[shape].replay()
            return self._program.answer_of(shape.sampled)
        self._seen.add(shape)
        return self._launch(step)

    def forget(self) -> None:
        """To be called when something that graphs read has moved."""
        self._graphs.clear()

    def _launch(self, step: Fields) -> Any:
        self._program.run_tokens(step)
        return self._program.run_sampled(step, len(step.sampled))

    def _captured(self, step: Fields) -> Any:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        self._launch(step)
        graph.capture_end()
        return graph

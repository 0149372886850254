"""Graphs that cannot be captured, with stand-ins for the GPU's own: steps go on without them."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.backend.cuda.graphs import Graphs, padded
from penstock.backend.cuda.inputs import Shape

SHAPE = padded(Shape(8, 8, 8, 8, 0))
STEP: Any = SimpleNamespace(sampled=range(8))


class Program:
    """Stands in for a CudaProgram whose launches fail while a graph is captured."""

    spare_splits = 64

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.capturing = False
        self.launches: list[tuple[bool, bool]] = []  # in a capture; with the collector on

    def run_tokens(self, step: Any) -> None:
        self.launches.append((self.capturing, gc.isenabled()))
        if self.capturing:
            raise self._error

    def run_sampled(self, step: Any, count: int) -> str:
        return f"{count} rows"


def graphs_of(program: Any, patch: pytest.MonkeyPatch, end_error: Exception | None) -> Graphs:
    class Graph:
        def capture_begin(self, capture_error_mode: str) -> None:
            program.capturing = True

        def capture_end(self) -> None:
            program.capturing = False
            if end_error:
                raise end_error

    patch.setattr(torch.cuda, "CUDAGraph", Graph)
    patch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))
    return Graphs(program, capture=True)


@pytest.mark.parametrize(
    "end_error", [None, RuntimeError("the capture is invalid")], ids=["ends", "ends with an error"]
)
def test_steps_go_on_without_graphs_after_a_capture_that_failed(
    end_error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(RuntimeError("no memory"))
    graphs = graphs_of(program, monkeypatch, end_error)
    assert [graphs.run(SHAPE, STEP) for _ in range(3)] == ["8 rows"] * 3
    assert program.launches == [(False, True), (True, False), (False, True), (False, True)]
    assert not graphs.has(SHAPE)


def test_an_error_that_is_no_shortage_is_raised_and_the_capture_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(ValueError("a kernel cannot be launched so"))
    graphs = graphs_of(program, monkeypatch, None)
    graphs.run(SHAPE, STEP)
    with pytest.raises(ValueError, match="cannot be launched so"):
        graphs.run(SHAPE, STEP)
    assert not program.capturing
    assert gc.isenabled()

"""CUDA graphs: one launch in place of hundreds, for steps of the few shapes that all but the largest are padded to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from penstock.backend.cuda.inputs import SPARE_PARTS, Fields, Shape
from penstock.backend.cuda.program import CudaProgram
from penstock.types import prefill_budget

log = logging.getLogger(__name__)
MOST_TOKENS = 2560  # in a graph: launching a larger step takes less time than running it
MOST_GRAPHS = 256
ROOM = 64 << 20  # bytes that must be free for a capture: one that finds no memory leaves the stream unusable
PROMPT_TOKENS = 128  # steps with prompts have a multiple: between two the library picks slower products
TOKENS_PER_TILE = 16  # room for tiles; whole ones hold more


def bucket(rows: int) -> int:
    """How many rows a step of so many is padded to."""
    for size in (1, 2, 4, 8, 16):
        if rows <= size:
            return size
    return round_up(rows, 8 if rows <= 64 else 16)


def padded(shape: Shape) -> Shape:
    """The shape that a step of this one is run with: its own where it is too large for a graph."""
    if not shape.tiles:
        rows = bucket(shape.decodes)
        return Shape(rows, rows, rows, rows + SPARE_PARTS, 0)
    tokens = round_up(shape.tokens, PROMPT_TOKENS)
    if tokens > MOST_TOKENS:
        return shape
    rows = few_or_many(max(shape.sampled, shape.decodes))
    decodes = rows if shape.decodes else 0
    tiles = round_up(max(tokens // TOKENS_PER_TILE, shape.tiles), 64)
    return Shape(tokens, rows, decodes, decodes + SPARE_PARTS if decodes else 0, tiles)


def few_or_many(rows: int) -> int:
    """The rows of a step with prompts: what only pads costs little beside those."""
    return 8 if rows <= 8 else round_up(rows, 64)


def round_up(value: int, to: int) -> int:
    return -(-value // to) * to


def common_shapes(rows: int, tokens: int, mixed: int) -> Iterator[Shape]:
    """What steps of at most so many rows and tokens mostly look like, the likeliest first: prompts, then answers, then
    both, with up to `mixed` tokens while 64 rows answer."""
    sizes = dict.fromkeys(bucket(count) for count in range(1, rows + 1))
    many = dict.fromkeys(few_or_many(count) for count in range(1, rows + 1))
    tokens = min(tokens, MOST_TOKENS)
    alone = [count for count in (128, 512, tokens) if count <= tokens]
    most = {size: min(prefill_budget(max(mixed or tokens, size + 1), size), tokens) for size in many}
    beside = [(size, count) for size in many for count in range(most[size], size, -PROMPT_TOKENS)]
    yield from (padded(Shape(count, 1, 0, 0, 1)) for count in alone)
    yield from (padded(Shape(size, size, size, size, 0)) for size in sizes)
    yield from (padded(Shape(count, size, size, size, 1)) for size, count in beside)


class Graphs:
    """A shape runs launch by launch the first time, so that no first token waits for a capture, and from its second
    time on as a graph. All graphs use the program's own buffers."""

    def __init__(self, program: CudaProgram, capture: bool) -> None:
        self._program = program
        self._capture = capture
        self._graphs: dict[Shape, Any] = {}
        self._seen: set[Shape] = set()

    def run(self, shape: Shape, step: Fields) -> Any:
        """The forward pass of a step; returns its answer, [S, *]."""
        if not self._capture or shape != padded(shape):
            return self.launch(step)
        if shape not in self._seen:
            self._seen.add(shape)
            return self.launch(step)
        if shape not in self._graphs and not (self._has_room() and self._take(shape, step)):
            return self.launch(step)
        self._graphs[shape].replay()
        return self._program.answer_of(shape.sampled)

    def launch(self, step: Fields) -> Any:
        """The same, without a graph."""
        self._program.run_tokens(step)
        return self._program.run_sampled(step, len(step.sampled))

    def has(self, shape: Shape) -> bool:
        return shape in self._graphs

    def forget(self) -> None:
        """To be called when something that graphs read has moved, or when memory is short."""
        self._graphs.clear()

    def _has_room(self) -> bool:
        return len(self._graphs) < MOST_GRAPHS and torch.cuda.mem_get_info()[0] >= ROOM

    def _take(self, shape: Shape, step: Fields) -> bool:
        try:
            self._graphs[shape] = self._captured(step)
        except RuntimeError as error:  # no memory, among others
            log.warning("steps are launched without graphs from here on: %s", error)
            self._capture = False
            self.forget()
            return False
        return True

    def _captured(self, step: Fields) -> Any:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            self.launch(step)
        finally:
            graph.capture_end()
        return graph

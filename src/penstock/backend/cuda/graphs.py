"""Captures CUDA graphs: a step is one launch instead of hundreds. Graphs exist for a few shapes, to which all but the
largest steps are padded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from penstock.backend.cuda.inputs import SPARE_SPLITS, Shape, most_runs
from penstock.backend.cuda.program import CudaProgram
from penstock.backend.cuda.segments import most_splits
from penstock.backend.cuda.shared_prefixes import SPLITS as SHARED_SPLITS
from penstock.backend.cuda.step_layout import DeviceInputs
from penstock.system.runtime import no_collection
from penstock.types import prefill_budget

log = logging.getLogger(__name__)
MAX_TOKENS = 2560  # in a graph: launching a larger step takes less time than running it
MAX_GRAPHS = 256
CAPTURE_MEMORY = 64 << 20  # bytes that must be free: a capture that finds no memory leaves the stream unusable
PROMPT_TOKENS = 128  # steps with prompts have a multiple: for sizes in between, cuBLAS picks slower kernels
TOKENS_PER_TILE = 16  # decides how many tiles there is room for; full tiles hold more
FEW_SHARING = 16  # rows below which sharing a prefix seldom pays
MOST_IN_RUNS, MOST_ALONE = 384, 64  # tokens of steps with drafts, if a row's tokens attend together, or not


def bucket_decode_rows(rows: int) -> int:
    for size in (1, 2, 4, 8, 16):
        if rows <= size:
            return size
    return round_up(rows, 8 if rows <= 64 else 16 if rows <= 256 else 32)


def padded_sizes(rows: int) -> list[int]:
    return list(dict.fromkeys(bucket_decode_rows(count) for count in range(1, rows + 1)))


def verified_sizes(rows: int, run_sizes: Sequence[int]) -> list[int]:
    """Returns the numbers of tokens that steps with drafts are padded to, if `rows` positions are sampled at once: not
    more than pay."""
    return padded_sizes(min(rows, MOST_IN_RUNS if run_sizes[-1] > 1 else MOST_ALONE))


def padded(shape: Shape, spare: int = SPARE_SPLITS) -> Shape:
    """Returns the shape that a step is padded to, with `spare` splits beyond one for each run; its own if it is too
    large for a graph."""
    if shape.segmented:
        return padded_segments(shape)
    if not shape.tiles:
        rows = bucket_decode_rows(shape.decodes)
        adapters = bucket_adapter_tiles(shape.adapter_tiles, rows)
        splits = most_runs(rows, shape.run) + spare
        return Shape(rows, rows, rows, splits, 0, adapters, shape.run, SHARED_SPLITS if shape.shared else 0)
    tokens = round_up(shape.tokens, PROMPT_TOKENS)
    if tokens > MAX_TOKENS:
        return shape
    rows = bucket_mixed_rows(max(shape.sampled, shape.decodes))
    decodes = rows if shape.decodes else 0
    tiles = round_up(max(tokens // TOKENS_PER_TILE, shape.tiles), 64)
    splits, adapters = decodes + spare if decodes else 0, bucket_adapter_tiles(shape.adapter_tiles, tokens)
    shared = SHARED_SPLITS if shape.shared else 0
    return Shape(tokens, rows, decodes, splits, tiles, adapters, 0, shared, shape.expanded)


def padded_segments(shape: Shape) -> Shape:
    """Returns the shape that a step is padded to whose rows all attend in runs: fewer tokens than PROMPT_TOKENS are
    padded as decoding rows are."""
    tokens, rows = shape.tokens, bucket_mixed_rows(max(shape.sampled, shape.decodes))
    tokens = bucket_decode_rows(tokens) if tokens <= PROMPT_TOKENS else round_up(tokens, PROMPT_TOKENS)
    if shape.tokens == shape.decodes:  # all decode
        tokens = rows = bucket_decode_rows(shape.tokens)
    if tokens > MAX_TOKENS:
        return shape
    splits, adapters = most_splits(tokens, rows, shape.run), bucket_adapter_tiles(shape.adapter_tiles, tokens)
    return Shape(tokens, rows, rows, splits, 0, adapters, run=shape.run, segmented=True)


def in_segments(shape: Shape, run: int) -> Shape:
    """Returns the shape that a step of this one has if all its rows attend in runs of at most `run` tokens."""
    rows = max(shape.sampled, shape.decodes)
    return padded(Shape(shape.tokens, shape.sampled, rows, 0, 0, run=run, segmented=True))


def bucket_mixed_rows(rows: int) -> int:
    """Returns how many rows a step with prompts is padded to: compared with prompts, padding costs little."""
    return 8 if rows <= 8 else round_up(rows, 64)


def step_rows(rows: int) -> int:
    """Returns how many positions are sampled at once in steps of at most `rows` rows, with room for drafts of many
    rows."""
    rows = bucket_mixed_rows(rows)
    return rows if rows <= 8 else max(rows, min(4 * rows, MOST_IN_RUNS))


def bucket_adapter_tiles(tiles: int, tokens: int) -> int:
    """Returns how many tiles of rows with one adapter a step has room for: a power of 4, so that graphs are few. Each
    token has one at most."""
    size = 4 if tiles else 0
    while size < tiles:
        size *= 4
    return min(size, tokens)


def round_up(value: int, to: int) -> int:
    return -(-value // to) * to


def common_shapes(
    rows: int, tokens: int, budget: int, run_sizes: Sequence[int], spare: int = SPARE_SPLITS
) -> Iterator[Shape]:
    """Yields the usual shapes of steps with at most `rows` rows and `tokens` tokens, the likeliest first: prompts,
    answers, both (up to `budget` tokens while 64 rows answer), answers that share prefixes, and drafts in runs of these
    sizes."""
    pad = partial(padded, spare=spare)
    sizes = padded_sizes(rows)
    many = dict.fromkeys(bucket_mixed_rows(count) for count in range(1, rows + 1))
    tokens = min(tokens, MAX_TOKENS)
    alone = [count for count in (128, 512, tokens) if count <= tokens]
    most = {size: min(prefill_budget(max(budget or tokens, size + 1), size), tokens) for size in many}
    beside = [(size, count) for size in many for count in range(most[size], size, -PROMPT_TOKENS)]
    yield from (pad(Shape(count, 1, 0, 0, 1)) for count in alone)
    yield from (pad(Shape(size, size, size, size, 0)) for size in sizes)
    yield from (pad(Shape(count, size, size, size, 1)) for size, count in beside)
    yield from (pad(Shape(size, size, size, size, 0, shared=1)) for size in sizes if size >= FEW_SHARING)
    for run in run_sizes:
        drafted = verified_sizes(step_rows(rows), (run,))
        yield from (pad(Shape(size, size, size, size, 0, run=run)) for size in drafted if size > run)


def draft_shapes(
    rows: int, tokens: int, budget: int, run_sizes: Sequence[int], spare: int = SPARE_SPLITS
) -> Iterator[Shape]:
    """Yields the shapes that steps of a draft model have, as `common_shapes` does: it computes prompts by themselves,
    and drafts one token at a time, or two if all of a draft was accepted."""
    common = common_shapes(rows, tokens, budget, run_sizes[:2], spare)
    yield from (shape for shape in common if not (shape.tiles and shape.decodes))


def of_each_kind(shapes: Sequence[Shape]) -> list[Shape]:
    """Returns a few of the shapes, which together launch every kernel. Products vary with the next power of two of the
    token count, attention with the parts of a step; Triton compiles a kernel twice if an argument is a multiple of 16
    only in some steps."""
    kinds: dict[tuple[object, ...], list[Shape]] = {}
    sizes: dict[int, Shape] = {}
    for shape in shapes:
        kind = bool(shape.tiles), bool(shape.decodes), shape.run, bool(shape.shared), shape.tokens % 16 == 0
        kinds.setdefault(kind, []).append(shape)
        sizes.setdefault((shape.tokens - 1).bit_length(), shape)
    ends = (find(some, key=lambda shape: shape.tokens) for some in kinds.values() for find in (min, max))
    return list(dict.fromkeys([*ends, *sizes.values()]))


class Graphs:
    """Runs steps. A shape runs launch by launch the first time, so that no first token waits for a capture, and as a
    graph from its second time on. All graphs use the program's own buffers."""

    def __init__(self, program: CudaProgram, capture: bool) -> None:
        self._program = program
        self._capture = capture
        self._graphs: dict[Shape, Any] = {}
        self._seen: set[Shape] = set()

    def run(self, shape: Shape, step: DeviceInputs) -> Any:
        if not self._capture or shape != padded(shape, self._program.spare_splits):
            return self.launch(step)
        if shape not in self._seen:
            self._seen.add(shape)
            return self.launch(step)
        if shape not in self._graphs and not (self._has_room() and self._capture_shape(shape, step)):
            return self.launch(step)
        self._graphs[shape].replay()
        return self._program.answer_of(shape.sampled)

    def launch(self, step: DeviceInputs) -> Any:
        self._program.run_tokens(step)
        return self._program.run_sampled(step, len(step.sampled))

    def has(self, shape: Shape) -> bool:
        return shape in self._graphs

    def forget(self) -> None:
        """Drops all graphs; must be called when something that graphs read has moved, or when memory is short."""
        self._graphs.clear()

    def forget_adapters(self) -> None:
        """Drops the graphs of steps with adapters; must be called when what all adapters share has moved or grown."""
        for shape in [shape for shape in self._graphs if shape.adapter_tiles]:
            del self._graphs[shape]

    def _has_room(self) -> bool:
        return len(self._graphs) < MAX_GRAPHS and torch.cuda.mem_get_info()[0] >= CAPTURE_MEMORY

    def _capture_shape(self, shape: Shape, step: DeviceInputs) -> bool:
        try:
            self._graphs[shape] = self._captured(step)
        except RuntimeError as error:  # no memory, among others
            log.warning("steps are launched without graphs from here on: %s", error)
            self._capture = False
            self.forget()
            return False
        return True

    def _captured(self, step: DeviceInputs) -> Any:
        graph = torch.cuda.CUDAGraph()
        with no_collection():  # freeing a device's memory would end the capture
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.launch(step)
            finally:
                graph.capture_end()
        return graph

"""Plans the attention of a step: how its tokens and contexts are divided among the programs of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.backend.base import Batch, Ints
from penstock.backend.cuda.adapter_tiles import DECODE_ROWS, PROMPT_ROWS, AdapterTiles, adapter_tiles
from penstock.backend.cuda.contexts import NO_CONTEXTS, ExpandedContexts
from penstock.backend.cuda.kv_expansion import KvExpansion
from penstock.backend.cuda.mla_expansion import MlaExpansion
from penstock.backend.cuda.shared_prefixes import (
    MOST_TOKENS,
    SharedPrefixes,
    Sharing,
    find_shared_prefixes,
)
from penstock.backend.cuda.shared_prefixes import SPARE_SPLITS as SHARED_SPARE
from penstock.backend.cuda.shared_prefixes import SPLITS as SHARED_SPLITS

SPARE_SPLITS = 64  # beyond one for each row, so that few long contexts still fill the device
MOST_SPARE = 256  # the same, where few programs attend to a split
FILLED = 512  # programs that fill a large device
SHORTEST_SPLIT = 64
MOST_VERIFIED = 65  # tokens of a row that verifies a draft: the longest draft, and the token before it
FEW_TOKENS = 17  # a row of at most this many always attends as if it verified a draft
RUNS = 1, 4, 16  # tokens of such a row that attend together, at most: more where that spares enough reading
RUN_QUERIES = 64  # pairs of token and head of a run, at most
LONG_RUNS = 64  # runs of the largest size that a step has room for
SPARED = 36864, 16384  # positions that longer runs must spare reading, because it takes longer to join their splits
ROW = 1  # the column of splits and of tiles that names a row of tables


class Shape(NamedTuple):
    """Says how many of everything a step has room for."""

    tokens: int
    sampled: int
    decodes: int  # tokens that attend as decoding rows do
    splits: int  # pieces that their contexts are split into
    tiles: int  # runs of all other tokens
    adapter_tiles: int = 0  # runs of tokens with one adapter; 0: no row has one
    run: int = 0  # tokens of a row that attend together, at most; 0: no row has several but in tiles
    shared: int = 0  # pieces that prefixes are split into which several rows have in common
    expanded: int = 0  # blocks of contexts that are expanded for the tokens of tiles; 0: none are
    segmented: bool = False  # all rows attend in runs: see segments.py; `decodes` counts rows


NO_SPLITS: Ints = np.zeros((0, 8), np.int32)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Divides the attention and the adapters of a batch; `shape` is the step's."""

    shape: Shape
    splits: Ints  # [P, 8]
    tiles: Ints  # [Q, 5]
    adapters: AdapterTiles
    shared: SharedPrefixes | None
    shared_splits: Ints  # [U, 8]
    contexts: ExpandedContexts = NO_CONTEXTS


def plan_attention(
    batch: Batch,
    tile_tokens: int,
    pad: Callable[[Shape], Shape],
    most_decodes: int = 0,
    run_sizes: Sequence[int] = (1,),
    sharing: Sharing | None = None,
    expansion: MlaExpansion | KvExpansion | None = None,
    spare: int = SPARE_SPLITS,
) -> AttentionPlan:
    """Divides the batch's attention into splits and tiles, and its tokens by adapters. `pad` turns the batch's shape
    into the step's. If all rows decode or verify drafts and have at most `most_decodes` tokens together, they attend in
    runs of one of the `run_sizes`. With `sharing`, decoding rows attend together to common prefixes. With `expansion`,
    contexts of prompts may be expanded; for MLA they must come after all other rows, and `tile_tokens` does not count,
    because heads then have their own keys. At most `spare` splits are made beyond one for each run."""
    counts = np.diff(batch.row_start)
    verifies = only_verifies(batch, counts, most_decodes)
    rows = np.flatnonzero((counts > 0) if verifies else counts == 1).astype(np.int32)
    run = run_size(counts, batch.positions[batch.row_start[1:] - 1] + 1, run_sizes) if verifies else 0
    first, owners, sizes = runs_of(batch, rows, max(run, 1))
    lengths = batch.positions[first + sizes - 1] + 1
    shared = find_shared_prefixes(batch.tables[0, rows], first, lengths, sharing) if sharing and not verifies else None
    splits = split_contexts(first, owners, lengths, sizes, None if shared is None else shared.starts, spare)
    pieces = NO_SPLITS if shared is None else split_shared(shared, rows)
    prompts = np.flatnonzero((counts > 1) & (not verifies)).astype(np.int32)
    come_last = not len(first) or first[-1] < len(first)
    contexts = NO_CONTEXTS
    if expansion and len(prompts) and (come_last or not expansion.prompts_last):
        contexts = expansion.place(batch, prompts)
    if expansion and contexts.room:
        tile_tokens = expansion.tile_tokens or tile_tokens
    tiles = tiles_of(batch, prompts.tolist(), tile_tokens)
    adapters = adapter_tiles(batch, PROMPT_ROWS if len(tiles) else DECODE_ROWS)
    shape = pad(
        Shape(
            len(batch.tokens),
            len(batch.sampled),
            int(sizes.sum()),
            len(splits),
            len(tiles),
            len(adapters.tiles),
            run,
            len(pieces),
            contexts.room,
        )
    )
    return AttentionPlan(shape, splits, tiles, adapters, shared, pieces, contexts)


def split_shared(shared: SharedPrefixes, rows: Ints) -> Ints:
    """Returns the splits of shared prefixes, whose rows are some of `rows` of the batch."""
    return split_contexts(shared.first, rows[shared.rows], shared.lengths, shared.sizes, spare=SHARED_SPARE)


def only_verifies(batch: Batch, counts: Ints, most: int) -> bool:
    """Returns True if some rows of a step verify drafts (several tokens, more than one of them sampled, not the
    beginning of a prompt) and all others decode. A row of few tokens counts as verifying: a draft model has two after a
    fully accepted draft, a head has all accepted ones. The step has at most `most` tokens."""
    several = counts > 1
    if not several.any() or len(batch.tokens) > most:
        return False
    begins = batch.positions[batch.row_start[:-1]] == 0
    drafted = (counts <= MOST_VERIFIED) & ((counts <= FEW_TOKENS) | (np.diff(batch.sample_start) > 1)) & ~begins
    return bool(drafted[several].all())


def run_sizes_of(group: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(max(min(size, RUN_QUERIES // group), 1) for size in RUNS))


def run_size(counts: Ints, lengths: Ints, sizes: Sequence[int]) -> int:
    best = sizes[0]
    for size, least in zip(sizes[1:], SPARED, strict=False):
        runs = -(-counts // size)
        if ((-(-counts // best) - runs) * lengths).sum() < least or runs.sum() > most_runs(int(counts.sum()), size):
            break
        best = size
    return best


def most_runs(rows: int, size: int) -> int:
    return min(rows, LONG_RUNS) if size > RUNS[1] else rows


def runs_of(batch: Batch, rows: Ints, size: int) -> tuple[Ints, Ints, Ints]:
    """Divides rows into runs of at most `size` tokens; returns their first tokens, their rows and their sizes."""
    if size == 1 and len(rows) == len(batch.tokens):  # all decode
        return batch.row_start[:-1], rows, np.ones_like(rows)
    start, end = batch.row_start[rows], batch.row_start[rows + 1]
    counts = -(-(end - start) // size)
    of_row = np.repeat(np.arange(len(rows)), counts)
    first = start[of_row] + (np.arange(len(of_row)) - (np.cumsum(counts) - counts)[of_row]) * size
    return first, rows[of_row], np.minimum(end[of_row] - first, size)


def spare_splits(programs: int) -> int:
    return min(max(FILLED // programs, SPARE_SPLITS), MOST_SPARE)


def split_lines(rows: int, run_sizes: Sequence[int], spare: int = SPARE_SPLITS) -> int:
    """Returns the most tokens of splits in a step of `rows` rows: each has a line in SplitKV. Shared prefixes come
    after rows."""
    runs = max((most_runs(rows, size) + spare) * size for size in run_sizes)
    return max(runs, rows + spare + SHARED_SPLITS * MOST_TOKENS)


def split_contexts(
    tokens: Ints, rows: Ints, lengths: Ints, sizes: Ints, starts: Ints | None = None, spare: int = SPARE_SPLITS
) -> Ints:
    """Returns splits of about the same size: of runs of `sizes` tokens, from `tokens` on, whose last sees `lengths`
    positions, from `starts` on. There are at most `spare` more splits than runs, and about SPARE_SPLITS of one context,
    which has to join them. The last split of a context also takes a rest of less than half a split. The longest
    contexts come first, so that none is left for the end."""
    starts = np.zeros_like(lengths) if starts is None else starts
    longest = np.argsort(starts - lengths, kind="stable")
    tokens, rows, lengths, sizes, starts = (each[longest] for each in (tokens, rows, lengths, sizes, starts))
    seen = lengths - starts
    size = max(SHORTEST_SPLIT, -(-int(seen.sum()) // spare), -(-int(seen.max(initial=0)) // SPARE_SPLITS))
    size = -(-size // SHORTEST_SPLIT) * SHORTEST_SPLIT
    counts = np.maximum((seen + size // 2) // size, 1)  # [D]
    first = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(rows)), counts)  # [P]
    index = np.arange(len(owner)) - first[owner]
    begin = starts[owner] + index * size
    end = np.where(index == counts[owner] - 1, lengths[owner], begin + size)
    columns = [tokens[owner], rows[owner], begin, end, lengths[owner], counts[owner], first[owner], sizes[owner]]
    return np.stack(columns, axis=1).astype(np.int32)


def tiles_of(batch: Batch, rows: Sequence[int], tile_tokens: int) -> Ints:
    """Returns the runs of at most `tile_tokens` tokens that rows are divided into. The longest contexts come first, so
    that none is left for the end."""
    tiles = [
        (token, row, batch.positions[token], min(tile_tokens, last - token), batch.positions[last - 1] + 1)
        for row in rows
        for token, last in _runs(batch, row, tile_tokens)
    ]
    tiles.sort(key=lambda tile: -tile[2])
    return np.array(tiles, np.int32).reshape(-1, 5)


def _runs(batch: Batch, row: int, tile_tokens: int) -> Iterator[tuple[int, int]]:
    first, last = int(batch.row_start[row]), int(batch.row_start[row + 1])
    return ((token, last) for token in range(first, last, tile_tokens))

"""Makes inputs of the ops that store hidden states in KV blocks and load them (see cases.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.ref.cases import HALF, Case, Random, Trial, inputs, scattered
from penstock.model.ops import Ops

WIDTH = 33
LENGTHS = (5, 40, 17)


def loaded_again(rng: Random, *, longest: int) -> Trial:
    """Stores two kinds of rows and loads both, in the same step."""

    def forward(ops: Ops[Any], table: Any, other: Any) -> Any:
        ops.store_hidden(0, ops.embed(table))
        ops.store_hidden(1, ops.embed(other))
        return ops.concat(ops.load_hidden(1, 2 * WIDTH), ops.load_hidden(0, WIDTH))

    tables = [inputs(rng, sum(LENGTHS), width) for width in (WIDTH, 2 * WIDTH)]
    return Trial(forward, tables, *scattered(rng, LENGTHS, longest))


def stored_ahead(rng: Random) -> Trial:
    """Stores the sampled rows one position ahead, where the next step loads them, also in the next block."""

    def forward(ops: Ops[Any], table: Any) -> Any:
        x = ops.embed(table)
        found = ops.load_hidden(0, WIDTH)
        ops.store_hidden(0, ops.take_sampled(x), ahead=1)
        return ops.add(x, found)

    starts, tables = (14, 3), ([2, 0], [3, 1])
    steps = [
        greedy_batch([Chunk([8 * row + step], start + step, tables[row], row) for row, start in enumerate(starts)])
        for step in range(4)
    ]
    return Trial(forward, [inputs(rng, 16, WIDTH)], steps, 4)


HIDDEN_CASES = (
    Case("load_hidden", "two kinds", "F32", HALF, partial(loaded_again, longest=16)),
    Case("load_hidden", "one by one", "F32", HALF, partial(loaded_again, longest=1)),
    Case("store_hidden", "ahead", "F32", HALF, stored_ahead),
)

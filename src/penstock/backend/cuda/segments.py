"""Plans attention so that a token's sums depend on its own context alone (`--deterministic`). It imports no torch.

A context is divided into segments at multiples of SEGMENT positions, and what a token finds in them is joined in their
order, one by one (kernels/segmented_attention.py). Which program takes which segments changes nothing about that: where
a step has few runs of tokens, the longest contexts are split among programs of one segment each, and joined by the last
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from penstock.backend.base import Batch, Ints
from penstock.backend.cuda.adapter_tiles import NO_TILES
from penstock.backend.cuda.inputs import NO_SPLITS, AttentionPlan, Shape, runs_of
from penstock.errors import ConfigError
from penstock.model.program import OpNode

SEGMENT = 512  # positions
MOST_SPLITS = 128  # of a step with so many runs or fewer
REFUSED = {  # ops whose sums depend on how a prompt was divided into steps, or on the rows beside it
    "attend_mla": "latent attention (MLA)",
    "select_positions": "sparse attention",
    "delta_net": "recurrent layers",
    "mamba2": "recurrent layers",
    "selective_scan": "recurrent layers",
    "causal_conv": "recurrent layers",
}


def check_ops(nodes: Iterable[OpNode]) -> None:
    """Raises ConfigError for a model with an op that is not computed alike in every step."""
    for node in nodes:
        what = REFUSED.get(node.op, "")
        if node.op == "attend" and not node.attributes["spec"].causal:
            what = "attention that is not causal (an encoder)"
        if what:
            raise ConfigError(
                f"deterministic is not possible on a GPU for a model with {what}: leave it out, or use device cpu, "
                "where answers never depend on the batch"
            )


def check_kv(kv: str, *, apart: bool) -> None:
    """Raises ConfigError for a KV cache whose keys and values lie apart, which the kernel does not read."""
    if apart:
        raise ConfigError(
            f"deterministic is not possible on a GPU with --kv {kv}: leave out one of them, or give int8 or fp8"
        )


def plan_segments(batch: Batch, run: int, pad: Callable[[Shape], Shape]) -> AttentionPlan:
    """Divides all rows of a batch, whether they are prompts, answers or drafts, into runs of at most `run` tokens, and
    their contexts into splits. `pad` makes the step's shape of the batch's own."""
    rows = np.flatnonzero(np.diff(batch.row_start) > 0).astype(np.int32)
    first, owners, sizes = runs_of(batch, rows, run)
    splits = split_at_segments(first, owners, batch.positions[first + sizes - 1] + 1, sizes)
    shape = Shape(len(batch.tokens), len(batch.sampled), len(rows), len(splits), 0, run=run, segmented=True)
    return AttentionPlan(pad(shape), splits, np.zeros((0, 5), np.int32), NO_TILES, None, NO_SPLITS)


def split_at_segments(tokens: Ints, rows: Ints, lengths: Ints, sizes: Ints) -> Ints:
    """Returns splits as `inputs.split_contexts` does: of one segment each, or of a whole context. The longest contexts
    come first, and are split as long as the step has no more than MOST_SPLITS."""
    longest = np.argsort(-lengths, kind="stable")
    tokens, rows, lengths, sizes = (each[longest] for each in (tokens, rows, lengths, sizes))
    counts = -(-lengths // SEGMENT)
    counts[np.cumsum(counts - 1) > max(MOST_SPLITS - len(rows), 0)] = 1
    first = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(rows)), counts)  # [P]
    index = np.arange(len(owner)) - first[owner]
    begin = index * SEGMENT
    end = np.where(index == counts[owner] - 1, lengths[owner], begin + SEGMENT)
    columns = [tokens[owner], rows[owner], begin, end, lengths[owner], counts[owner], first[owner], sizes[owner]]
    return np.stack(columns, axis=1).astype(np.int32)


def most_splits(tokens: int, rows: int, run: int) -> int:
    """Returns how many splits a step of at most so many tokens and rows can have."""
    return max(min(tokens, tokens // max(run, 1) + rows), MOST_SPLITS)

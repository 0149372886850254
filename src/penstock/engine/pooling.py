"""Says what the rows of a plan add to embeddings."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.backend.base import Pool
from penstock.core import Sequence
from penstock.types import StepPlan


def pools(plan: StepPlan, sequences: Mapping[int, Sequence], kinds: Mapping[int, str]) -> tuple[Pool, ...]:
    """Returns what to pool in a step. `kinds` says how the sequences that become embeddings are pooled, by id. A mean
    starts anew wherever its sequence does, so one that was preempted counts no token twice."""
    found: list[Pool] = []
    last = 0
    for index, row in enumerate(plan.rows):
        first, last = last, last + row.count
        if row.seq not in kinds:
            continue
        computed = row.start + row.count
        ends = computed == sequences[row.seq].prompt_len
        if kinds[row.seq] == "mean":
            found.append(Pool(index, first, last, row.start == 0, computed if ends else 0))
        elif kinds[row.seq] == "cls" and row.start == 0:
            found.append(Pool(index, first, first + 1, True, 1))
        elif kinds[row.seq] == "last" and ends:
            found.append(Pool(index, last - 1, last, True, 1))
    return tuple(found)

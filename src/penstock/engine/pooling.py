"""Says which hidden states of a plan's rows are added up to embeddings."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.backend.base import Pool
from penstock.core import Sequence
from penstock.engine.record import RequestRecord
from penstock.types import StepPlan


def pools(plan: StepPlan, sequences: Mapping[int, Sequence], records: Mapping[int, RequestRecord]) -> tuple[Pool, ...]:
    """Returns what is pooled in a step. A mean starts anew wherever its sequence does, so one that was preempted counts
    no token twice."""
    found: list[Pool] = []
    last = 0
    for index, row in enumerate(plan.rows):
        first, last = last, last + row.count
        kind = records[row.seq].pooling
        computed = row.start + row.count
        ends = computed == sequences[row.seq].prompt_len
        if kind == "mean":
            found.append(Pool(index, first, last, row.start == 0, computed if ends else 0))
        elif kind == "cls" and row.start == 0:
            found.append(Pool(index, first, first + 1, True, 1))
        elif kind == "last" and ends:
            found.append(Pool(index, last - 1, last, True, 1))
    return tuple(found)

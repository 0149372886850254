"""Defines what the engine counts of drafted tokens. `types` has all of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class DraftCounts(NamedTuple):
    """Counts tokens that one source has drafted."""

    source: str  # prediction, text, recent or model
    drafted: int = 0
    accepted: int = 0
    drafts: int = 0  # in which they were drafted

    def plus(self, other: DraftCounts) -> DraftCounts:
        """Returns the counts of both."""
        counts = (mine + more for mine, more in zip(self[1:], other[1:], strict=True))
        return DraftCounts(self.source, *counts)


def add_drafts(every: Iterable[DraftCounts]) -> tuple[DraftCounts, ...]:
    """Returns counts added up by their sources."""
    found: dict[str, DraftCounts] = {}
    for counts in every:
        found[counts.source] = found.get(counts.source, DraftCounts(counts.source)).plus(counts)
    return tuple(found.values())

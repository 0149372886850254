"""Defines what the engine counts of KV blocks on disk. `types` has all of it."""

from __future__ import annotations

from typing import NamedTuple


class DiskCounts(NamedTuple):
    """Counts KV blocks on disk."""

    blocks: int = 0  # that can be read
    bytes: int = 0  # that they take
    written: int = 0  # blocks, as all that follow
    dropped: int = 0  # to make room for others
    read: int = 0
    given_up: int = 0  # loads, because computing was sooner
    skipped: tuple[tuple[str, int], ...] = ()  # what was of no use, by reason

    def plus(self, other: DiskCounts) -> DiskCounts:
        """Returns the counts of both."""
        skipped = {reason: dict(self.skipped).get(reason, 0) for reason, _ in (*self.skipped, *other.skipped)}
        for reason, count in other.skipped:
            skipped[reason] += count
        names = DiskCounts._fields[:-1]
        added = {name: getattr(self, name) + getattr(other, name) for name in names}
        return DiskCounts(**added, skipped=tuple(sorted(skipped.items())))

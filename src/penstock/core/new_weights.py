"""Keeps KV of weights that were replaced from being taken for that of the new ones."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.recent import RecentStreams
from penstock.core.scheduler import Scheduler


def change_salts(scheduler: Scheduler, salts: Mapping[int, str], recompute: bool) -> None:
    """Gives all sequences other salts, by id, because weights have changed: nothing of the old ones is reused. With
    `recompute` running sequences are preempted, so that their KV is computed again; else they keep it for themselves.
    No step is in flight."""
    for seq in list(scheduler.running):
        if recompute:
            scheduler.preempt(seq)
        else:
            scheduler.cache.isolate(seq)
    for seq in scheduler.sequences.values():
        seq.salt, seq.block_hashes, seq.awaited_hash = salts[seq.id], [], None
    scheduler.cache.flush()
    scheduler.recent = RecentStreams()

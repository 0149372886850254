"""Adds up the statistics of replicas, also of those that have ended: a counter never goes back."""

from __future__ import annotations

from penstock.fleet.directory import ReplicaInfo
from penstock.server.telemetry.metrics import sum_stats
from penstock.types import Stats

GAUGES = (  # current values; all other fields are counters
    *("running", "waiting", "blocks_free", "blocks_used", "blocks_cached", "adapter_slots", "adapter_bytes"),
    *("adapters", "host_blocks", "host_places", "in_line", "uncached_tokens", "step_seconds"),
    *("background", "background_tokens", "prefilling"),
)
NOTHING = Stats()
NOW = {name: getattr(NOTHING, name) for name in GAUGES}


class FleetTotals:
    """Keeps the last statistics of every replica, in its present life, and the counts of all lives before."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[int, Stats]] = {}  # name -> epoch, statistics
        self._ended = NOTHING

    def note(self, replica: ReplicaInfo, stats: Stats) -> None:
        before = self._latest.get(replica.name)
        if before is not None and before[0] != replica.epoch:
            self.forget(replica.name)
        self._latest[replica.name] = replica.epoch, stats

    def end(self, replica: ReplicaInfo) -> None:
        """Notes a lost replica. It may come back in the same life, if only the connection was lost."""
        if (last := self._latest.get(replica.name)) is not None:
            self._latest[replica.name] = last[0], last[1]._replace(**NOW)

    def forget(self, replica: str) -> None:
        if (last := self._latest.pop(replica, None)) is not None:
            self._ended = sum_stats([self._ended, last[1]._replace(**NOW)])

    def latest(self, replica: str) -> Stats:
        return self._latest.get(replica, (0, NOTHING))[1]

    def sum(self) -> Stats:
        return sum_stats([self._ended, *(stats for _, stats in self._latest.values())])

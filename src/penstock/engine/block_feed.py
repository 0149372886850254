"""Publishes the contents of the prefix cache and the engine's load, for routers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.block_events import BlockEvents
from penstock.engine.feature import Feature
from penstock.engine.router_stats import RouterStats
from penstock.types import BlockEvent, BlockSnapshot


class NoBlockFeed(Feature):
    """Publishes nothing."""

    def take(self) -> list[BlockEvent]:
        """Returns the block events since the last call."""
        return []

    def snapshot(self) -> BlockSnapshot:
        """Returns the chain hashes of all blocks in the prefix cache."""
        return BlockEvents(0).snapshot(())


class BlockFeed(NoBlockFeed):
    """Publishes block events, which the scheduler records in `events`, and what a router compares replicas by."""

    def __init__(self, events: BlockEvents) -> None:
        self._events = events
        self._router_stats = RouterStats()

    def take(self) -> list[BlockEvent]:
        return self._events.take()

    def snapshot(self) -> BlockSnapshot:
        return self._events.snapshot(self.engine.scheduler.cache.trie.nodes())

    def stats(self) -> Mapping[str, Any]:
        return self._router_stats.fields(self.engine.scheduler)

    def hello(self) -> Mapping[str, Any]:
        return {"epoch": self._events.epoch}

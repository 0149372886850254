"""Publishes the contents of the prefix cache and the engine's load, for routers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core import Scheduler, Sequence
from penstock.core.block_events import BlockEvents
from penstock.engine.feature import Feature
from penstock.types import BlockEvent, BlockSnapshot


class RouterStats:
    """Counts the tokens of prompts that are to be computed. It looks each waiting prompt up in the prefix cache once,
    when it is first counted."""

    def __init__(self) -> None:
        self._cached: dict[int, int] = {}  # tokens of waiting prompts that the cache held then, by sequence

    def fields(self, scheduler: Scheduler) -> dict[str, Any]:
        tokens, later = self._uncached(scheduler)
        background = len(scheduler.sequences) - scheduler.tenants.foreground
        return {"uncached_tokens": tokens + later, "background": background, "background_tokens": later}

    def _uncached(self, scheduler: Scheduler) -> tuple[int, int]:
        """Returns how many tokens of prompts are neither computed, nor in a step, nor cached: of requests that are not
        to wait, and of those that may."""
        left = [(seq.params.background, max(seq.prompt_len - seq.planned, 0)) for seq in scheduler.running]
        if scheduler.tenants.waiting:
            waiting = [seq for tenant in scheduler.tenants.in_line() for seq in tenant.line]
            self._cached = {seq.id: self._held(scheduler, seq) for seq in waiting}
            left += [(seq.params.background, len(seq.tokens) - self._cached[seq.id]) for seq in waiting]
        else:
            self._cached.clear()
        later = sum([tokens for background, tokens in left if background])
        return sum([tokens for _, tokens in left]) - later, later

    def _held(self, scheduler: Scheduler, seq: Sequence) -> int:
        known = self._cached.get(seq.id)
        return len(scheduler.cache.prefixes.match(seq)) * scheduler.cache.block_size if known is None else known


class NoBlockFeed(Feature):
    """Publishes nothing."""

    def take(self) -> list[BlockEvent]:
        return []

    def snapshot(self) -> BlockSnapshot:
        return BlockEvents(0).snapshot(())


class BlockFeed(NoBlockFeed):
    """Publishes block events, which the scheduler records in `events`, and the load that a router compares replicas
    by."""

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

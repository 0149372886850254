"""Counts tokens and preemptions of a scheduler."""

from __future__ import annotations

from collections import Counter

from penstock.core.kvcache import KvCache
from penstock.core.sequence import Sequence
from penstock.core.tenants import Tenants
from penstock.types import Stats


class Counters:
    """Adds up tokens and preemptions."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.preemptions = 0
        self._reused = Counter[str]()  # tokens by tier

    def admit(self, seq: Sequence, now: float) -> None:
        seq.times.admitted = now
        seq.times.cached = min(seq.computed, seq.prompt_len)
        self.prompt_tokens += seq.prompt_len
        self.cached_tokens += seq.times.cached
        self._reused.update(dict(seq.times.reused))

    def stats(self, cache: KvCache, steps: int, running: int, tenants: Tenants) -> Stats:
        cached, free = cache.trie.idle_blocks, len(cache.pool)
        return Stats(
            running=running,
            waiting=tenants.waiting,
            blocks_free=free,
            blocks_used=cache.pool.total - free - cached,
            blocks_cached=cached,
            steps=steps,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            preemptions=self.preemptions,
            reused=tuple(self._reused.items()),
            host_blocks=cache.host.used,
            host_places=cache.host.total,
            copied_in=cache.host.copied_in,
            copied_out=cache.host.copied_out,
            in_line=tenants.waiting,
            prefilling=tuple(tenants.prefilling),
        )

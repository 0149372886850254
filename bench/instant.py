"""Is an engine whose model takes no processor time: what is left is the cost of everything around a model."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from penstock.backend.fake import FakeBackend
from penstock.config import Config
from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.types import Limits, RowResult, StepResult

LIMITS = Limits(max_len=4096, max_rows=1024, step_tokens=16384, block_size=16, num_blocks=32768, vocab=49152)
FIRST, COUNT = 1000, 2000  # the tokens that are answered in turn: whole words in most vocabularies


class Instant(FakeBackend):
    """Is a backend that answers each step after `pause` seconds without computing, and all rows of it alike."""

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__(LIMITS.vocab)
        self.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
        self._pause = pause
        self._results: dict[int, tuple[float, StepResult]] = {}
        self._ready = 0.0  # when the device ends what it was given, by the monotonic clock

    def launch(self, batch: Any) -> int:
        token = FIRST + batch.step % COUNT
        rows = (RowResult((token,) * (last - first)) for first, last in pairwise(batch.sample_start.tolist()))
        self._ready = max(self._ready, time.monotonic()) + self._pause
        self._results[batch.step] = self._ready, StepResult(batch.step, tuple(rows))
        return int(batch.step)

    def wait(self, ticket: int) -> StepResult:
        ready, result = self._results.pop(ticket)
        time.sleep(max(ready - time.monotonic(), 0.0))
        return result


def open_instant(config: Config, pause: float = 0.0) -> Engine:
    return assemble(Instant(pause), LIMITS, block_events=bool(config.listen))

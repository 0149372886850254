"""Remembers an engine's last steps, which a client reads off the statistics that come after each."""

from __future__ import annotations

from collections import deque
from time import time
from typing import NamedTuple

from penstock.types import Stats

KEPT = 240  # steps: a few seconds of a busy engine


class StepSample(NamedTuple):
    """Describes one step, or a few whose statistics came together."""

    at: float  # when it was known here, in seconds since 1970
    step: int  # its number
    seconds: float  # duration
    tokens: int  # computed, of prompts and answers
    generated: int  # tokens of answers
    running: int  # requests, afterwards
    waiting: int
    blocks_used: int


class StepHistory:
    """Keeps the last steps of one engine."""

    def __init__(self) -> None:
        self.samples: deque[StepSample] = deque(maxlen=KEPT)

    def note(self, before: Stats, after: Stats) -> None:
        """Takes the statistics of an engine and those before them. Another engine's begin with fewer steps."""
        if after.steps <= before.steps:
            return
        sample = StepSample(
            time(),
            after.steps,
            after.busy_seconds - before.busy_seconds,
            after.computed_tokens - before.computed_tokens,
            after.generated_tokens - before.generated_tokens,
            after.running,
            after.waiting,
            after.blocks_used,
        )
        self.samples.append(sample)

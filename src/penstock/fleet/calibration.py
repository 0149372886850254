"""Fits the router's timing to what engines have measured of their own steps."""

from __future__ import annotations

from penstock.fleet.timing import EngineTiming
from penstock.types import Limits

FIRST = (5e-4, 0.0, 5e-3)  # seconds of a prompt's token, of a pair of such, of a step that answers: until one is known
KEEP = 0.95  # weight of the old estimate at each new report
PULL = 5e-5  # seconds that a token takes to be read from another replica, until that is known
OFFERED = 2.0  # times as long as reading takes: the other has to offer it, and it has to be put in place
CHANGED = 0.1  # the share by which a time has to differ from the router's before that gets another
MOST = 10.0  # seconds; a longer step was interrupted and does not count


class TimingFit:
    """Averages the step times that replicas report. They are engines of the same model, on machines of the same
    kind."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._seconds = list(FIRST)
        self._known = [False] * len(FIRST)
        self._pull = PULL
        self.timing = self._make()
        self._used = tuple(FIRST)

    def observe_pulls(self, tokens: int, seconds: float) -> bool:
        """Takes a replica's counts of blocks read from others; returns whether `timing` has changed."""
        if not tokens:
            return False
        new = OFFERED * seconds / tokens
        changed = abs(new - self._pull) > CHANGED * self._pull
        if changed:
            self._pull, self.timing = new, self.timing._replace(pull_ms_per_token=1000 * new)
        return changed

    def observe(self, seconds: tuple[float, ...]) -> bool:
        """Takes a report; returns whether `timing` has changed because of it."""
        prompts_known = max(seconds[:2], default=0.0) > 0  # one of the two may be nothing
        for at, new in enumerate(seconds[: len(FIRST)]):
            if new < MOST and (new > 0 or (at < 2 and prompts_known)):
                keep = KEEP if self._known[at] else 0.0
                self._seconds[at] = keep * self._seconds[at] + (1 - keep) * new
                self._known[at] = True
        pairs = zip(self._seconds, self._used, strict=True)
        if all(abs(new - old) <= CHANGED * old for new, old in pairs):
            return False
        self._used, self.timing = tuple(self._seconds), self._make()
        return True

    def _make(self) -> EngineTiming:
        token, pair, answer = (1000 * seconds for seconds in self._seconds)
        limits = self._limits
        return EngineTiming(
            prefill=(pair / 2, token, 0.0),
            decode=(0.0, 0.0, answer),
            kv_tokens=limits.num_blocks * limits.block_size // len(limits.windows),
            step_tokens=limits.step_tokens,
            max_rows=limits.max_rows,
            prefill_budget=limits.prefill_budget,
            pull_ms_per_token=1000 * self._pull,
            context_ms=pair,
        )

"""Forecasts how long a request would wait for its first token, and refuses at once what would wait too long.

The server decides this without asking the engine, which may be in the middle of a step. It knows which prompts of which
tenants have no first token yet, and measures how fast they get it while some have to wait. Nothing is refused before
that was measured, nor while nothing waits: a slow machine with one user refuses nobody.

The forecast is pure: it has no clock. Times come in as arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf

from penstock.errors import WaitTooLong
from penstock.types import Claim, Request

MEMORY = 4.0  # seconds of waiting over which rates are averaged
MEASURED = 1.0  # seconds of waiting after which rates are used
CERTAIN = 0.8  # share of the allowed time that a forecast may take: some forecasts are too low
OWN_SHARE = 0.25  # of the allowed time that a prompt may wait which alone takes longer
BIAS = (0.5, 3.0)  # bounds of how much longer than forecast waits turn out
BIAS_WEIGHT = 0.1  # of each request
WORTH_COMPARING = 0.2  # seconds: shorter waits say nothing about the forecast


@dataclass(slots=True)
class WaitingLine:
    """Adds up a tenant's requests that have no first token."""

    weight: float = 1.0
    requests: int = 0
    tokens: int = 0


@dataclass(slots=True)
class ExpectedRequest:
    """Remembers when a request was sent to the engine, and what was forecast for it."""

    request: Request
    sent: float
    by_rates: float


class WaitForecast:
    """Follows the requests of one engine."""

    def __init__(self) -> None:
        self._lines: dict[str, WaitingLine] = {}
        self._expected: dict[int, ExpectedRequest] = {}
        self._tokens = self._requests = self._seconds = 0.0  # decayed: first tokens, and the time in which some waited
        self._bias = 1.0
        self._at: float | None = None  # when it was measured last

    def expect(self, request: Request) -> float:
        """Returns the seconds to a request's first token, by the rates alone; 0 if no other waits for one, or nothing
        was measured yet."""
        if not self._lines or self._seconds < MEASURED or not self._requests:
            return 0.0
        claim, size = request.claim, len(request.prompt)
        own = self._lines.get(claim.tenant, WaitingLine())
        others = sum(line.weight for name, line in self._lines.items() if name != claim.tenant)
        share = claim.weight / (claim.weight + others)
        requests = sum(line.requests for line in self._lines.values()) + 1
        tokens = sum(line.tokens for line in self._lines.values()) + size
        drained_requests = min((own.requests + 1) / share, requests) / self._requests
        drained_tokens = min((own.tokens + size) / share, tokens) / self._tokens
        return self._seconds * max(drained_requests, drained_tokens)

    def admit(self, request: Request, patience: float | None, now: float, waiting: int) -> None:
        """Counts a request that is sent to the engine, in which so many are `waiting`; raises WaitTooLong if it would
        wait for longer than its claim says or, without one, than `patience`. Background requests wait for as long as it
        takes."""
        self.measure(now, waiting)
        by_rates = 0.0 if request.background else self.expect(request)
        forecast = self._bias * by_rates
        allowed = allowed_wait(request.claim, patience)
        alone = self._seconds * len(request.prompt) / self._tokens if self._tokens else 0.0
        if forecast > max(CERTAIN * allowed, alone + OWN_SHARE * allowed):
            retry = max(forecast - CERTAIN * allowed, 1.0)
            raise WaitTooLong(
                f"the first token would come after about {forecast:.1f} s, and {allowed:.3g} s are allowed: retry in "
                f"{retry:.0f} s",
                retry_after=retry,
            )
        self._expected[request.id] = ExpectedRequest(request, now, by_rates)
        if not request.background:
            line = self._lines.setdefault(request.claim.tenant, WaitingLine())
            line.weight = request.claim.weight
            line.requests += 1
            line.tokens += len(request.prompt)

    def answer(self, id: int, now: float, waiting: int) -> None:
        """Takes note that a request got its first token. Further ones tell nothing."""
        expected = self._leave(id)
        if expected is None or expected.request.background:
            return
        self.measure(now, waiting)
        if waiting:
            self._requests += 1
            self._tokens += len(expected.request.prompt)
        if expected.by_rates > WORTH_COMPARING:
            ratio = (now - expected.sent) / expected.by_rates
            self._bias = min(max(self._bias + BIAS_WEIGHT * (ratio - self._bias), BIAS[0]), BIAS[1])

    def end(self, id: int) -> None:
        """Forgets a request that has ended, with or without a first token."""
        self._leave(id)

    def measure(self, now: float, waiting: int) -> None:
        """Lets time pass. It counts only while some wait."""
        passed, self._at = 0.0 if self._at is None else now - self._at, now
        if waiting:
            kept = exp(-passed / MEMORY)
            self._tokens, self._requests = kept * self._tokens, kept * self._requests
            self._seconds = kept * self._seconds + MEMORY * (1 - kept)

    def _leave(self, id: int) -> ExpectedRequest | None:
        expected = self._expected.pop(id, None)
        if expected is not None and not expected.request.background:
            tenant = expected.request.claim.tenant
            line = self._lines[tenant]
            line.requests -= 1
            line.tokens -= len(expected.request.prompt)
            if not line.requests:
                del self._lines[tenant]
        return expected


def allowed_wait(claim: Claim, patience: float | None) -> float:
    """Returns the seconds that a request's first token may take: its deadline, its target, or else `patience`."""
    stated = [time for time in (claim.deadline, claim.ttft) if time is not None]
    return min(stated) if stated else inf if patience is None else patience

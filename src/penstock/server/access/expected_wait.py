"""Forecasts how long a request would wait for its first token, and refuses at once what would wait too long.

The server decides this without asking the engine, which may be in the middle of a step. It knows which prompts of which
tenants have no first token yet, and the statistics of the engine tell how fast it computes prompts while some wait. In
front of several engines these are added up, and what waits is shared among them.
Nothing is refused before that was measured, nor while nothing waits: a slow machine with one user refuses nobody for a
target. A deadline that a prompt cannot meet even alone is refused by the engine, which knows what of it is cached.

The forecast is pure: it has no clock. Times come in as arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf

from penstock.errors import WaitTooLong
from penstock.types import Claim, Request, Stats

MEMORY = 4.0  # seconds with a line over which the rate is averaged
MEASURED = 1.0  # seconds with a line after which the rate is used
CERTAIN = 0.7  # share of the allowed time that a forecast may take: some forecasts are too low
OWN_SHARE = 0.25  # of the allowed time that a prompt may wait which alone takes longer
BIAS = (0.5, 3.0)  # bounds of how much longer than forecast waits turn out
BIAS_WEIGHT = 0.1  # of each request
WORTH_COMPARING = 0.2  # seconds: shorter waits tell nothing about the forecast


@dataclass(slots=True)
class WaitingLine:
    """Adds up a tenant's requests that have no first token."""

    weight: float = 1.0
    requests: int = 0
    tokens: int = 0  # of their prompts


class WaitingLines(dict[str, WaitingLine]):
    """Holds the line of each tenant that has requests without a first token."""

    def join(self, claim: Claim, tokens: int) -> None:
        """Counts a request whose prompt has so many tokens."""
        line = self.setdefault(claim.tenant, WaitingLine())
        line.weight = claim.weight
        line.requests += 1
        line.tokens += tokens

    def leave(self, claim: Claim, tokens: int) -> None:
        """Takes a request out again."""
        line = self[claim.tenant]
        line.requests -= 1
        line.tokens -= tokens
        if not line.requests:
            del self[claim.tenant]

    def tokens_until(self, claim: Claim, tokens: int) -> float:
        """Returns how many tokens of prompts are computed until one more request has its first token: its own line
        moves on by the tenant's share."""
        own = self.get(claim.tenant, WaitingLine())
        others = sum(line.weight for name, line in self.items() if name != claim.tenant)
        share = claim.weight / (claim.weight + others)
        return min((own.tokens + tokens) / share, sum(line.tokens for line in self.values()) + tokens)


@dataclass(slots=True)
class ExpectedRequest:
    """Remembers when a request was sent to the engine, and what was forecast for it."""

    request: Request
    sent: float
    by_rate: float


class WaitForecast:
    """Follows the requests of one engine."""

    def __init__(self) -> None:
        self._lines = WaitingLines()
        self._expected: dict[int, ExpectedRequest] = {}
        self._tokens = self._seconds = 0.0  # decayed: of prompts that were started, and of steps, while some waited
        self._bias = 1.0
        self._engines = 1
        self._last = Stats()

    def expect(self, request: Request) -> float:
        """Returns the seconds to a request's first token, by the rate alone; 0 if no other waits for one, or nothing
        was measured yet."""
        if not self._lines or self._seconds < MEASURED or not self._tokens:
            return 0.0
        own = len(request.prompt)
        before = self._lines.tokens_until(request.claim, own) - own
        return (before / self._engines + own) * self._seconds / self._tokens

    def admit(self, request: Request, patience: float | None, now: float) -> None:
        """Counts a request that is sent to the engine; raises WaitTooLong if it would wait for longer than its claim
        says or, without one, than `patience`. Background requests wait for as long as it takes."""
        by_rate = 0.0 if request.background else self.expect(request)
        forecast = self._bias * by_rate
        allowed = allowed_wait(request.claim, patience)
        alone = self._seconds * len(request.prompt) / self._tokens if self._tokens else 0.0
        if forecast > max(CERTAIN * allowed, alone + OWN_SHARE * allowed):
            retry = self.seconds_to_retry(request, patience)
            raise WaitTooLong(
                f"the first token would come after about {forecast:.1f} s, and {allowed:.3g} s are allowed: retry in "
                f"{retry:.0f} s",
                retry_after=retry,
            )
        self._expected[request.id] = ExpectedRequest(request, now, by_rate)
        if not request.background:
            self._lines.join(request.claim, len(request.prompt))

    def seconds_to_retry(self, request: Request, patience: float | None) -> float:
        """Returns after how many seconds a request that is not waited for may be sent again: by then the line will
        likely be short enough."""
        return max(self._bias * self.expect(request) - CERTAIN * allowed_wait(request.claim, patience), 1.0)

    def answer(self, id: int, now: float) -> None:
        """Takes note that a request got its first token. Further ones tell nothing."""
        expected = self._leave(id)
        if expected is not None and expected.by_rate > WORTH_COMPARING:
            ratio = (now - expected.sent) / expected.by_rate
            self._bias = min(max(self._bias + BIAS_WEIGHT * (ratio - self._bias), BIAS[0]), BIAS[1])

    def end(self, id: int) -> None:
        """Forgets a request that has ended, with or without a first token."""
        self._leave(id)

    def measure(self, stats: Stats, engines: int = 1) -> None:
        """Learns from the statistics of so many engines, added up. Only steps before which some waited tell how fast
        one is."""
        last, self._last, self._engines = self._last, stats, max(engines, 1)
        seconds, tokens = stats.busy_seconds - last.busy_seconds, max(_done(stats) - _done(last), 0)
        same = stats.prompt_tokens >= last.prompt_tokens  # counters start again with a new engine
        if last.in_line and seconds > 0 and same:
            kept = exp(-seconds / MEMORY)
            self._tokens = kept * self._tokens + MEMORY * (1 - kept) * tokens / seconds
            self._seconds = kept * self._seconds + MEMORY * (1 - kept)

    def _leave(self, id: int) -> ExpectedRequest | None:
        expected = self._expected.pop(id, None)
        if expected is not None and not expected.request.background:
            self._lines.leave(expected.request.claim, len(expected.request.prompt))
        return expected


def _done(stats: Stats) -> int:
    """Returns how many tokens of prompts are computed or cached. A long prompt counts step by step: counted at its
    start, it would make an engine look fast then, and slow for as long as it takes."""
    rejected = sum(each.drafted - each.accepted for each in stats.drafts)
    return stats.cached_tokens + stats.computed_tokens - stats.generated_tokens - rejected


def limit_of(claim: Claim) -> str:
    """Returns what says how long a request's first token may take: see `allowed_wait`."""
    if claim.deadline is None and claim.ttft is None:
        return "patience"
    return "ttft" if claim.deadline is None or (claim.ttft is not None and claim.ttft < claim.deadline) else "deadline"


def allowed_wait(claim: Claim, patience: float | None) -> float:
    """Returns the seconds that a request's first token may take: its deadline, its target, or else `patience`."""
    stated = [time for time in (claim.deadline, claim.ttft) if time is not None]
    return min(stated) if stated else inf if patience is None else patience

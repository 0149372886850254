"""Forecasts how long a request would wait for its first token, and refuses requests that would wait too long.

The server decides this without asking the engine, which may be in the middle of a step. It knows which prompts have no
first token yet, and how many of their tokens are uncached (`known_prefixes`). The engine's statistics contain the cost
of a token. An engine also answers while it computes prompts: see `AnswerTime`.

A request is admitted if nothing is ahead of it, or if costs were not measured yet. The other prompts of the same HTTP
request are not ahead: a list of prompts does not refuse itself. The engine refuses a deadline that a prompt cannot meet
on an idle engine.

The forecast is pure: times come in as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

from penstock.errors import WaitTooLong
from penstock.server.access.known_prefixes import BlockChain, KnownPrefixes
from penstock.server.access.waiting_lines import Place, WaitingLines, Work
from penstock.types import PROMPT_PATIENCE, Claim, Limits, Request, Stats

MARGIN = (1.25, 2.0)  # bounds of how many times the forecast a stated target or deadline has to allow
SCATTER = 0.15  # relative error of forecasts, until it is measured
SCATTERS = 3.0  # allowed multiple of that error: more than 99 of 100 waits are within it
OWN_SHARE = 0.25  # share of the allowed time that a prompt may wait if it takes longer by itself
BIAS = (0.5, 2.0)  # bounds of how much longer than forecast waits turn out
WEIGHT = 0.1  # weight of each request in the error of forecasts
WORTH_COMPARING = 0.2  # seconds: shorter waits tell nothing about the forecast
CLOSE = 1.5  # a forecast is wrong if wait and forecast differ by more than this factor
TOO_LOW, TOO_HIGH, RIGHT = "too_low", "too_high", "right"


class AnswerTime:
    """Measures how long an engine answers while prompts wait. The time is counted per first token and per second of
    prompts; a forecast uses the smaller one. Without measurements it is 0, which admits."""

    KEEP = 0.98  # share of earlier measurements that each first token keeps
    FEW = 4.0  # first tokens before anything is expected

    def __init__(self) -> None:
        self._answers = self._prompts = self._count = 0.0  # decayed: seconds of both, and first tokens

    def observe(self, answers: float, prompts: float) -> None:
        """Takes the seconds from one first token to the next."""
        keep = self.KEEP
        self._answers, self._prompts = keep * self._answers + answers, keep * self._prompts + prompts
        self._count = keep * self._count + 1

    def beside(self, prompts: float, requests: float) -> float:
        """Returns the seconds that answers take while `prompts` seconds of prompts are computed for `requests`
        requests."""
        if self._count < self.FEW:
            return 0.0
        by_prompts = prompts / self._prompts if self._prompts else inf
        return self._answers * min(by_prompts, requests / self._count)


@dataclass(slots=True, eq=False)
class ExpectedRequest:
    """Describes an admitted request and its forecast."""

    request: Request
    sender: object  # the HTTP request that it belongs to
    chain: BlockChain
    known: int  # tokens of its prompt that are remembered
    sent: float
    place: Place
    work: Work
    allowed: float = inf  # seconds to its first token
    by_model: float = 0.0  # seconds that were forecast, without bias; 0: nothing was ahead
    waits: bool = False  # it has no first token yet, and others wait behind it


class WaitOutcome(NamedTuple):
    """Compares the forecast and the allowed wait with the actual one."""

    late: bool  # the first token came later than allowed
    forecast: str  # too_low, too_high or right; empty: nothing was ahead, so nothing was forecast


class WaitForecast:
    """Follows the requests of one engine, or of several that share them."""

    def __init__(self) -> None:
        self._lines = WaitingLines()  # without requests in the background
        self._prefixes = KnownPrefixes()
        self._answer_time = AnswerTime()
        self._since = (0.0, 0.0)  # seconds of answers and of prompts since the last first token, while some waited
        self._bias, self._scatter = 1.0, SCATTER
        self._engines = 1
        self._stats = Stats()

    def measure(self, stats: Stats, engines: int = 1) -> None:
        """Learns from the summed statistics of `engines` engines. Only time during which requests wait counts."""
        last, self._stats, self._engines = self._stats, stats, max(engines, 1)
        prompts = stats.prompt_seconds - last.prompt_seconds
        answers = stats.busy_seconds - last.busy_seconds - prompts
        if not self._lines:
            self._since = (0.0, 0.0)
        elif prompts >= 0 and stats.busy_seconds >= last.busy_seconds:  # counters start again with a new engine
            self._since = (self._since[0] + max(answers, 0.0), self._since[1] + prompts)

    def admit(
        self,
        request: Request,
        patience: float | None,
        now: float,
        limits: Limits,
        sender: object = None,
        cached: int = 0,
    ) -> ExpectedRequest:
        """Counts a request that is sent to the engine; raises WaitTooLong if it would wait for longer than its claim
        allows or, without a claim, than `patience`. Background requests have no limit. `cached` tokens of the prompt
        are known to be cached."""
        expected = self._expect(request, object() if sender is None else sender, now, limits.block_size, cached)
        if not request.background:
            expected.allowed = allowed_wait(request.claim, patience)
            expected.by_model, own = self._forecast(expected, now)
            self._refuse_late(expected, own)
            self._lines.join(request, expected.sender, expected.place, expected.work)
            expected.waits = True
        self._prefixes.remember(expected.chain, self._most_blocks(limits))
        return expected

    def seconds_to_retry(self, expected: ExpectedRequest, now: float) -> float:
        """Returns after how many seconds a request that is not waited for may be sent again: by then few enough others
        will likely be ahead of it."""
        forecast, limit = self._forecast_and_limit(expected, *self._forecast(expected, now))
        return max(ceil(forecast - limit), 1) if limit < inf else 1

    def answer(self, expected: ExpectedRequest, now: float, cached: int) -> WaitOutcome:
        length, waited, forecast = len(expected.request.prompt), now - expected.sent, self._bias * expected.by_model
        self._prefixes.observe(length, expected.known, cached)
        if self._leave(expected):
            self._answer_time.observe(*self._since)
            self._since = (0.0, 0.0)
        if expected.by_model > WORTH_COMPARING:
            ratio = min(waited / expected.by_model, BIAS[1])  # an engine that was started meanwhile would give outliers
            self._scatter += WEIGHT * (abs(ratio / self._bias - 1) - self._scatter)
            self._bias = max(self._bias + WEIGHT * (ratio - self._bias), BIAS[0])
        return WaitOutcome(waited > expected.allowed, _compare(forecast, waited) if expected.by_model else "")

    def end(self, expected: ExpectedRequest, answer: Sequence[int], limits: Limits) -> None:
        """Forgets a request that has ended, with or without an answer. The next prompt may continue the answer."""
        self._leave(expected)
        if answer:
            expected.chain.extend(answer, limits.block_size)
            self._prefixes.remember(expected.chain, self._most_blocks(limits))

    def _leave(self, expected: ExpectedRequest) -> bool:
        """Takes a request out of its line; returns whether it was there."""
        waited, expected.waits = expected.waits, False
        if waited:
            self._lines.leave(expected.request, expected.sender, expected.place)
        return waited

    # -- the forecast ------------------------------------------------------------------------------------------------

    def _expect(self, request: Request, sender: object, now: float, block_size: int, cached: int) -> ExpectedRequest:
        """Returns a request's uncached work and its place in line. A prompt whose tokens are scored is computed
        whole."""
        chain, length = BlockChain((request.salt, request.adapters)), len(request.prompt)
        chain.extend(request.prompt, block_size)
        known = min(max(self._prefixes.depth(chain) * block_size, cached), length - 1)
        if request.sampling.prompt_logprobs is not None:
            known = 0
        tokens = max(self._prefixes.uncached(length, known), 1.0)
        work = Work(tokens, tokens * (length - tokens / 2), 1)
        seconds, stated = self._seconds(work), allowed_wait(request.claim, None)
        due = now + stated if seconds <= stated else inf
        place = Place(due, now + PROMPT_PATIENCE * seconds, request.id)
        return ExpectedRequest(request, sender, chain, known, now, place, work)

    def _seconds(self, work: Work) -> float:
        """Returns how long prompts take by the engine's measure; 0: it has measured none."""
        token, pair = (self._stats.step_seconds or (0.0, 0.0))[:2]
        return token * work.tokens + pair * work.pairs

    def _forecast(self, expected: ExpectedRequest, now: float) -> tuple[float, float]:
        """Returns the seconds to a request's first token, without bias, and the seconds that it would take on an idle
        engine. Both are 0 if nothing is ahead of it, or nothing was measured yet. A tenant's line advances by the
        tenant's share."""
        own = self._seconds(expected.work)
        first, mine, others, share = self._lines.ahead(expected.request, expected.sender, expected.place, now)
        every = mine.plus(others)
        requests = first.requests + min((mine.requests + 1) / share, every.requests + 1) - 1
        if requests <= 0 or not own:
            return 0.0, 0.0
        prompts = min((self._seconds(mine) + own) / share, self._seconds(every) + own) - own
        prompts += self._seconds(first) - self._since[1]  # without the computed part of prompts that have begun
        before = max(prompts, 0.0) + self._answer_time.beside(max(prompts, 0.0), requests)
        alone = own + self._answer_time.beside(own, 1)
        return before / self._engines + alone, alone

    def _forecast_and_limit(self, expected: ExpectedRequest, by_model: float, own: float) -> tuple[float, float]:
        """Returns a cautious forecast of the seconds to a first token, and their limit. The limit of a long prompt is
        higher, so that it may wait a little."""
        longer = self._bias
        if limit_of(expected.request.claim) != "patience":
            longer *= min(max(1 + SCATTERS * self._scatter, MARGIN[0]), MARGIN[1])
        return longer * by_model, max(expected.allowed, longer * own + OWN_SHARE * expected.allowed)

    def _refuse_late(self, expected: ExpectedRequest, own: float) -> None:
        forecast, limit = self._forecast_and_limit(expected, expected.by_model, own)
        if expected.by_model and forecast > limit:
            retry, told = max(ceil(forecast - limit), 1), ceil(10 * forecast) / 10  # at least the limit
            raise WaitTooLong(
                f"the first token would come after about {told:.1f} s, and {limit:.3g} s are allowed: retry in "
                f"{retry} s",
                retry_after=retry,
            )

    def _most_blocks(self, limits: Limits) -> int:
        on_device = self._engines * limits.num_blocks // max(len(limits.windows), 1)
        return on_device + self._stats.host_places + self._stats.disk.blocks


def _compare(forecast: float, waited: float) -> str:
    """Compares a forecast with the wait. Fractions of a second do not count."""
    if waited > CLOSE * forecast + WORTH_COMPARING:
        return TOO_LOW
    return TOO_HIGH if forecast > CLOSE * waited + WORTH_COMPARING else RIGHT


def limit_of(claim: Claim) -> str:
    if claim.deadline is None and claim.ttft is None:
        return "patience"
    return "ttft" if claim.deadline is None or (claim.ttft is not None and claim.ttft < claim.deadline) else "deadline"


def allowed_wait(claim: Claim, patience: float | None) -> float:
    """Returns the seconds that a request's first token may take: its deadline, its target, or else `patience`."""
    stated = [time for time in (claim.deadline, claim.ttft) if time is not None]
    return min(stated) if stated else inf if patience is None else patience

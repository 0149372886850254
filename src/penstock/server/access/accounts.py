"""What each key has used of the server, and whether it may have more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from time import monotonic
from types import TracebackType
from typing import Self

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.errors import RateLimited
from penstock.keys import Key

MINUTE = 60.0


class Allowance:
    """So many a minute, saved up for one minute at most. What is taken may be more than is left, as an answer's length
    is known only at its end: then nothing more is given until that is made up for."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._left = float(limit)
        self._at = monotonic()

    @property
    def left(self) -> float:
        at = monotonic()
        self._left = min(self._left + (at - self._at) * self.limit / MINUTE, self.limit)
        self._at = at
        return self._left

    def take(self, count: int) -> None:
        self._left = self.left - count

    def seconds_to(self, count: float) -> float:
        """Until so many are left."""
        return max(count - self.left, 0.0) * MINUTE / self.limit


class Account:
    """One key's. To be in it is to have a request under way."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.used: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.running = 0
        self._allowances: dict[str, Allowance] = {}
        self.follow(key)

    def follow(self, key: Key) -> None:
        """The key as the file has it now. A limit that stays the same goes on where it was."""
        self.key = key
        limits = {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
        self._allowances = {kind: self._allowance(kind, limit) for kind, limit in limits.items() if limit}

    def _allowance(self, kind: str, limit: int) -> Allowance:
        known = self._allowances.get(kind)
        return known if known is not None and known.limit == limit else Allowance(limit)

    def begin(self) -> None:
        """Takes a request from what is allowed; refuses it where nothing is left."""
        if self.key.concurrent is not None and self.running >= self.key.concurrent:
            raise self._refusal("concurrent", f"{self.key.concurrent} requests at once, and has as many under way", 1.0)
        for kind, allowance in self._allowances.items():
            if (wait := allowance.seconds_to(1)) > 0:
                raise self._refusal(kind, f"{allowance.limit} {kind} a minute, and has used them", wait)
        self.used["requests"] += 1
        if "requests" in self._allowances:
            self._allowances["requests"].take(1)

    def _refusal(self, kind: str, told: str, wait: float) -> RateLimited:
        self.refused[kind] += 1
        return RateLimited(
            f"the key {self.key.name!r} is allowed {told}: try again in {wait:.3g} seconds", retry_after=wait
        )

    def charge(self, kind: str, tokens: int) -> None:
        """For tokens of a "prompt", or "generated"."""
        self.used[kind] += tokens
        if "tokens" in self._allowances:
            self._allowances["tokens"].take(tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What is left, by the names that OpenAI's clients know."""
        told: dict[str, object] = {}
        for kind, allowance in self._allowances.items():
            told[f"limit-{kind}"] = allowance.limit
            told[f"remaining-{kind}"] = max(int(allowance.left), 0)
            told[f"reset-{kind}"] = f"{allowance.seconds_to(allowance.limit):.3f}s"
        return [(f"x-ratelimit-{name}".encode(), str(value).encode()) for name, value in told.items()]

    def __enter__(self) -> Self:
        self.running += 1
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.running -= 1


ACCOUNT: ContextVar[Account | None] = ContextVar("account", default=None)  # that what is computed now is charged to


class Accounts:
    """All of them, and what Prometheus sees of them. An account lasts as long as the server, also without its key."""

    def __init__(self) -> None:
        self.strangers = 0  # requests without a good key
        self._accounts: dict[str, Account] = {}

    def of(self, key: Key) -> Account:
        account = self._accounts.get(key.name)
        if account is None:
            account = self._accounts[key.name] = Account(key)
        elif account.key != key:
            account.follow(key)
        return account

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("penstock_key_requests", "Requests that were let in, by key", labels=["key"])
        tokens = CounterMetricFamily("penstock_key_tokens", "Tokens used, by key", labels=["key", "kind"])
        refused = CounterMetricFamily("penstock_key_refusals", "Refused requests, by key", labels=["key", "reason"])
        running = GaugeMetricFamily("penstock_key_running", "Requests under way, by key", labels=["key"])
        for name, account in self._accounts.items():
            requests.add_metric([name], account.used["requests"])
            running.add_metric([name], account.running)
            for kind in ("prompt", "generated"):
                tokens.add_metric([name, kind], account.used[kind])
            for reason, count in account.refused.items():
                refused.add_metric([name, reason], count)
        yield from (requests, tokens, refused, running)
        yield CounterMetricFamily("penstock_unauthorized_requests", "Requests without a good key", self.strangers)

"""Keeps an account for each API key: its usage and its limits."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from time import monotonic
from types import TracebackType
from typing import Self

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.errors import Forbidden, RateLimited
from penstock.keys import Key, Keyring
from penstock.service_levels import NO_TARGETS, Targets

MINUTE = 60.0
RESERVE_SECONDS = 5.0  # between two looks at limits that may have changed


class Allowance:
    """Limits a rate to `limit` per minute, saved up for one minute at most. More may be taken than is left, because an
    answer's length is known only at its end; then nothing is given until the debt is made up."""

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
        """Returns the seconds until `count` are left."""
        return max(count - self.left, 0.0) * MINUTE / self.limit


class Account:
    """Counts one key's usage and applies its limits. As a context manager it counts one request in flight."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.used: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.running = 0
        self._key: Key | None = None  # none: no limits are known
        self._allowances: dict[str, Allowance] = {}

    def apply_limits(self, key: Key) -> None:
        """Takes over the key's limits as the key file has them now. A limit that stays the same keeps its state."""
        if key == self._key:
            return
        self._key = key
        limits = {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
        self._allowances = {kind: self._allowance(kind, limit) for kind, limit in limits.items() if limit}

    def _allowance(self, kind: str, limit: int) -> Allowance:
        known = self._allowances.get(kind)
        return known if known is not None and known.limit == limit else Allowance(limit)

    @property
    def models(self) -> tuple[str, ...]:
        """Returns the models that the key may use; none: all of them."""
        return () if self._key is None else tuple(self._key.models)

    @property
    def admin(self) -> bool:
        """Returns whether the key may change models and see what all keys do."""
        return self._key is not None and self._key.admin

    @property
    def monitor(self) -> bool:
        """Returns whether the key may read the figures of all keys."""
        return self._key is not None and (self._key.monitor or self._key.admin)

    @property
    def weight(self) -> float:
        return 1.0 if self._key is None else self._key.weight

    @property
    def priority(self) -> int:
        return 0 if self._key is None else self._key.priority

    @property
    def targets(self) -> Targets:
        return NO_TARGETS if self._key is None else self._key.targets

    def may_use(self, model: str) -> bool:
        return not self.models or model in self.models

    def forbidden(self, reason: str, what: str) -> Forbidden:
        self.refused[reason] += 1
        return Forbidden(f"the key {self.name!r} may not {what}")

    def begin(self) -> None:
        """Takes one request from what the limits allow; raises RateLimited if nothing is left."""
        most = self._key.concurrent if self._key is not None else None
        if most is not None and self.running >= most:
            raise self._refusal("concurrent", f"{most} requests at once, and {self.running} are in flight", 1.0)
        for kind, allowance in self._allowances.items():
            if (wait := allowance.seconds_to(1)) > 0:
                raise self._refusal(kind, f"{allowance.limit} {kind} a minute, and they are used up", wait)
        self.used["requests"] += 1
        if "requests" in self._allowances:
            self._allowances["requests"].take(1)

    def _refusal(self, kind: str, limit: str, wait: float) -> RateLimited:
        self.refused[kind] += 1
        return RateLimited(f"the key {self.name!r} is allowed {limit}: retry in {wait:.3g} seconds", retry_after=wait)

    def charge(self, kind: str, tokens: int) -> None:
        """Counts tokens; `kind` is "prompt" or "generated"."""
        self.used[kind] += tokens
        self.set_aside(tokens)

    def set_aside(self, tokens: int) -> None:
        """Takes tokens from what the limit leaves; gives them back if there are fewer than none."""
        if "tokens" in self._allowances:
            self._allowances["tokens"].take(tokens)

    @asynccontextmanager
    async def reserving(self, tokens: int) -> AsyncIterator[None]:
        """Waits until the key has `tokens` left, or its whole limit, and sets them aside while the
        block runs: work that can wait does not go into debt."""
        while (wait := self._seconds_to(tokens)) > 0:
            await asyncio.sleep(min(wait, RESERVE_SECONDS))
        allowance = self._allowances.get("tokens")
        aside = min(tokens, allowance.limit) if allowance else 0
        if allowance:
            allowance.take(aside)
        try:
            yield
        finally:
            if allowance:
                allowance.take(-aside)

    def _seconds_to(self, tokens: int) -> float:
        allowance = self._allowances.get("tokens")
        return allowance.seconds_to(min(tokens, allowance.limit)) if allowance else 0.0

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the remaining limits as x-ratelimit headers, which OpenAI's clients read."""
        values: dict[str, object] = {}
        for kind, allowance in self._allowances.items():
            values[f"limit-{kind}"] = allowance.limit
            values[f"remaining-{kind}"] = max(int(allowance.left), 0)
            values[f"reset-{kind}"] = f"{allowance.seconds_to(allowance.limit):.3f}s"
        return [(f"x-ratelimit-{name}".encode(), str(value).encode()) for name, value in values.items()]

    def count_until_done(self, task: asyncio.Task[None]) -> None:
        """Counts work that outlives its HTTP request among the key's requests in flight."""
        if not task.done():
            self.__enter__()
            task.add_done_callback(lambda _: self.__exit__(None, None, None))

    def __enter__(self) -> Self:
        self.running += 1
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.running -= 1


class Accounts:
    """Holds the accounts of all keys, and reports them to Prometheus. An account lasts as long as the server, even if
    its key is deleted."""

    def __init__(self, keyring: Keyring) -> None:
        self.unauthorized = 0  # requests without a valid key
        self.keyring = keyring
        self._accounts: dict[str, Account] = {}

    def of(self, key: Key) -> Account:
        account = self._account(key.name)
        account.apply_limits(key)
        return account

    def named(self, name: str) -> Account:
        """Returns the account of the key called `name`. If the key was deleted meanwhile, the account is unlimited."""
        key = self.keyring.named(name)
        return self._account(name) if key is None else self.of(key)

    def _account(self, name: str) -> Account:
        return self._accounts.setdefault(name, Account(name))

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("penstock_key_requests", "Admitted requests, by key", labels=["key"])
        tokens = CounterMetricFamily("penstock_key_tokens", "Tokens used, by key", labels=["key", "kind"])
        refused = CounterMetricFamily("penstock_key_refusals", "Refused requests, by key", labels=["key", "reason"])
        running = GaugeMetricFamily("penstock_key_running", "Requests in flight, by key", labels=["key"])
        for name, account in self._accounts.items():
            requests.add_metric([name], account.used["requests"])
            running.add_metric([name], account.running)
            for kind in ("prompt", "generated"):
                tokens.add_metric([name, kind], account.used[kind])
            for reason, count in account.refused.items():
                refused.add_metric([name, reason], count)
        yield from (requests, tokens, refused, running)
        yield CounterMetricFamily("penstock_unauthorized_requests", "Requests without a valid key", self.unauthorized)

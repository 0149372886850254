"""Describes the service that a request is due: its deadline, its priority, its cache and its adapters."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from time import monotonic

from starlette.datastructures import Headers

from penstock.errors import InvalidRequest
from penstock.server.context.caller import Caller
from penstock.service_levels import NO_TARGETS, STANDARD_TERMS, ServiceTerms, Targets
from penstock.types import AdapterUse, Claim, Request

DEADLINE, TTFT, ITL = "x-request-deadline-ms", "x-request-ttft-target-ms", "x-request-itl-target-ms"
LONGEST = 86_400_000  # milliseconds of a deadline or target
MAX_SHOWN = 128  # characters of a wrong value in an error


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


@dataclass(slots=True, kw_only=True)
class Service:
    """Collects the terms of one request from the server, its headers and its body."""

    terms: ServiceTerms = STANDARD_TERMS
    arrived: float = field(default_factory=monotonic)
    background: bool = False  # its answers wait behind all foreground requests
    priority: int = 0  # lower runs sooner
    deadline: float | None = None  # seconds from its arrival
    targets: Targets = NO_TARGETS  # stated by the request itself
    salt: str = ""  # prompts share cached blocks only under the same salt
    unshared: bool = False  # its blocks are nobody else's
    adapters: tuple[AdapterUse, ...] = ()  # LoRA adapters, with their scales
    prediction: tuple[int, ...] = ()  # tokens that the client expects in the answer
    speculation: int | None = None  # most tokens that a step drafts for it; 0: none; None: the server's default
    keep_alive: float | None = None  # seconds that the model stays loaded afterwards; None: the server's default
    loading_seconds: float = 0.0  # waited for its model

    def read_headers(self, headers: Headers) -> None:
        """Takes over the deadline and the targets that the headers state."""
        if DEADLINE not in headers and TTFT not in headers and ITL not in headers:
            return
        self.state_times(*((name, _whole_number(name, headers.get(name))) for name in (DEADLINE, TTFT, ITL)))

    def state_times(self, *times: tuple[str, int | None]) -> None:
        """Takes over the deadline and the targets for the first token and for those after it, which are given in this
        order, in milliseconds and with their names; None: it stays as it is."""
        for name, time in times:
            if time is not None and not 1 <= time <= LONGEST:
                raise InvalidRequest(f"{name} is in milliseconds, from 1 to {LONGEST}; got {time}", param=name)
        deadline, ttft, itl = (None if time is None else time / 1000 for _, time in times)
        self.deadline = self.deadline if deadline is None else deadline
        self.targets = Targets(ttft, itl).over(self.targets)

    def claim(self, caller: Caller) -> Claim:
        """Returns the request's claim on the engine. The time since its arrival is subtracted; the time to load the
        model counts for a deadline only. Background requests have only the targets that they state."""
        keys = NO_TARGETS if caller.payer is None else caller.payer.targets
        ttft, itl = self.targets if self.background else self.targets.over(keys).over(self.terms.targets)
        waited = monotonic() - self.arrived
        return Claim(
            caller.tenant,
            1.0 if caller.payer is None else caller.payer.weight,
            None if self.deadline is None else max(self.deadline - waited, 0.0),
            None if ttft is None else max(ttft - waited + self.loading_seconds, 0.0),
            itl,
        )

    def cache_salt(self, caller: Caller) -> str:
        """Returns the salt under which the request shares cached prompts. Tenants share none with one another, unless
        the server's terms say so."""
        apart = (caller.tenant or "\0" in self.salt) and not self.terms.share_prefixes
        return f"{caller.tenant}\0{self.salt}" if apart else self.salt

    def share_nothing(self) -> None:
        """Makes the request's cached blocks its own: no other request has this salt."""
        self.salt, self.unshared = new_request_id(), True

    @property
    def durable(self) -> bool:
        """Returns whether the KV of its prompt may be kept on disk. With a salt of the client's it may if the server's
        terms say so."""
        return not self.unshared and (self.terms.durable_salts or not self.salt)

    def apply_to(self, request: Request, caller: Caller, *, explain: bool) -> Request:
        return request._replace(
            owner=caller.owner,
            explain=explain,
            salt=self.cache_salt(caller),
            priority=self.priority,
            background=self.background,
            adapters=self.adapters,
            prediction=self.prediction,
            speculation=self.speculation,
            claim=self.claim(caller),
            durable=self.durable,
        )


def _whole_number(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,12}", text.strip(), re.ASCII):
        raise InvalidRequest(f"{name} is a whole number of milliseconds; got {text[:MAX_SHOWN]!r}", param=name)
    return int(text)

"""Defines how soon requests are to be answered, and the named profiles that set this. It imports the standard library
only."""

from __future__ import annotations

from typing import NamedTuple

PATIENCE = 60.0  # seconds: proxies and people give up about then


class Targets(NamedTuple):
    """States targets of latency in seconds; None: there is none."""

    ttft: float | None = None  # from a request's arrival to the first token of its answer
    itl: float | None = None  # from one token of an answer to the next; None: the usual one (core/step_cost.py)

    def over(self, others: Targets) -> Targets:
        """Returns these targets, completed by the targets of `others`."""
        ttft, itl = (other if mine is None else mine for mine, other in zip(self, others, strict=True))
        return Targets(ttft, itl)


NO_TARGETS = Targets()


class Profile(NamedTuple):
    """Names settings for one kind of use."""

    meaning: str
    targets: Targets = NO_TARGETS
    patience: float | None = PATIENCE  # most seconds that a request without a TTFT target may wait; None: no limit
    prefill_budget: int = 0  # see Config; 0: as the device has it

    def described(self) -> str:
        """Returns the settings in words."""
        ttft, itl = (f"{1000 * time:g} ms" if time else "" for time in self.targets)
        itl = itl or ("none" if self.prefill_budget else "the usual")
        patience = "no limit" if self.patience is None else f"{self.patience:g} s"
        budget = f", prefill budget {self.prefill_budget}" if self.prefill_budget else ""
        return f"{self.meaning}: TTFT target {ttft or 'none'}, ITL target {itl}, longest wait {patience}{budget}"


PROFILES = {
    "default": Profile("what holds without --profile"),
    "chat": Profile("people who read along", Targets(5.0, 0.1)),
    "voice": Profile("speech, which must not pause", Targets(1.0, 0.05), 5.0),
    "throughput": Profile("many programs that wait for whole answers", patience=600.0, prefill_budget=2048),
    "batch": Profile("work that nobody waits for", patience=None, prefill_budget=2048),
}


class ServiceTerms(NamedTuple):
    """Says by which rules a server shares its engines among tenants."""

    targets: Targets = NO_TARGETS
    patience: float | None = PATIENCE  # see Profile
    tenant_header: str = ""  # in which a trusted proxy names the tenant; empty: nobody does
    share_prefixes: bool = False  # tenants reuse one another's cached prompts
    durable_salts: bool = False  # prompts with a salt of the client's may be kept on disk


STANDARD_TERMS = ServiceTerms()

"""Collects the notes on a request of which its answer, the log and traces report."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from penstock.errors import InvalidRequest, PenstockError
from penstock.ipc.placement import RequestPlacement

IGNORED = b"x-penstock-ignored"  # lists the ignored fields of a request
MODEL = b"x-penstock-model"  # names the served model, in answers to requests that call it by another name
ROUTE = b"x-penstock-route"  # names the engine that answers, if there are several
MAX_HEADER = 1024  # characters of a list of ignored fields
MAX_IGNORED = 256  # fields
MAX_NAME = 128  # characters of one


@dataclass(slots=True)
class Outcome:
    """Adds up what became of a request, for the log."""

    prompts: dict[int, int] = field(default_factory=dict)  # tokens of each prompt, by its hash: choices share theirs
    charged: set[int] = field(default_factory=set)  # hashes of the prompts that the payer is charged for
    recorded: bool = False  # the usage file has counted the request
    reused: dict[str, int] = field(default_factory=dict)  # prompt tokens by the tier that their KV came from
    cached: int = 0  # prompt tokens whose KV was reused
    generated: int = 0  # tokens
    queued: float = 0.0  # seconds until the engine began with the answer that waited longest
    first: float = 0.0  # perf_counter's time of the first token; 0: there was none
    preemptions: int = 0
    loop: int = 0  # tokens of the phrase that an answer repeated, if the loop guard ended it
    finish_reason: str = ""  # the last answer's
    error: str = ""  # code of the error that was the answer
    reason: str = ""  # what the error said

    def fail(self, error: PenstockError) -> None:
        self.error, self.reason = error.code, error.message


@dataclass(slots=True, kw_only=True)
class AnswerNotes:
    """Collects the facts that an answer reports in addition to its text."""

    explain: bool = False  # the answer reports what happened to it
    model: str = ""  # the request's model
    ignored: set[str] = field(default_factory=set)  # names of ignored fields
    stood_in: str = ""  # the served model's name, if the request calls it by another
    placements: list[tuple[int, RequestPlacement]] = field(default_factory=list)  # if several engines could answer
    fallback: str = ""  # the model that answers instead of the requested one, and the reason
    truncated: int = 0  # tokens that were cut from the prompt, as the request asked
    outcome: Outcome = field(default_factory=Outcome)

    def ignore(self, name: str) -> None:
        """Lists a field as ignored: once, in however many messages or tools it occurs."""
        self.ignored.add(re.sub(r"\[\d+\]", "[]", name[:MAX_NAME]))
        if len(self.ignored) > MAX_IGNORED:
            raise InvalidRequest(
                f"the request has more than {MAX_IGNORED} unknown fields; {name[:MAX_NAME]!r} is one: remove them",
                param=name,
            )

    def ignore_kind(self, where: str, kind: str) -> None:
        """Lists an entry of a list as ignored, by its kind instead of its index: tools[web_search]."""
        self.ignore(f"{where[: where.rindex('[')]}[{kind[:MAX_NAME]}]")

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers: list[tuple[bytes, bytes]] = []
        if self.ignored:
            headers.append((IGNORED, _header_text(", ".join(sorted(self.ignored)))))
        if self.stood_in:
            headers.append((MODEL, _header_text(self.stood_in)))
        if self.placements or self.fallback:
            headers.append((ROUTE, _header_text(self.route)))
        return headers

    @property
    def route(self) -> str:
        """Returns in words which engines compute its answers, and why those; empty: there is only one."""
        latest = {id: placement.why for id, placement in self.placements}
        engines = " | ".join(dict.fromkeys(latest.values()))
        return "; ".join(part for part in (self.fallback, engines) if part)

    @property
    def resumed_on(self) -> list[str]:
        return [placement.replica for _, placement in self.placements if placement.resumed]

    def fall_back(self, model: str, to: str, why: str) -> None:
        """Notes that another model answers, and forgets the attempt of the first."""
        self.fallback, self.stood_in = f"{to} in place of {model} ({why})", to
        self.outcome = Outcome()
        self.placements.clear()

    def end_fallbacks(self, model: str) -> None:
        """Notes that no other model has answered: the answer is an error of the one that was asked for."""
        self.fallback, self.stood_in, self.model = "", "", model
        self.placements.clear()


def _header_text(text: str) -> bytes:
    """Returns text for a header: non-printable characters are replaced by `?`."""
    kept = text if len(text) <= MAX_HEADER else f"{text[:MAX_HEADER]}..."
    return re.sub(r"[^ -~]", "?", kept).encode()

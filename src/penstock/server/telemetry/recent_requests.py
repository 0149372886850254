"""Remembers how the last requests went: their times and sizes, never what they say."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from time import time
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from penstock.server.context.request_context import RequestContext
from penstock.server.telemetry.metrics import FinishedRequest
from penstock.types import Report

KEPT = 100  # requests


class EndedRequest(msgspec.Struct, kw_only=True):
    """Tells where the time of a request went. Seconds that only the engine knows are missing if it did not end it."""

    id: str  # the answer's x-request-id
    model: str
    key: str | UnsetType = UNSET  # the API key's name, or the tenant that a proxy names
    ended: float  # seconds since 1970
    reason: str  # stop, length, abort or error
    seconds: float  # from its start to its end
    first_token: float | None  # seconds from its start; None: there was none
    between_tokens: float | None  # seconds, on average
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    queue: float | UnsetType = UNSET
    prefill: float | UnsetType = UNSET
    decode: float | UnsetType = UNSET
    waited: dict[str, float] | UnsetType = UNSET  # before it was queued: for a grammar, an adapter, a pause or KV
    loading: float | UnsetType = UNSET  # waited for its model
    preemptions: int | UnsetType = UNSET
    recomputed_tokens: int | UnsetType = UNSET
    route: str | UnsetType = UNSET  # where it was sent and why, if several engines could answer


class LatencyMedians(NamedTuple):
    first_token: float | None
    between_tokens: float | None


class RecentRequests:
    """Keeps the last requests that have ended."""

    def __init__(self) -> None:
        self._ended: deque[tuple[str, EndedRequest]] = deque(maxlen=KEPT)  # tenant and request

    def add(self, context: RequestContext, finished: FinishedRequest) -> None:
        self._ended.append((context.caller.tenant, _ended(context, finished)))

    def of(self, tenant: str | None) -> list[EndedRequest]:
        """Returns a tenant's requests, the latest first; None: all requests."""
        return [ended for whose, ended in reversed(self._ended) if tenant is None or whose == tenant]

    def medians(self) -> LatencyMedians:
        every = [ended for _, ended in self._ended]
        return LatencyMedians(
            _median(each.first_token for each in every), _median(each.between_tokens for each in every)
        )


def _ended(context: RequestContext, finished: FinishedRequest) -> EndedRequest:
    between = (finished.last - finished.first) / (finished.generated - 1) if finished.generated > 1 else None
    ended = EndedRequest(
        id=context.id,
        model=context.notes.model,
        key=context.caller.owner_name or UNSET,
        ended=time(),
        reason=finished.reason,
        seconds=round(finished.ended - finished.began, 6),
        first_token=round(finished.first - finished.began, 6) if finished.first else None,
        between_tokens=None if between is None else round(between, 6),
        prompt_tokens=len(finished.request.prompt),
        cached_tokens=finished.cached,
        generated_tokens=finished.generated,
        loading=round(context.service.loading_seconds, 6) or UNSET,
        route=context.notes.route or UNSET,
    )
    if finished.report is not None:
        _add_report(ended, finished.report)
    return ended


def _add_report(ended: EndedRequest, report: Report) -> None:
    stages = (report.queued, report.prefill, report.decode)
    ended.queue, ended.prefill, ended.decode = (round(each, 6) for each in stages)
    ended.waited = {what: round(seconds, 6) for what, seconds in report.waited} or UNSET
    ended.preemptions, ended.recomputed_tokens = report.preemptions, report.recomputed


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 6) if known else None

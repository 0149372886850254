"""Keeps the delivered part of a request's answer, and makes from it the request for the rest, which another engine can
answer.

It is pure: it reads no clock and does no I/O.
"""

from __future__ import annotations

from penstock.types import Aborted, Event, Finished, Request, Tokens

Waits = tuple[tuple[str, float], ...]  # reason and seconds


class RequestJournal:
    """Follows the answer to one request through the engines that give it, one after the other."""

    __slots__ = ("_cached", "_mu", "_request", "_scored", "_tokens")

    def __init__(self, request: Request) -> None:
        self._request = request
        self._tokens: list[int] = []
        self._scored = request.scored
        self._mu = request.mirostat_mu
        self._cached: int | None = None  # as the first engine said

    @property
    def request(self) -> Request:
        return self._request

    @property
    def delivered(self) -> int:
        return len(self._tokens)

    def so_far(self) -> Request:
        """Returns the request with the delivered part of its answer: an engine that gets it answers the rest."""
        generated = self._request.generated + tuple(self._tokens)
        return self._request._replace(generated=generated, scored=self._scored, mirostat_mu=self._mu)

    def note(self, event: Tokens) -> None:
        self._tokens += event.tokens
        self._scored += len(event.scores)
        self._mu = event.mirostat_mu
        if self._cached is None:
            self._cached = event.cached

    def told(self, event: Event, waits: Waits) -> Event:
        """Returns an event for the client: the reused prompt tokens are the first engine's, and the final report
        includes the waits outside of engines."""
        if isinstance(event, Tokens):
            return event._replace(cached=self._cached or 0)
        if isinstance(event, Finished | Aborted) and event.report is not None:
            cached = event.report.cached if self._cached is None else self._cached
            return event._replace(report=event.report._replace(cached=cached, waited=event.report.waited + waits))
        return event

"""Counts every HTTP answer by route, status and reason, also those to malformed requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from starlette.routing import Match, Route
from starlette.types import Scope

NO_ROUTE = "none"  # the route of malformed requests and of unknown paths
CLIENT_LEFT = 499  # the status of a request whose client left before there was an answer

refused_connections: Counter[tuple[int, str]] = Counter()  # (status, reason) -> connections that the protocol refused


class HttpResponses:
    """Counts the answers of one server, for Prometheus. `routes` are those that the server has."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes
        self._exact = {route.path for route in routes}
        self._counts: Counter[tuple[str, int, str]] = Counter()

    def count(self, scope: Scope, status: int, reason: str) -> None:
        """Counts an answer; without a status, the client left before there was one."""
        if not status or status == CLIENT_LEFT:
            status, reason = CLIENT_LEFT, "client_left"
        self._counts[self._route(scope), status, reason] += 1

    def _route(self, scope: Scope) -> str:
        """Returns the path of the route that a request is for, with its parameters as names: other texts in requests
        must not become labels."""
        if scope["path"] in self._exact:
            return str(scope["path"])
        matching = (route.path_format for route in self._routes if route.matches(scope)[0] is not Match.NONE)
        return next(matching, NO_ROUTE)

    def collect(self) -> Iterator[Metric]:
        responses = CounterMetricFamily(
            "penstock_http_responses",
            "HTTP answers by route, status and reason, which is the code of an error and empty without one",
            labels=["route", "status", "reason"],
        )
        for (route, status, reason), count in self._counts.items():
            responses.add_metric([route, str(status), reason], count)
        for (status, reason), count in refused_connections.items():
            responses.add_metric([NO_ROUTE, str(status), reason], count)
        yield responses

"""Defines how the server serves models that engines of other kinds compute: fleet/foreign implements it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.context.request_context import RequestContext
from penstock.server.telemetry.metrics import Metrics


class ForeignModel(NamedTuple):
    """Describes a model of other engines."""

    name: str
    kinds: tuple[str, ...]  # its engines' kinds
    available: bool  # one of them answers now


class ForeignModels(Protocol):
    """Serves the models of other engines."""

    def use_metrics(self, metrics: Metrics) -> None:
        """Takes the metrics of the server, which count these requests, too."""

    async def start(self) -> None:
        """Asks all engines who they are, and begins to watch them."""

    async def close(self) -> None: ...

    def find(self, name: str | None) -> str | None:
        """Returns the model that a name means, or no name; None: none of these."""

    def models(self) -> list[ForeignModel]: ...

    def engines(self) -> list[dict[str, Any]]: ...

    def collect(self) -> Iterable[Metric]: ...

    async def answer(self, model: str, http: Request, context: RequestContext) -> Response:
        """Answers a request for one of these models, on any route."""

"""Asks other models if a request's own cannot answer, before the first byte of an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from penstock.errors import (
    EngineUnavailable,
    Forbidden,
    ModelNotFound,
    NotSupported,
    Overloaded,
    PenstockError,
    RateLimited,
)
from penstock.server.context.request_context import RequestContext
from penstock.server.telemetry.metrics import Metrics

UNANSWERED = (EngineUnavailable, Overloaded, RateLimited, ModelNotFound)  # errors that are not about the request itself
UNFIT = (Forbidden, NotSupported)  # errors of a fallback that cannot serve the request

Answer = Callable[[str | None], Awaitable[Response]]


class FallbackResponse(Response):
    """Asks one model after another until one begins to answer. If all fail, the error is the first model's: clients see
    an error of the model that they asked for."""

    def __init__(self, models: Sequence[str], answer: Answer, context: RequestContext, metrics: Metrics) -> None:
        """Takes the requested model and its fallbacks. `answer` answers by a named model or, with None, as the request
        asks."""
        self._models = models
        self._answer = answer
        self._context = context
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def begin(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        error: PenstockError | None = None
        for model in self._models:
            try:
                await self._try(model, error, scope, receive, begin)
                return
            except (*UNANSWERED, *UNFIT) as refused:
                if begun or (error is None and isinstance(refused, UNFIT)):
                    raise
                error = error or refused
        assert error is not None
        self._context.notes.end_fallbacks(self._models[0])
        raise error

    async def _try(self, model: str, error: PenstockError | None, scope: Scope, receive: Receive, begin: Send) -> None:
        if error is not None:
            self._context.fall_back(self._models[0], model, error.message)
        response = await self._answer(None if error is None else model)

        async def counted(message: Message) -> None:
            if error is not None and message["type"] == "http.response.start" and message["status"] < 400:
                self._metrics.fallbacks.labels(self._models[0], model).inc()
            await begin(message)

        await response(scope, receive, counted)

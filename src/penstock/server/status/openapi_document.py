"""Serves GET /openapi.json."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.context.request_context import RequestContext
from penstock.server.http.openapi import JSON, DocumentedRoute, document
from penstock.server.models.pool import ModelPool
from penstock.server.services import Endpoints


class OpenApiDocument(Endpoints):
    """Serves the document. It makes the document at the first request, which takes a tenth of a second or two."""

    _text: asyncio.Task[bytes] | None = None

    async def show(self, _: ModelPool, http: Request, __: RequestContext) -> Response:
        if self._text is None:  # requests that come meanwhile wait for the same
            self._text = asyncio.create_task(asyncio.to_thread(_encoded, http.app.routes))
        return Response(await asyncio.shield(self._text), media_type=JSON)


def _encoded(routes: Sequence[DocumentedRoute]) -> bytes:
    return msgspec.json.encode(document(routes))

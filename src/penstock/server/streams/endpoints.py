"""Serves GET and DELETE /v1/streams/{id}, by which a client that lost its connection reads on or gives up."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.context.request_context import RequestContext
from penstock.server.http.bodies import body_of, read_object
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import json_response
from penstock.server.models.pool import ModelPool
from penstock.server.services import Endpoints, Services
from penstock.server.streams.kept import KeptStream, KeptStreams

LAST_EVENT_ID = "last-event-id"  # the header in which clients of server-sent events name the last one that they have
MAX_SHOWN = 100  # characters of a wrong one in an error


class StreamQuery(msgspec.Struct, forbid_unknown_fields=True):
    starting_after: Annotated[int, Meta(ge=0)] | None = None


class DeletedStream(msgspec.Struct, kw_only=True):
    id: str
    object: str = "stream"
    deleted: bool = True


READ_STREAM = Operation(answers="text/event-stream", query=StreamQuery)
DELETE_STREAM = Operation(answers=DeletedStream)


class StreamEndpoints(Endpoints):
    """Holds the endpoints of the streams that a server keeps."""

    def __init__(self, services: Services) -> None:
        self._streams = services.streams

    async def read(self, _: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
        query = read_object(context, dict(http.query_params), StreamQuery, {}, strict=False)
        stream = self._streams.get(http.path_params["id"], context.caller.owner_name)
        return read_on(self._streams, context, stream, position(http, stream.id, query.starting_after))

    async def delete(self, _: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
        stream = self._streams.get(http.path_params["id"], context.caller.owner_name)
        await self._streams.delete(stream)
        return json_response(DeletedStream(id=stream.id))


async def sent_again(streams: KeptStreams, http: HttpRequest, context: RequestContext) -> Response | None:
    """Returns the rest of a stream if its request is sent again, with the id of the last event, as clients do whose
    streams answer a POST. None: it is another request."""
    given = http.headers.get(LAST_EVENT_ID)
    if context.streams is None or not given:
        return None
    await body_of(http, context)  # which is the same as before
    stream = streams.get(given.rpartition(":")[0], context.caller.owner_name)
    return read_on(streams, context, stream, position(http, stream.id, None))


def read_on(streams: KeptStreams, context: RequestContext, stream: KeptStream, after: int) -> Response:
    """Returns a stream's events after the one with this number. After the last event the status is 204, so that clients
    stop reconnecting."""
    last = stream.buffer.count - 1
    if after > last:
        raise InvalidRequest(
            f"the stream {stream.id!r} has had no event {after}: its last is {last}", param=LAST_EVENT_ID
        )
    if stream.buffer.ended and after == last:
        return Response(status_code=204)
    return streams.resume(context, stream, after)


def position(http: HttpRequest, id: str, starting_after: int | None) -> int:
    """Returns the number of the last event that a client has; -1: it has none. The header counts more than the query:
    clients that reconnect by themselves repeat the query and renew the header."""
    given = http.headers.get(LAST_EVENT_ID, "")
    if not given:
        return -1 if starting_after is None else starting_after
    stream, _, number = given.rpartition(":")
    if stream not in ("", id) or not re.fullmatch(r"\d{1,12}", number, re.ASCII):
        raise InvalidRequest(
            f"{LAST_EVENT_ID} is the id or the number of an event of the stream {id!r}; got {given[:MAX_SHOWN]!r}",
            param=LAST_EVENT_ID,
        )
    return int(number)

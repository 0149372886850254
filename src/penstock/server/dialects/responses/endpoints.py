"""Serves POST /v1/responses, and the routes of stored responses.

A response is stored unless the request has `store: false`, so that the next one can continue it. A background response
is stored from its beginning, others at their end: if the client leaves before, nothing is kept.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse

from penstock.errors import InvalidRequest
from penstock.server.access.in_flight import OwnerPlaces
from penstock.server.chat.chat_turn import TurnOptions, begin_turn, render_prompt
from penstock.server.chat.template_fields import read_template_kwargs, read_verbosity, think_with_effort
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.responses.answer import ResponseWriter
from penstock.server.dialects.responses.background import BackgroundResponse
from penstock.server.dialects.responses.events import EVENTS
from penstock.server.dialects.responses.fields import (
    BODY_NO_EFFECT,
    LOGPROBS,
    SEALED,
    ItemsQuery,
    ResponsesBody,
    ResponsesConversation,
    ResponseSettings,
    RetrieveQuery,
    read_query,
    read_response_body,
    read_settings,
)
from penstock.server.dialects.responses.input import messages_of, read_items
from penstock.server.dialects.responses.items import Item, ResponseObject, new_id
from penstock.server.dialects.responses.store import ResponseStore, StoredResponse
from penstock.server.generation.fields import sampling
from penstock.server.generation.speculation_fields import limit_drafts
from penstock.server.http.bodies import read_body
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import StreamResponse, encode, json_response, reply, sent
from penstock.server.models.pool import ModelPool
from penstock.server.models.served_model import ServedModel
from penstock.server.services import Endpoints, Services
from penstock.server.storage.lasting_answers import LastingAnswers
from penstock.server.streams.endpoints import position, read_on
from penstock.text import ChatPrompt
from penstock.types import SamplingParams

MAX_BACKGROUND = 256  # responses of all owners at once

RESPOND = Operation(ResponsesBody, BODY_NO_EFFECT, ResponseObject, EVENTS)
INPUT_TOKENS = Operation(ResponsesConversation, BODY_NO_EFFECT)
RETRIEVE = Operation(answers=ResponseObject, streams=EVENTS, query=RetrieveQuery)
CANCEL = Operation(answers=ResponseObject)
INPUT_ITEMS = Operation(query=ItemsQuery)


class Responses(Endpoints):
    """Holds the endpoints, and the responses they share."""

    def __init__(self, services: Services) -> None:
        lasting = None
        if services.keeps_answers:
            lasting = LastingAnswers(services.archive, "response", StoredResponse.record, StoredResponse.of)
        self._store = ResponseStore(lasting=lasting)
        self._streams = services.streams
        self._background = OwnerPlaces("background responses", lambda: MAX_BACKGROUND, ", or cancel one")
        self._jobs: set[BackgroundResponse] = set()  # in progress

    async def create(self, served: ServedModel, http: HttpRequest, context: RequestContext) -> HttpResponse:
        body = await read_response_body(http, context)
        served.check_model(body.model, context)
        limit_drafts(served, context, body.speculation)
        settings, items = read_settings(context, body), read_items(context, body.input)
        scored = (body.top_logprobs or 0) if body.includes(LOGPROBS) else None
        params = sampling(served, body, logprobs=scored)
        prompt = await self._prompt(served, context, body, settings, items)
        options = TurnOptions("input", body.max_output_tokens)
        turn = begin_turn(served, context, prompt, settings.tools.use, params, options)
        stored = StoredResponse(_response(served, body, settings, params[0]), items, tenant=context.caller.owner_name)
        writer = ResponseWriter(served, context, stored.response, turn, settings.tools, sealed=body.includes(SEALED))
        if body.background:
            return await self._start(context, stored, writer, streamed=bool(body.stream))
        if body.stores:
            writer.on_end = lambda: self._store.put(stored)
        context.stream_id = stored.response.id
        return await reply(http, context, writer, turn.deltas, streaming=bool(body.stream), framing=writer.framing)

    async def input_tokens(self, served: ServedModel, http: HttpRequest, context: RequestContext) -> HttpResponse:
        body = await read_body(http, context, ResponsesConversation, BODY_NO_EFFECT)
        served.check_model(body.model, context)
        settings, items = read_settings(context, body), read_items(context, body.input)
        prompt = await self._prompt(served, context, body, settings, items)
        return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})

    async def retrieve(self, _: ModelPool, http: HttpRequest, context: RequestContext) -> HttpResponse:
        query, id = read_query(context, http, RetrieveQuery), http.path_params["id"]
        if query.stream:
            return self._stream_again(context, id, position(http, id, query.starting_after))
        if query.starting_after is not None:
            raise InvalidRequest("starting_after needs stream=true", param="starting_after")
        return json_response(self._store.get(id, context.caller.owner_name).response)

    def _stream_again(self, context: RequestContext, id: str, after: int) -> HttpResponse:
        if (kept := self._streams.find(id, context.caller.owner_name)) is not None:
            return read_on(self._streams, context, kept, after)
        stored = self._store.get(id, context.caller.owner_name)
        if stored.job is None or not stored.job.streamed:
            raise InvalidRequest(
                "only a response made with stream, and with background or x-penstock-resume, can be streamed again: "
                "leave stream out",
                param="stream",
            )
        return StreamResponse(context, sent(stored.job.buffer.follow(after)), stored.job.framing)

    async def delete(self, _: ModelPool, http: HttpRequest, context: RequestContext) -> HttpResponse:
        stored = self._store.get(http.path_params["id"], context.caller.owner_name)
        if stored.job is not None:
            await stored.job.cancel()
        if (kept := self._streams.find(stored.response.id, context.caller.owner_name)) is not None:
            await self._streams.delete(kept)
        self._store.remove(stored.response.id, context.caller.owner_name)
        return json_response({"id": stored.response.id, "object": "response", "deleted": True})

    async def cancel(self, _: ModelPool, http: HttpRequest, context: RequestContext) -> HttpResponse:
        stored = self._store.get(http.path_params["id"], context.caller.owner_name)
        if stored.job is None:
            raise InvalidRequest("only a response that was made with background can be cancelled")
        await stored.job.cancel()
        return json_response(stored.response)

    async def input_items(self, _: ModelPool, http: HttpRequest, context: RequestContext) -> HttpResponse:
        """Returns all items that the response was generated from, earlier ones of the conversation included."""
        query = read_query(context, http, ItemsQuery)
        stored = self._store.get(http.path_params["id"], context.caller.owner_name)
        items = [
            *self._store.conversation(stored.response.previous_response_id, context.caller.owner_name),
            *stored.input,
        ]
        return json_response(_page(items if query.order == "asc" else items[::-1], query))

    async def open(self) -> None:
        await self._store.open()

    async def close(self) -> None:
        for job in list(self._jobs):
            await job.cancel()
        await self._store.close()

    async def _prompt(
        self,
        served: ServedModel,
        context: RequestContext,
        body: ResponsesConversation,
        settings: ResponseSettings,
        items: list[Item],
    ) -> ChatPrompt:
        before = self._store.conversation(body.previous_response_id, context.caller.owner_name)
        fields = (
            think_with_effort(context, served.text, settings.reasoning.effort, "reasoning.effort")
            | read_verbosity(context, served.text, settings.text.verbosity, "text.verbosity")
            | read_template_kwargs(context, served.text, body.chat_template_kwargs)
        )
        return await render_prompt(
            served, messages_of(body.instructions, [*before, *items]), settings.tools.use, **fields
        )

    async def _start(
        self, context: RequestContext, stored: StoredResponse, writer: ResponseWriter, *, streamed: bool
    ) -> HttpResponse:
        self._background.take(stored.tenant)
        job = stored.job = BackgroundResponse(writer, streamed=streamed, on_end=lambda: self._store.put(stored))
        self._store.put(stored)
        self._jobs.add(job)
        job.task.add_done_callback(lambda _: self._end(job, stored.tenant))
        if (payer := context.caller.payer) is not None:
            context.on_end(lambda: payer.count_until_done(job.task))
        begun = encode(stored.response)
        await self._store.written()  # its client may be sure to find it again
        if not streamed:
            return HttpResponse(begun, media_type="application/json")
        return StreamResponse(context, sent(job.buffer.follow()), job.framing)

    def _end(self, job: BackgroundResponse, owner: str | None) -> None:
        self._jobs.discard(job)
        self._background.release(owner)


def _response(
    served: ServedModel, body: ResponsesBody, settings: ResponseSettings, params: SamplingParams
) -> ResponseObject:
    return ResponseObject(
        id=new_id("resp"),
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=served.name,
        parallel_tool_calls=settings.tools.use.parallel,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=settings.reasoning,
        safety_identifier=body.safety_identifier,
        store=body.stores,
        temperature=params.temperature,
        text=settings.text,
        tool_choice=body.tool_choice or "auto",
        tools=settings.given_tools,
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        user=body.user,
    )


def _page(items: list[Item], query: ItemsQuery) -> dict[str, Any]:
    ids = [item.id for item in items]
    if query.after is not None and query.after not in ids:
        raise InvalidRequest(f"after: there is no item {query.after!r}", param="after")
    first = 0 if query.after is None else ids.index(query.after) + 1
    data, shown = items[first : first + query.limit], ids[first : first + query.limit]
    ends = {"first_id": shown[0] if shown else None, "last_id": shown[-1] if shown else None}
    return {"object": "list", "data": data, "has_more": first + query.limit < len(items), **ends}

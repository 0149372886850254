"""POST /v1/responses, and what can be done with a response afterwards: OpenAI's second way to chat.

A response is stored unless it is asked not to be, so that the next can go on with it. One made in the background is
stored from its beginning, any other when it has ended: what a client leaves before that is gone.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse

from penstock.errors import InvalidRequest, Overloaded
from penstock.server.bodies import read_body
from penstock.server.chat.chat_turn import begin, prompt_of
from penstock.server.openai.chat import template_fields
from penstock.server.openai.fields import sampling
from penstock.server.openapi import Operation
from penstock.server.responses.answer import ResponseWriter
from penstock.server.responses.background import BackgroundResponse
from penstock.server.responses.events import EVENTS
from penstock.server.responses.fields import (
    ASK_NO_EFFECT,
    LOGPROBS,
    SEALED,
    ItemsQuery,
    ResponsesBody,
    ResponsesConversation,
    ResponseSettings,
    RetrieveQuery,
    read_ask,
    read_query,
    read_settings,
)
from penstock.server.responses.input import messages_of, read_items
from penstock.server.responses.items import Item, ResponseObject, new_id
from penstock.server.responses.store import ResponseStore, StoredResponse
from penstock.server.served_model import ServedModel
from penstock.server.sse import StreamResponse, encode, reply
from penstock.text import ChatPrompt
from penstock.types import SamplingParams

MOST_AT_ONCE = 256  # in the background

RESPOND = Operation(ResponsesBody, ASK_NO_EFFECT, ResponseObject, EVENTS)
INPUT_TOKENS = Operation(ResponsesConversation, ASK_NO_EFFECT)
RETRIEVE = Operation(answers=ResponseObject, streams=EVENTS, query=RetrieveQuery)
CANCEL = Operation(answers=ResponseObject)
INPUT_ITEMS = Operation(query=ItemsQuery)


class Responses:
    """The endpoints, and the responses they share."""

    def __init__(self, store: ResponseStore | None = None) -> None:
        self._store = store or ResponseStore()
        self._jobs: set[BackgroundResponse] = set()  # under way

    async def create(self, served: ServedModel, http: HttpRequest) -> HttpResponse:
        body = await read_ask(http)
        served.check_model(body.model or "")
        settings, items = read_settings(body), read_items(body.input)
        scored = (body.top_logprobs or 0) if body.includes(LOGPROBS) else None
        (params,) = sampling(served, body, logprobs=scored)
        prompt = await self._prompt(served, body, settings, items)
        turn = begin(served, prompt, settings.use, params, body.max_output_tokens, "input")
        kept = StoredResponse(_response(served, body, settings, params), items)
        answer = ResponseWriter(served, kept.response, turn, sealed=body.includes(SEALED))
        if body.background:
            return self._start(kept, answer, streamed=bool(body.stream))
        if body.stores:
            answer.ended = lambda: self._store.put(kept)
        return await reply(http, answer, turn.running, streaming=bool(body.stream), framing=answer.framing)

    async def input_tokens(self, served: ServedModel, http: HttpRequest) -> HttpResponse:
        body = await read_body(http, ResponsesConversation, ASK_NO_EFFECT)
        if body.model is not None:
            served.check_model(body.model)
        prompt = await self._prompt(served, body, read_settings(body), read_items(body.input))
        return _json({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})

    async def retrieve(self, _: ServedModel, http: HttpRequest) -> HttpResponse:
        body, kept = read_query(http, RetrieveQuery), self._store.get(http.path_params["id"])
        if not body.stream:
            if body.starting_after is not None:
                raise InvalidRequest("starting_after needs stream=true", param="starting_after")
            return _json(kept.response)
        if kept.job is None or not kept.job.streamed:
            raise InvalidRequest(
                "only a response made with background and stream can be streamed again", param="stream"
            )
        after = -1 if body.starting_after is None else body.starting_after
        return StreamResponse(kept.job.follow(after), kept.job.framing)

    async def delete(self, _: ServedModel, http: HttpRequest) -> HttpResponse:
        kept = self._store.get(http.path_params["id"])
        if kept.job is not None:
            await kept.job.cancel()
        self._store.remove(kept.response.id)
        return _json({"id": kept.response.id, "object": "response", "deleted": True})

    async def cancel(self, _: ServedModel, http: HttpRequest) -> HttpResponse:
        kept = self._store.get(http.path_params["id"])
        if kept.job is None:
            raise InvalidRequest("only a response made in the background can be cancelled")
        await kept.job.cancel()
        return _json(kept.response)

    async def input_items(self, _: ServedModel, http: HttpRequest) -> HttpResponse:
        """Everything the response was made from: what came before it in the conversation, too."""
        page, kept = read_query(http, ItemsQuery), self._store.get(http.path_params["id"])
        items = [*self._store.conversation(kept.response.previous_response_id), *kept.input]
        return _json(_page(items if page.order == "asc" else items[::-1], page))

    async def close(self) -> None:
        for job in list(self._jobs):
            await job.cancel()

    async def _prompt(
        self, served: ServedModel, body: ResponsesConversation, settings: ResponseSettings, items: list[Item]
    ) -> ChatPrompt:
        before = self._store.conversation(body.previous_response_id)
        fields = template_fields(served.text, settings.reasoning.effort, body.chat_template_kwargs, "reasoning.effort")
        return await prompt_of(served, messages_of(body.instructions, [*before, *items]), settings.use, **fields)

    def _start(self, kept: StoredResponse, answer: ResponseWriter, *, streamed: bool) -> HttpResponse:
        if len(self._jobs) >= MOST_AT_ONCE:
            raise Overloaded(f"{MOST_AT_ONCE} responses are made in the background already: wait for one, or cancel it")
        job = kept.job = BackgroundResponse(answer, streamed=streamed, ended=lambda: self._store.put(kept))
        self._store.put(kept)
        self._jobs.add(job)
        job.task.add_done_callback(lambda _: self._jobs.discard(job))
        return StreamResponse(job.follow(), answer.framing) if streamed else _json(kept.response)


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
        parallel_tool_calls=settings.use.parallel,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=settings.reasoning,
        safety_identifier=body.safety_identifier,
        store=body.stores,
        temperature=params.temperature,
        text=settings.text,
        tool_choice=body.tool_choice or "auto",
        tools=settings.functions,
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        user=body.user,
    )


def _page(items: list[Item], page: ItemsQuery) -> dict[str, Any]:
    ids = [item.id for item in items]
    if page.after is not None and page.after not in ids:
        raise InvalidRequest(f"after: there is no item {page.after!r}", param="after")
    first = 0 if page.after is None else ids.index(page.after) + 1
    data, told = items[first : first + page.limit], ids[first : first + page.limit]
    ends = {"first_id": told[0] if told else None, "last_id": told[-1] if told else None}
    return {"object": "list", "data": data, "has_more": first + page.limit < len(items), **ends}


def _json(value: object) -> HttpResponse:
    return HttpResponse(encode(value), media_type="application/json")

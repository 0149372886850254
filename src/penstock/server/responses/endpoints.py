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
from penstock.server.responses.answer import ResponseAnswer
from penstock.server.responses.background import Job
from penstock.server.responses.events import EVENTS
from penstock.server.responses.fields import (
    ASK_NEUTRAL,
    LOGPROBS,
    SEALED,
    Ask,
    Conversation,
    Page,
    Retrieval,
    Settings,
    read_ask,
    read_query,
    read_settings,
)
from penstock.server.responses.input import messages_of, read_items
from penstock.server.responses.items import Item, Response, new_id
from penstock.server.responses.store import Kept, ResponseStore
from penstock.server.served_model import Served
from penstock.server.sse import Stream, encode, reply
from penstock.text import ChatPrompt
from penstock.types import SamplingParams

MOST_AT_ONCE = 256  # in the background

RESPOND = Operation(Ask, ASK_NEUTRAL, Response, EVENTS)
INPUT_TOKENS = Operation(Conversation, ASK_NEUTRAL)
RETRIEVE = Operation(answers=Response, streams=EVENTS, query=Retrieval)
CANCEL = Operation(answers=Response)
INPUT_ITEMS = Operation(query=Page)


class Responses:
    """The endpoints, and the responses they share."""

    def __init__(self, store: ResponseStore | None = None) -> None:
        self._store = store or ResponseStore()
        self._jobs: set[Job] = set()  # under way

    async def create(self, served: Served, http: HttpRequest) -> HttpResponse:
        asked = await read_ask(http)
        served.check_model(asked.model or "")
        settings, items = read_settings(asked), read_items(asked.input)
        scored = (asked.top_logprobs or 0) if asked.includes(LOGPROBS) else None
        (params,) = sampling(served, asked, logprobs=scored)
        prompt = await self._prompt(served, asked, settings, items)
        turn = begin(served, prompt, settings.use, params, asked.max_output_tokens, "input")
        kept = Kept(_response(served, asked, settings, params), items)
        answer = ResponseAnswer(served, kept.response, turn, sealed=asked.includes(SEALED))
        if asked.background:
            return self._start(kept, answer, streamed=bool(asked.stream))
        if asked.stores:
            answer.ended = lambda: self._store.put(kept)
        return await reply(http, answer, turn.running, streaming=bool(asked.stream), framing=answer.framing)

    async def input_tokens(self, served: Served, http: HttpRequest) -> HttpResponse:
        asked = await read_body(http, Conversation, ASK_NEUTRAL)
        if asked.model is not None:
            served.check_model(asked.model)
        prompt = await self._prompt(served, asked, read_settings(asked), read_items(asked.input))
        return _json({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})

    async def retrieve(self, _: Served, http: HttpRequest) -> HttpResponse:
        asked, kept = read_query(http, Retrieval), self._store.get(http.path_params["id"])
        if not asked.stream:
            if asked.starting_after is not None:
                raise InvalidRequest("starting_after needs stream=true", param="starting_after")
            return _json(kept.response)
        if kept.job is None or not kept.job.streamed:
            raise InvalidRequest(
                "only a response made with background and stream can be streamed again", param="stream"
            )
        after = -1 if asked.starting_after is None else asked.starting_after
        return Stream(kept.job.follow(after), kept.job.framing)

    async def delete(self, _: Served, http: HttpRequest) -> HttpResponse:
        kept = self._store.get(http.path_params["id"])
        if kept.job is not None:
            await kept.job.cancel()
        self._store.remove(kept.response.id)
        return _json({"id": kept.response.id, "object": "response", "deleted": True})

    async def cancel(self, _: Served, http: HttpRequest) -> HttpResponse:
        kept = self._store.get(http.path_params["id"])
        if kept.job is None:
            raise InvalidRequest("only a response made in the background can be cancelled")
        await kept.job.cancel()
        return _json(kept.response)

    async def input_items(self, _: Served, http: HttpRequest) -> HttpResponse:
        """Everything the response was made from: what came before it in the conversation, too."""
        page, kept = read_query(http, Page), self._store.get(http.path_params["id"])
        items = [*self._store.conversation(kept.response.previous_response_id), *kept.input]
        return _json(_page(items if page.order == "asc" else items[::-1], page))

    async def close(self) -> None:
        for job in list(self._jobs):
            await job.cancel()

    async def _prompt(self, served: Served, asked: Conversation, settings: Settings, items: list[Item]) -> ChatPrompt:
        before = self._store.conversation(asked.previous_response_id)
        fields = template_fields(served.text, settings.reasoning.effort, asked.chat_template_kwargs, "reasoning.effort")
        return await prompt_of(served, messages_of(asked.instructions, [*before, *items]), settings.use, **fields)

    def _start(self, kept: Kept, answer: ResponseAnswer, *, streamed: bool) -> HttpResponse:
        if len(self._jobs) >= MOST_AT_ONCE:
            raise Overloaded(f"{MOST_AT_ONCE} responses are made in the background already: wait for one, or cancel it")
        job = kept.job = Job(answer, streamed=streamed, ended=lambda: self._store.put(kept))
        self._store.put(kept)
        self._jobs.add(job)
        job.task.add_done_callback(lambda _: self._jobs.discard(job))
        return Stream(job.follow(), answer.framing) if streamed else _json(kept.response)


def _response(served: Served, asked: Ask, settings: Settings, params: SamplingParams) -> Response:
    return Response(
        id=new_id("resp"),
        created_at=int(time.time()),
        status="queued" if asked.background else "in_progress",
        background=bool(asked.background),
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        metadata=asked.metadata or {},
        model=served.name,
        parallel_tool_calls=settings.use.parallel,
        previous_response_id=asked.previous_response_id,
        prompt_cache_key=asked.prompt_cache_key,
        reasoning=settings.reasoning,
        safety_identifier=asked.safety_identifier,
        store=asked.stores,
        temperature=params.temperature,
        text=settings.text,
        tool_choice=asked.tool_choice or "auto",
        tools=settings.functions,
        top_logprobs=asked.top_logprobs or 0,
        top_p=params.top_p,
        user=asked.user,
    )


def _page(items: list[Item], page: Page) -> dict[str, Any]:
    ids = [item.id for item in items]
    if page.after is not None and page.after not in ids:
        raise InvalidRequest(f"after: there is no item {page.after!r}", param="after")
    first = 0 if page.after is None else ids.index(page.after) + 1
    data, told = items[first : first + page.limit], ids[first : first + page.limit]
    ends = {"first_id": told[0] if told else None, "last_id": told[-1] if told else None}
    return {"object": "list", "data": data, "has_more": first + page.limit < len(items), **ends}


def _json(value: object) -> HttpResponse:
    return HttpResponse(encode(value), media_type="application/json")

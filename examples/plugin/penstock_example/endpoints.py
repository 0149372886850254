"""Serves POST /ask: a question in, the text of an answer out."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.chat.stream import all_deltas
from penstock.server.context.request_context import RequestContext
from penstock.server.generation.fields import SamplingFields, sampling
from penstock.server.generation.prompts import encode_prompts
from penstock.server.http.bodies import read_body
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import reply
from penstock.server.models.served_model import ServedModel
from penstock.text import Delta


class Question(SamplingFields, kw_only=True):
    """Has a question, and all fields of sampling."""

    question: str
    max_tokens: int | None = None


class Answer(msgspec.Struct):
    answer: str = ""
    ended_by: str = ""


ASK = Operation(Question, {}, Answer)


async def ask(served: ServedModel, http: Request, context: RequestContext) -> Response:
    body = await read_body(http, context, Question, {})
    (params,) = sampling(served, body, max_tokens=body.max_tokens)
    (prompt,) = await encode_prompts(served, [body.question])
    request = served.request(context, prompt.ids, params, "question")
    return await reply(http, context, AnswerWriter(), all_deltas(served, context, [request]), streaming=False)


class AnswerWriter:
    """Collects the text of an answer."""

    def __init__(self) -> None:
        self._answer = Answer()

    def collect(self, choice: int, delta: Delta) -> None:
        self._answer.answer += delta.text
        self._answer.ended_by = delta.finish or ""

    def result(self) -> Answer:
        return self._answer

    def chunks(self, choice: int, delta: Delta) -> tuple[bytes, ...]:
        return ()  # this dialect has no streams

    def final_chunks(self) -> tuple[bytes, ...]:
        return ()

"""Answers POST /generate as SGLang does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Annotated, Any, NamedTuple
from uuid import uuid4

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.chat.logprobs import finite_logprob
from penstock.server.chat.schema_check import Deltas
from penstock.server.chat.stop_reason import stop_token
from penstock.server.chat.stream import deltas, together
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.sglang.fields import (
    DEFAULT_TOKENS,
    SAMPLING_NO_EFFECT,
    SglangLogprobs,
    SglangSampling,
    read_sampling,
)
from penstock.server.generation.adapter_fields import with_uses
from penstock.server.generation.explain import AnswerReport, Explanation
from penstock.server.generation.prompts import encode_prompts
from penstock.server.generation.speculation_fields import SpeculationWish, limit_drafts
from penstock.server.http.bodies import ANY_VALUE, NoEffect, read_body
from penstock.server.http.openapi import Operation, read_as
from penstock.server.http.sse import encode, reply
from penstock.server.models.served_model import ServedModel
from penstock.text import Delta, Tokenizer
from penstock.types import AdapterUse, Request, TokenLogprob

MAX_PROMPTS = 1024  # in one request, times the number of answers

NO_EFFECT: NoEffect = {
    "audio_data": ([],),
    "background": (False,),
    "custom_logit_processor": (),
    "image_data": ([],),
    "log_metrics": ANY_VALUE,
    "modalities": (["text"], []),
    "return_hidden_states": (False,),
    "session_params": (),
    "token_ids_logprob": (),
    "video_data": ([],),
}


class SglangBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Declares SGLang's fields. A list of prompts is answered with a list; settings may be lists of the same length."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: (
        Annotated[dict[str, Any], read_as(SglangSampling, no_effect=SAMPLING_NO_EFFECT)] | list[dict[str, Any]] | None
    ) = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    lora_path: str | list[str | None] | None = None  # adapters that are loaded, by name
    priority: int | None = None  # lower runs sooner, as in every dialect here
    speculation: SpeculationWish | None = None  # the most tokens that a step drafts for an answer


# -- reading ------------------------------------------------------------------------------------------------------


class SglangPrompt(NamedTuple):
    """Holds one prompt of a request and how it is answered."""

    id: str
    ids: Sequence[int]
    sampling: dict[str, Any]
    logprobs: SglangLogprobs
    where: str  # the place of `sampling` in the body
    adapters: tuple[AdapterUse, ...]


async def generate(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, SglangBody, NO_EFFECT)
    limit_drafts(served, context, body.speculation)
    context.ask_priority(body.priority or 0, "priority")
    requests: list[Request] = []
    outputs: list[SglangOutput] = []
    running: list[Deltas] = []
    tokenizer = served.text.tokenizer
    for prompt in await _prompts(served, body):
        fields, params = read_sampling(served, context, prompt.sampling, prompt.where, prompt.logprobs)
        shown = tokenizer.special_ids if fields.skip_special_tokens is False else frozenset[int]()
        for choice, each in enumerate(params):
            request = served.request(context, prompt.ids, each, _source(body), DEFAULT_TOKENS)
            request = request._replace(adapters=prompt.adapters or request.adapters)
            running.append(deltas(served, context, request, len(running), continuing=True, shown=shown))
            id = f"{prompt.id}-{choice}" if len(params) > 1 else prompt.id
            outputs.append(SglangOutput(id, request, prompt.logprobs, tokenizer))
            requests.append(request)
        if len(requests) > MAX_PROMPTS:
            raise InvalidRequest(
                f"more than {MAX_PROMPTS} answers are asked for at once: send fewer", param=_source(body)
            )
    alone = len(outputs) == 1 and not _is_list(body)
    writer = SglangWriter(outputs, Explanation(served, context, requests), alone)
    return await reply(http, context, writer, together(running), streaming=bool(body.stream))


def _source(body: SglangBody) -> str:
    return "input_ids" if body.text is None else "text"


def _is_list(body: SglangBody) -> bool:
    """Returns whether several prompts may be in the body, be it one, so that the answer is a list."""
    given = body.input_ids if body.text is None else body.text
    return isinstance(given, list) and not (body.text is None and all(isinstance(each, int) for each in given))


async def _prompts(served: ServedModel, body: SglangBody) -> list[SglangPrompt]:
    given = given_prompts(body.text, body.input_ids)
    encoded = await encode_prompts(served, given)
    for ids, _ in encoded:
        served.check_ids(ids, _source(body))
    settings = _each(body.sampling_params or {}, len(given), "sampling_params")
    wanted = _each(body.return_logprob or False, len(given), "return_logprob")
    starts = _each(-1 if body.logprob_start_len is None else body.logprob_start_len, len(given), "logprob_start_len")
    tops = _each(body.top_logprobs_num or 0, len(given), "top_logprobs_num")
    ids = _each(body.rid or "", len(given), "rid")
    adapters = _each(body.lora_path, len(given), "lora_path")
    several = isinstance(body.sampling_params, list)
    return [
        SglangPrompt(
            ids[at] or uuid4().hex,
            prompt.ids,
            dict(settings[at]),
            SglangLogprobs(wanted[at], starts[at], tops[at], bool(body.return_text_in_logprobs)),
            f"sampling_params[{at}]" if several else "sampling_params",
            with_uses(served, [AdapterUse(adapters[at])], "lora_path") if adapters[at] else (),
        )
        for at, prompt in enumerate(encoded)
    ]


def given_prompts(text: str | list[str] | None, ids: list[int | list[int]] | None) -> list[str | list[int]]:
    """Returns the prompts of `text` or `input_ids`, of which exactly one must be there."""
    if (text is None) == (ids is None):
        raise InvalidRequest("send exactly one of text and input_ids", param="text")
    if ids is None:
        prompts: list[str | list[int]] = [text] if isinstance(text, str) else [*(text or ())]
    else:
        single = [each for each in ids if isinstance(each, int)]
        lists = [each for each in ids if isinstance(each, list)]
        if single and lists:
            raise InvalidRequest("input_ids mixes token ids and lists of them: send ids or lists", param="input_ids")
        prompts = [single] if single else [*lists]
    if not prompts or not all(prompts):
        name = "text" if ids is None else "input_ids"
        raise InvalidRequest(f"{name} is empty, or has an empty prompt: send one with tokens", param=name)
    return prompts


def _each(given: Any, count: int, param: str) -> list[Any]:
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        raise InvalidRequest(f"{param} has {len(given)} entries for {count} prompts: send one, or {count}", param=param)
    return given


# -- answering ----------------------------------------------------------------------------------------------------

LogprobEntry = tuple[float | None, int, str | None]  # logprob, token id, text


class SglangFinish(msgspec.Struct, omit_defaults=True):
    type: str  # stop, length or abort
    matched: int | str | None = None  # the token or the stop string that ended it
    length: int | None = None
    message: str | None = None


class SglangMeta(msgspec.Struct):
    id: str
    prompt_tokens: int
    finish_reason: SglangFinish | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    weight_version: str | UnsetType = UNSET  # in the last chunk: the weights at its end
    e2e_latency: float | UnsetType = UNSET  # seconds; at the end
    input_token_logprobs: list[LogprobEntry] | UnsetType = UNSET
    output_token_logprobs: list[LogprobEntry] | UnsetType = UNSET
    input_top_logprobs: list[list[LogprobEntry] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[LogprobEntry] | None] | UnsetType = UNSET


class SglangAnswer(msgspec.Struct):
    text: str
    output_ids: list[int]
    meta_info: SglangMeta
    index: int | UnsetType = UNSET  # in a stream of several
    penstock: AnswerReport | UnsetType = UNSET


GENERATE = Operation(SglangBody, NO_EFFECT, (SglangAnswer, list[SglangAnswer]), SglangAnswer)


class SglangOutput:
    """Builds one answer. Each chunk of a stream has the whole text so far."""

    def __init__(self, id: str, request: Request, logprobs: SglangLogprobs, tokenizer: Tokenizer) -> None:
        self.answer = SglangAnswer("", [], SglangMeta(id, len(request.prompt)))
        self._request = request
        self._logprobs = logprobs
        self._tokenizer = tokenizer
        self._began = perf_counter()
        self._next_score = 1  # the prompt token that the next score is of: the first token has none
        if logprobs.wanted:
            meta = self.answer.meta_info
            meta.output_token_logprobs = []
            meta.input_token_logprobs = self._unscored()
            if logprobs.top:
                meta.input_top_logprobs, meta.output_top_logprobs = [None] * len(meta.input_token_logprobs), []

    def add(self, delta: Delta) -> None:
        answer, meta = self.answer, self.answer.meta_info
        answer.text += delta.text
        answer.output_ids += delta.tokens
        meta.completion_tokens += len(delta.tokens)
        meta.cached_tokens = max(meta.cached_tokens, delta.cached)
        if self._logprobs.wanted:
            self._add_logprobs(meta, delta)
        if delta.finish:
            meta.finish_reason = self._finish(delta)
            meta.e2e_latency = perf_counter() - self._began
            if delta.report is not None and delta.report.weights:
                meta.weight_version = delta.report.weights[-1].version

    def _finish(self, delta: Delta) -> SglangFinish:
        if delta.finish == "length":
            return SglangFinish("length", length=self.answer.meta_info.completion_tokens)
        if delta.finish == "abort":
            return SglangFinish("abort", message="all requests were aborted")
        return SglangFinish("stop", stop_token(delta) if delta.stop is None else delta.stop)

    def _unscored(self) -> list[LogprobEntry]:
        """Returns the entry of the first prompt token that is wanted: SGLang gives that one no logprob."""
        start = self._logprobs.start
        return [self._entry(token, None) for token in self._request.prompt[start : start + 1]] if start >= 0 else []

    def _add_logprobs(self, meta: SglangMeta, delta: Delta) -> None:
        given, made = meta.input_token_logprobs or [], meta.output_token_logprobs or []
        scores = delta.scores[max(self._logprobs.start + 1 - self._next_score, 0) :]
        self._next_score += len(delta.scores)
        given += [self._entry(each.token, each.logprob) for each in scores]
        made += [self._entry(each.token, each.logprob) for each in delta.logprobs]
        meta.input_token_logprobs, meta.output_token_logprobs = given, made
        if self._logprobs.top:
            meta.input_top_logprobs = [*(meta.input_top_logprobs or ()), *map(self._top, scores)]
            meta.output_top_logprobs = [*(meta.output_top_logprobs or ()), *map(self._top, delta.logprobs)]

    def _top(self, scored: TokenLogprob) -> list[LogprobEntry]:
        return [self._entry(token, logprob) for token, logprob in scored.top]

    def _entry(self, token: int, logprob: float | None) -> LogprobEntry:
        text = self._tokenizer.token_text(token) if self._logprobs.texts else None
        return (None if logprob is None else finite_logprob(logprob), token, text)


class SglangWriter:
    """Writes answers as SGLang does: one object if there was one prompt, else a list of them."""

    def __init__(self, outputs: list[SglangOutput], explanation: Explanation, alone: bool) -> None:
        self._outputs = outputs
        self._explanation = explanation
        self._alone = alone

    def collect(self, choice: int, delta: Delta) -> None:
        self._outputs[choice].add(delta)
        if delta.finish:
            self._explanation.end(choice, delta)

    def result(self) -> SglangAnswer | list[SglangAnswer]:
        answers = [output.answer for output in self._outputs]
        for answer in answers:
            answer.penstock = self._explanation.report()
        return answers[0] if self._alone else answers

    def chunks(self, choice: int, delta: Delta) -> Iterator[bytes]:
        self.collect(choice, delta)
        answer = self._outputs[choice].answer
        if delta.text or delta.tokens or delta.finish:
            if not self._alone:
                answer.index = choice
            if delta.finish:
                answer.penstock = self._explanation.report()
            yield encode(answer)

    def final_chunks(self) -> Iterator[bytes]:
        return iter(())

"""Serves the routes of Text Generation Inference that generate text: POST / and /generate_stream, and its kind of
/generate.

As there, answers are greedy unless a parameter asks for sampling, and a stop sequence is part of the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.chat.logprobs import finite_logprob
from penstock.server.chat.stream import all_deltas
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.tgi.errors import TGI_ERRORS
from penstock.server.generation.adapter_fields import with_uses
from penstock.server.generation.explain import AnswerReport, Explanation
from penstock.server.generation.fields import SamplingFields, sampling
from penstock.server.generation.prompts import encode_prompts
from penstock.server.generation.speculation_fields import SpeculationWish, limit_drafts
from penstock.server.http.bodies import NoEffect, read_body, read_object
from penstock.server.http.openapi import Operation, read_as
from penstock.server.http.sse import EVENT_STREAM, Framing, encode, event, reply
from penstock.server.models.served_model import ServedModel
from penstock.text import Delta, Tokenizer, seed_of_choice
from penstock.types import AdapterUse, Request, SamplerChain, SamplingParams, TokenLogprob

DEFAULT_TOKENS = 100  # TGI's
FINISH_REASONS = {"length": "length", "stop": "eos_token", "abort": "length"}  # TGI lacks a word for an abort

TGI = Framing(EVENT_STREAM, event, b"", TGI_ERRORS.encode)
NO_EFFECT: NoEffect = {}
PARAMETERS_NO_EFFECT: NoEffect = {"watermark": (False,)}


class TgiGrammar(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json", "regex", "json_schema"]
    value: Any


class TgiParameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Declares the fields of `parameters`. Every field may be null, which is the same as leaving it out."""

    max_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    loop_guard: bool | None = None  # false: at temperature 0 an answer may repeat itself without end
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: list[str] | None = None
    return_full_text: bool | None = None
    truncate: Annotated[int, Meta(ge=1)] | None = None  # tokens of the prompt's end that are used
    details: bool | None = None
    decoder_input_details: bool | None = None  # details have the prompt's tokens
    top_n_tokens: int | None = None  # number of alternatives for each token in the details
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    grammar: TgiGrammar | None = None
    adapter_id: str | None = None  # an adapter that is loaded

    @property
    def samples(self) -> bool:
        cuts = (self.temperature or 1.0) != 1.0 or bool(self.top_k) or (self.top_p or 1.0) < 1.0
        return bool(self.do_sample) or cuts or (self.typical_p or 1.0) < 1.0


ParametersObject = Annotated[dict[str, Any], read_as(TgiParameters, no_effect=PARAMETERS_NO_EFFECT)]


class TgiBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    inputs: str
    parameters: ParametersObject | None = None
    stream: bool | None = None


class TgiGenerateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Declares the fields of /generate, which other dialects have, too."""

    inputs: str | None = None
    parameters: ParametersObject | None = None
    stream: bool | None = None
    speculation: SpeculationWish | None = None  # the most tokens that a step drafts for an answer


# -- endpoints ----------------------------------------------------------------------------------------------------


async def generate_compat(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    """Serves POST /, which answers with a list of one, or with a stream if `stream` is true."""
    body = await read_body(http, context, TgiBody, NO_EFFECT)
    prompt = TgiPrompt(body.inputs, body.parameters or {}, bool(body.stream), listed=True)
    return await answer(served, http, context, prompt)


async def generate_stream(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, TgiBody, NO_EFFECT)
    return await answer(served, http, context, TgiPrompt(body.inputs, body.parameters or {}, streaming=True))


async def generate(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, TgiGenerateBody, NO_EFFECT)
    if body.inputs is None:
        raise InvalidRequest("inputs is missing: send the text to continue", param="inputs")
    limit_drafts(served, context, body.speculation)
    return await answer(served, http, context, TgiPrompt(body.inputs, body.parameters or {}, bool(body.stream)))


class TgiPrompt(NamedTuple):
    text: str
    parameters: dict[str, Any]
    streaming: bool
    listed: bool = False  # the answer is a list of one object


async def answer(served: ServedModel, http: HttpRequest, context: RequestContext, prompt: TgiPrompt) -> Response:
    text, parameters, streaming, listed = prompt
    given = read_object(context, parameters, TgiParameters, PARAMETERS_NO_EFFECT, "parameters")
    _check(given, streaming)
    if given.adapter_id:
        context.service.adapters = with_uses(served, [AdapterUse(given.adapter_id)], "parameters.adapter_id")
    params = _sampling(served, given, scored=streaming or bool(given.details) or (given.best_of or 1) > 1)
    ids = (await encode_prompts(served, [text]))[0].ids
    if given.truncate is not None:
        context.notes.truncated += max(len(ids) - given.truncate, 0)
        ids = ids[-given.truncate :]
    requests = [served.request(context, ids, each, "inputs", DEFAULT_TOKENS) for each in params]
    outputs = [TgiOutput(served.text.tokenizer, request, text, given) for request in requests]
    writer = TgiWriter(outputs, Explanation(served, context, requests), given, listed)
    running = all_deltas(served, context, requests, single=True)
    return await reply(http, context, writer, running, streaming=streaming, framing=TGI)


def _check(given: TgiParameters, streaming: bool) -> None:
    if (given.best_of or 1) > 1 and not given.samples:
        raise InvalidRequest(
            "parameters.best_of above 1 needs sampling: send do_sample: true", param="parameters.best_of"
        )
    if (given.best_of or 1) > 1 and streaming:
        raise InvalidRequest(
            "parameters.best_of above 1 cannot be streamed, because the best answer is known at the end",
            param="parameters.best_of",
        )
    if given.max_new_tokens is not None and given.max_new_tokens < 1:
        raise InvalidRequest(
            f"parameters.max_new_tokens must be at least 1; got {given.max_new_tokens}",
            param="parameters.max_new_tokens",
        )


def _sampling(served: ServedModel, given: TgiParameters, scored: bool) -> list[SamplingParams]:
    fields = SamplingFields(
        temperature=given.temperature if given.samples else 0.0,
        top_k=given.top_k,
        top_p=given.top_p,
        repetition_penalty=given.repetition_penalty,
        frequency_penalty=given.frequency_penalty,
        loop_guard=given.loop_guard,
        seed=given.seed,
        stop=given.stop,
        **_structured(given.grammar),
    )
    (params,) = sampling(
        served,
        fields,
        max_tokens=given.max_new_tokens,
        logprobs=given.top_n_tokens or 0 if scored else None,
        prompt_logprobs=0 if given.decoder_input_details and given.details else None,
    )
    chain = SamplerChain(typical_p=given.typical_p) if given.typical_p is not None and given.typical_p < 1 else None
    params = replace(params, chain=chain, include_stop_str_in_output=True)
    return [replace(params, seed=seed_of_choice(params.seed or 0, choice)) for choice in range(given.best_of or 1)]


def _structured(given: TgiGrammar | None) -> dict[str, Any]:
    """Returns the field that asks for a grammar. The value of a json_schema may contain the schema's name."""
    if given is None:
        return {}
    where, value = "parameters.grammar.value", given.value
    if given.type == "regex" and isinstance(value, str):
        return {"regex": value}
    if given.type == "json_schema" and isinstance(value, dict) and "schema" in value:
        value = value["schema"]
    if given.type != "regex" and isinstance(value, dict | bool | str):
        return {"json_schema": value}
    raise InvalidRequest(f"{where} must be a text for a regex, or a JSON schema; got {value!r:.100}", param=where)


# -- answering ----------------------------------------------------------------------------------------------------


class TgiPrefillToken(msgspec.Struct):
    id: int
    text: str
    logprob: float | None


class TgiToken(msgspec.Struct):
    id: int
    text: str
    logprob: float
    special: bool


class TgiSequence(msgspec.Struct, kw_only=True):
    """Describes one answer."""

    finish_reason: str = ""
    generated_tokens: int = 0
    seed: int | None = None
    prefill: list[TgiPrefillToken] = []
    tokens: list[TgiToken] = []
    top_tokens: list[list[TgiToken]] | UnsetType = UNSET


class TgiBestOfSequence(TgiSequence, kw_only=True):
    generated_text: str


class TgiDetails(TgiSequence, kw_only=True):
    best_of_sequences: list[TgiBestOfSequence] | UnsetType = UNSET


class TgiAnswer(msgspec.Struct):
    generated_text: str
    details: TgiDetails | UnsetType = UNSET
    penstock: AnswerReport | UnsetType = UNSET


class TgiStreamDetails(msgspec.Struct):
    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int


class TgiStreamEvent(msgspec.Struct):
    index: int
    token: TgiToken
    generated_text: str | None = None  # in the last
    details: TgiStreamDetails | None = None
    top_tokens: list[TgiToken] | UnsetType = UNSET
    penstock: AnswerReport | UnsetType = UNSET


GENERATE = Operation(TgiGenerateBody, NO_EFFECT, TgiAnswer, TgiStreamEvent)
GENERATE_COMPAT = Operation(TgiBody, NO_EFFECT, list[TgiAnswer], TgiStreamEvent)
GENERATE_STREAM = Operation(TgiBody, NO_EFFECT, "text/event-stream", TgiStreamEvent)


class TgiOutput:
    """Builds one answer."""

    def __init__(self, tokenizer: Tokenizer, request: Request, text: str, given: TgiParameters) -> None:
        self.text = text if given.return_full_text else ""
        self.sequence = TgiSequence(seed=request.sampling.seed if given.samples else None, prefill=[], tokens=[])
        self.input_length = len(request.prompt)
        self.total = 0.0  # the sum of the tokens' logprobs
        self._tokenizer = tokenizer
        self._top = bool(given.top_n_tokens)
        if self._top:
            self.sequence.top_tokens = []
        if given.decoder_input_details:
            self._add_prefill(request.prompt[0], None)

    @property
    def mean(self) -> float:
        return self.total / max(self.sequence.generated_tokens, 1)

    def add(self, delta: Delta) -> tuple[list[TgiToken], list[list[TgiToken]]]:
        """Takes a delta; returns its tokens and their alternatives, if logprobs were asked for."""
        self.text += delta.text
        self.sequence.generated_tokens += len(delta.tokens)
        self.total += sum(each.logprob for each in delta.logprobs)
        for score in delta.scores:
            self._add_prefill(score.token, finite_logprob(score.logprob))
        if delta.finish:
            self.sequence.finish_reason = "stop_sequence" if delta.stop is not None else FINISH_REASONS[delta.finish]
        tokens, tops = self._tokens(delta), [self._alternatives(each) for each in delta.logprobs]
        self.sequence.tokens += tokens
        if self.sequence.top_tokens is not UNSET:
            self.sequence.top_tokens += tops
        return tokens, tops

    def _tokens(self, delta: Delta) -> list[TgiToken]:
        """Returns a delta's tokens. Special tokens have their own text. The delta's text belongs to its last ordinary
        token, or to its last token if text was held back until the end: no text is lost or repeated."""
        special = self._tokenizer.special_ids
        plain = [at for at, each in enumerate(delta.logprobs) if each.token not in special]
        place = plain[-1] if plain else len(delta.logprobs) - 1 if delta.text else -1
        return [
            self._token(each, delta.text if at == place else "" if each.token not in special else None)
            for at, each in enumerate(delta.logprobs)
        ]

    def _alternatives(self, scored: TokenLogprob) -> list[TgiToken]:
        return [self._token(TokenLogprob(token, logprob)) for token, logprob in scored.top]

    def _token(self, scored: TokenLogprob, text: str | None = None) -> TgiToken:
        special = text is None and scored.token in self._tokenizer.special_ids
        shown = self._tokenizer.token_text(scored.token) if text is None else text
        return TgiToken(scored.token, shown, finite_logprob(scored.logprob), special)

    def _add_prefill(self, token: int, logprob: float | None) -> None:
        self.sequence.prefill.append(TgiPrefillToken(token, self._tokenizer.token_text(token), logprob))


class TgiWriter:
    def __init__(
        self, outputs: Sequence[TgiOutput], explanation: Explanation, given: TgiParameters, listed: bool
    ) -> None:
        self._outputs = outputs
        self._explanation = explanation
        self._details = bool(given.details)
        self._listed = listed
        self._top = bool(given.top_n_tokens)
        self._index = 0

    def collect(self, choice: int, delta: Delta) -> None:
        self._outputs[choice].add(delta)
        if delta.finish:
            self._explanation.end(choice, delta)

    def result(self) -> TgiAnswer | list[TgiAnswer]:
        best, *others = sorted(self._outputs, key=lambda output: output.mean, reverse=True)
        answer = TgiAnswer(best.text, penstock=self._explanation.report())
        if self._details:
            answer.details = TgiDetails(**msgspec.structs.asdict(best.sequence))
            if others:
                answer.details.best_of_sequences = [
                    TgiBestOfSequence(**msgspec.structs.asdict(each.sequence), generated_text=each.text)
                    for each in others
                ]
        return [answer] if self._listed else answer

    def chunks(self, choice: int, delta: Delta) -> Iterator[bytes]:
        output = self._outputs[choice]
        tokens, tops = output.add(delta)
        events = [
            TgiStreamEvent(self._index + at, token, top_tokens=top if self._top else UNSET)
            for at, (token, top) in enumerate(zip(tokens, tops, strict=True), 1)
        ]
        self._index += len(events)
        if delta.finish:
            self._explanation.end(choice, delta)
            self._end(output, events)
        for each in events:
            yield encode(each)

    def final_chunks(self) -> Iterator[bytes]:
        return iter(())

    def _end(self, output: TgiOutput, events: list[TgiStreamEvent]) -> None:
        sequence = output.sequence
        last = events[-1]
        last.generated_text = output.text
        last.details = TgiStreamDetails(
            sequence.finish_reason, sequence.generated_tokens, sequence.seed, output.input_length
        )
        last.penstock = self._explanation.report()

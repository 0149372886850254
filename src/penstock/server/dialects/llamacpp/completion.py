"""Serves POST /completion and /completions, in llama.cpp's own shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.server.chat.stream import Cut, deltas, together
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.llamacpp.errors import LLAMACPP_ERRORS
from penstock.server.dialects.llamacpp.fields import (
    NO_EFFECT,
    CompletionFields,
    GenerationSettings,
    NativeFields,
    sampling_of,
    settings_of,
)
from penstock.server.dialects.llamacpp.probabilities import TokenProbability, probabilities
from penstock.server.dialects.llamacpp.prompts import encode_prompts
from penstock.server.generation.adapter_fields import choose_adapters
from penstock.server.generation.explain import AnswerReport, Explanation
from penstock.server.generation.fields import fitting
from penstock.server.generation.timings import Stopwatch, Timings
from penstock.server.http.bodies import read_body
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import EVENT_STREAM, Framing, encode, event, reply
from penstock.server.models.served_model import ServedModel
from penstock.text import Delta
from penstock.types import Request, SamplingParams

LLAMACPP = Framing(
    EVENT_STREAM, event, b"", LLAMACPP_ERRORS.encode
)  # a stream ends with its last chunk, without [DONE]
NO_SLOT = -1  # llama.cpp's value for any slot


class NativeChunk(msgspec.Struct, kw_only=True):
    """Is a part of a streamed answer. The last part is a `NativeAnswer`."""

    index: int
    content: str
    tokens: list[int]
    stop: bool = False
    id_slot: int = NO_SLOT
    tokens_predicted: int
    tokens_evaluated: int
    timings: Timings | UnsetType = UNSET
    completion_probabilities: list[TokenProbability] | UnsetType = UNSET


class NativeAnswer(msgspec.Struct, kw_only=True):
    """Is a whole answer, or the last part of a streamed one."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int = NO_SLOT
    stop: bool = True
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: GenerationSettings
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: str  # eos, limit, word or none
    stopping_word: str
    tokens_cached: int
    timings: Timings
    completion_probabilities: list[TokenProbability] | UnsetType = UNSET
    penstock: AnswerReport | UnsetType = UNSET


COMPLETION = Operation(CompletionFields, NO_EFFECT, streams=NativeChunk)


async def completion(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, CompletionFields, NO_EFFECT)
    prompts = await encode_prompts(served, body.prompt, "prompt")
    return await answer(served, http, context, body, prompts)


async def answer(
    served: ServedModel,
    http: HttpRequest,
    context: RequestContext,
    body: NativeFields,
    prompts: Sequence[Sequence[int]],
    ends: Sequence[int] = (),
) -> Response:
    """Answers prompts; `ends` are further tokens that end an answer."""
    choose_adapters(served, context, None, body.lora)
    sampling = sampling_of(served, context, body, ends)
    params = [fitting(served, prompt, each) for prompt in prompts for each in sampling]
    asked = zip([prompt for prompt in prompts for _ in sampling], params, strict=True)
    requests = [served.request(context, prompt, each, "prompt") for prompt, each in asked]
    writer = NativeWriter(served, context, requests, sampling, body)
    limit = body.t_max_predict_ms or -1
    running = [
        deltas(served, context, request, choice, continuing=True, cut=when_late(limit, request) if limit > 0 else None)
        for choice, request in enumerate(requests)
    ]
    return await reply(http, context, writer, together(running), streaming=bool(body.stream), framing=LLAMACPP)


def when_late(limit: int, request: Request) -> Cut:
    """Returns a check that ends an answer with a line break `limit` milliseconds after its first token."""
    stopwatch, broken = Stopwatch(request), False

    def cut(delta: Delta) -> Delta:
        nonlocal broken
        stopwatch.add(delta)
        broken = broken or "\n" in delta.text
        late = broken and stopwatch.generating_ms > limit
        return delta._replace(finish="length") if late else delta

    return cut


class _Progress(NamedTuple):
    """Holds the state of an unfinished answer."""

    stopwatch: Stopwatch
    text: list[str]
    tokens: list[int]
    probabilities: list[TokenProbability]


class NativeWriter:
    def __init__(
        self,
        served: ServedModel,
        context: RequestContext,
        requests: Sequence[Request],
        sampling: Sequence[SamplingParams],
        body: NativeFields,
    ) -> None:
        """Takes the requested sampling of each choice, before the context limits it."""
        self._served = served
        self._requests = requests
        self._sampling = sampling
        self._body = body
        self._count = body.n_probs or 0
        self._fields = body.response_fields or []
        self._return_tokens = bool(body.return_tokens)
        self._explanation = Explanation(served, context, requests)
        self._progress = [_Progress(Stopwatch(request), [], [], []) for request in requests]
        self._answers: dict[int, NativeAnswer] = {}

    def collect(self, choice: int, delta: Delta) -> None:
        progress = self._add(choice, delta)
        progress.tokens.extend(delta.tokens[: len(delta.tokens) - delta.silent])
        progress.probabilities.extend(self._probabilities(delta))
        if delta.finish:
            self._answers[choice] = self._answer(choice, delta)

    def result(self) -> Any:
        """Returns one answer, or a list if the request has several prompts or choices."""
        report = self._explanation.report()
        answers = [self._answers[choice] for choice in range(len(self._requests))]
        for each in answers:
            each.penstock = report
        chosen = [self._selected(each) for each in answers]
        return chosen[0] if len(chosen) == 1 else chosen

    def chunks(self, choice: int, delta: Delta) -> Iterator[bytes]:
        progress = self._add(choice, delta)
        spoken = list(delta.tokens[: len(delta.tokens) - delta.silent])
        if spoken or delta.text:
            yield encode(
                NativeChunk(
                    index=choice,
                    content=delta.text,
                    tokens=spoken,
                    tokens_predicted=progress.stopwatch.generated,
                    tokens_evaluated=len(self._requests[choice].prompt),
                    timings=progress.stopwatch.timings() if self._body.timings_per_token else UNSET,
                    completion_probabilities=self._probabilities(delta) or UNSET,
                )
            )
        if delta.finish:
            answer = self._answer(choice, delta)
            answer.content, answer.penstock = "", self._explanation.report()
            yield encode(self._selected(answer))

    def final_chunks(self) -> Iterator[bytes]:
        return iter(())

    def _add(self, choice: int, delta: Delta) -> _Progress:
        progress = self._progress[choice]
        progress.stopwatch.add(delta)
        progress.text.append(delta.text)
        if delta.finish:
            self._explanation.end(choice, delta)
        return progress

    def _probabilities(self, delta: Delta) -> list[TokenProbability]:
        if not self._count:
            return []
        after = self._sampling[0] if self._body.post_sampling_probs else None
        return probabilities(self._served.text.tokenizer, delta, self._count, after)

    def _answer(self, choice: int, delta: Delta) -> NativeAnswer:
        request, progress = self._requests[choice], self._progress[choice]
        prompt, generated = len(request.prompt), progress.stopwatch.generated
        text = "".join(progress.text)
        return NativeAnswer(
            index=choice,
            content=text,
            tokens=progress.tokens if self._return_tokens else [],
            model=self._served.name,
            tokens_predicted=generated,
            tokens_evaluated=prompt,
            generation_settings=self._settings(choice),
            prompt=self._served.text.tokenizer.decode(request.prompt, special=True, continuing=True),
            has_new_line="\n" in text,
            truncated=delta.finish == "length" and prompt + generated >= self._served.limits.max_len,
            stop_type=self._stop_type(delta),
            stopping_word=delta.stop or "",
            tokens_cached=prompt + max(generated - 1, 0),
            timings=progress.stopwatch.timings(),
            completion_probabilities=progress.probabilities or UNSET,
        )

    def _settings(self, choice: int) -> GenerationSettings:
        sampling, speculation = self._sampling[choice % len(self._sampling)], self._requests[choice].speculation
        settings = settings_of(self._served, sampling, speculation)
        settings.stream, settings.n_probs = bool(self._body.stream), self._count
        settings.timings_per_token = bool(self._body.timings_per_token)
        settings.post_sampling_probs = bool(self._body.post_sampling_probs)
        return settings

    def _stop_type(self, delta: Delta) -> str:
        if delta.stop is not None:
            return "word"
        if delta.finish == "abort":
            return "none"
        return "limit" if delta.finish == "length" else "eos"

    def _selected(self, answer: NativeAnswer) -> Any:
        """Returns the answer, or only the fields that the request lists. A path with slashes selects a nested field,
        and becomes its name."""
        if not self._fields:
            return answer
        whole = msgspec.to_builtins(answer)
        found = {path: _at(whole, path) for path in self._fields}
        return {path: value for path, value in found.items() if value is not UNSET}


def _at(tree: Any, path: str) -> Any:
    for step in path.split("/"):
        if not isinstance(tree, dict) or step not in tree:
            return UNSET
        tree = tree[step]
    return tree

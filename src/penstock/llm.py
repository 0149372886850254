"""Penstock in a script: blocking calls over an engine that runs in the calling thread.

with LLM("smollm2") as llm:
    print(llm.generate("The sky is blue because", SamplingParams(max_tokens=40)).text)
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import index
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar, overload

import numpy as np

from penstock.config import Config
from penstock.engine.build import build_engine
from penstock.errors import ConfigError, InvalidRequest, PenstockError
from penstock.model.load import open_checkpoint, text_of
from penstock.store import DEFAULT, fetch
from penstock.text import (
    Delta,
    TextStream,
    check_answers,
    check_dimensions,
    embedding,
    embedding_request,
    make_request,
    read_step,
)
from penstock.text.embedding import Vector, pooling_of
from penstock.types import Event, Request, SamplingParams, TokenLogprob

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Prompt = str | Sequence[int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    tokens: tuple[int, ...]  # the one that ended it included
    finish_reason: str  # "stop" or "length"
    prompt_tokens: int
    cached_tokens: int = 0  # prompt tokens whose KV was reused
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the step: an engine left half-way through one could not go on."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    pressed: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pressed:
        previous(*pressed[0])


def in_background(work: Callable[[], T]) -> Callable[[], T]:
    """Begins the work in a thread of its own; what this returns waits for the result, or raises what it raised."""
    results: list[T] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            failures.append(error)

    def result() -> T:
        thread.join()
        for error in failures:
            raise error
        return results[0]

    thread = threading.Thread(target=run, name="penstock-text")
    thread.start()
    return result


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and not isinstance(prompts[0], Sequence))


class LLM:
    """One model in this process, for one thread. Settings are the fields of `Config`."""

    def __init__(self, model: str | Path = DEFAULT, **settings: Any) -> None:
        known = {field.name for field in fields(Config)} - {"model"}
        if unknown := sorted(settings.keys() - known):
            raise ConfigError(f"LLM has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        path = fetch(str(model))
        config = Config(model=str(path), **settings)
        checkpoint = open_checkpoint(path)
        text = in_background(lambda: text_of(checkpoint))  # while weights are packed, the interpreter is free
        self._engine = build_engine(config, checkpoint)
        try:
            self._text = text()
        except BaseException:
            self._engine.close()
            raise
        self._ids = itertools.count(1)
        self._answers: dict[int, Answer] = {}

    @overload
    def generate(self, prompts: Prompt, params: SamplingParams | None = None) -> Completion: ...
    @overload
    def generate(
        self, prompts: list[str] | list[list[int]], params: SamplingParams | None = None
    ) -> list[Completion]: ...
    def generate(self, prompts: Any, params: SamplingParams | None = None) -> Completion | list[Completion]:
        """Continues a text or a list of token ids, or several of either at once."""
        one = _is_one(prompts)
        completions = self._finish([self._answer(prompt, params) for prompt in ([prompts] if one else prompts)])
        return completions[0] if one else completions

    def embed(
        self,
        prompts: Prompt | list[str] | list[list[int]],
        *,
        pooling: str | None = None,
        dimensions: int | None = None,
    ) -> Vector:
        """The embedding of a text or a list of token ids, [dim], or of several of either, [prompts, dim]: their hidden
        states after the last norm, pooled (the "mean" of all, the "last" one, or "cls", the first; None: as the model
        was made for) and scaled to a length of 1. Given `dimensions`, only the first so many values count."""
        check_dimensions(dimensions, self._engine.limits.dim)
        one = _is_one(prompts)
        answers = [self._pooled(prompt, pooling) for prompt in ([prompts] if one else prompts)]
        self._finish(answers)
        vectors = [embedding(answer.pooled, dimensions) for answer in answers]
        width = dimensions or self._engine.limits.dim
        return vectors[0] if one else np.array(vectors, np.float32).reshape(len(vectors), width)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """The assistant's next message."""
        return self._finish([self._answer_chat(messages, params)])[0]

    def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None) -> Stream:
        """Like `generate`, or like `chat` when given messages, with the text as it comes."""
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        answer = self._answer_chat(prompt, params) if is_chat else self._answer(prompt, params)
        self._add(answer)
        return Stream(answer, self._pieces(answer))

    def check_answers(self) -> None:
        """Raises InvalidRequest where the model makes embeddings alone."""
        check_answers(self._engine.limits)

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, prompt: Any, params: SamplingParams | None) -> Answer:
        request = self._request(self._encode(prompt, self._text.encode_prompt), params or SamplingParams())
        return Answer(request, TextStream(self._text.tokenizer, request.sampling.stop, continuing=True))

    def _answer_chat(self, messages: Any, params: SamplingParams | None) -> Answer:
        self.check_answers()
        request = self._request(self._text.encode_chat(messages), params or SamplingParams())
        return Answer(request, TextStream(self._text.tokenizer, request.sampling.stop))

    def _pooled(self, prompt: Any, pooling: str | None) -> Answer:
        limits = self._engine.limits
        kind, ids = pooling_of(pooling, limits), self._encode(prompt, self._text.encode_whole)
        request = embedding_request(next(self._ids), ids, limits.max_len, kind, param="prompt")
        return Answer(request, TextStream(self._text.tokenizer, ()))

    def _encode(self, prompt: Any, encode: Callable[[str], list[int]]) -> list[int]:
        try:
            return encode(prompt) if isinstance(prompt, str) else [index(token) for token in prompt]
        except TypeError as error:
            raise InvalidRequest(f"a prompt is a text or a list of token ids: {error}", param="prompt") from error

    def _request(self, prompt: list[int], params: SamplingParams) -> Request:
        self.check_answers()
        return make_request(next(self._ids), prompt, params, self._text.tokenizer, self._engine.limits.max_len)

    def _finish(self, answers: Sequence[Answer]) -> list[Completion]:
        try:
            for answer in answers:
                self._add(answer)
            while not all(answer.reason for answer in answers):
                self._step()
        finally:
            self._leave(answers)
        return [answer.completion() for answer in answers]

    def _pieces(self, answer: Answer) -> Generator[str]:
        try:
            yield ""  # begun: from here on a stream that is dropped, even unread, leaves its request
            while (text := answer.fresh()) or not answer.reason:
                if text:
                    yield text
                else:
                    self._step()
            answer.completion()
        finally:
            self._leave([answer])

    @_uninterrupted()
    def _add(self, answer: Answer) -> None:
        self._engine.add(answer.request)
        self._answers[answer.request.id] = answer

    @_uninterrupted()
    def _step(self) -> None:
        shares: dict[int, list[Event]] = {}
        for event in self._engine.step():
            shares.setdefault(event.seq, []).append(event)
        for id in shares.keys() & self._answers.keys():
            self._answers[id].take(shares[id])
            if self._answers[id].reason:
                del self._answers[id]
                self._engine.abort(id)  # after a stop string the engine would have more to say

    @_uninterrupted()
    def _leave(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            if self._answers.pop(answer.request.id, None):
                answer.reason = "abort"
                self._engine.abort(answer.request.id)


class Stream(Iterator[str]):
    """The text of one answer as it comes. Leaving it early aborts the request."""

    def __init__(self, answer: Answer, pieces: Generator[str]) -> None:
        self._answer = answer
        self._pieces = pieces
        next(pieces)

    def __next__(self) -> str:
        return next(self._pieces)

    def rest(self) -> Completion:
        """Reads to the end."""
        for _ in self:
            pass
        return self.completion

    def close(self) -> None:
        self._pieces.close()

    @property
    def completion(self) -> Completion:
        """What came so far; all of it once the stream has ended."""
        return self._answer.completion()


class Answer:
    """One request under way: its events become tokens, text and a reason to end."""

    def __init__(self, request: Request, text: TextStream) -> None:
        self.request = request
        self.reason = ""  # empty while it goes on
        self._failure: PenstockError | None = None
        self._text = text
        self._deltas: list[Delta] = []
        self._told = 0  # of the deltas

    def take(self, events: Sequence[Event]) -> None:
        """This request's share of a step."""
        try:
            delta = read_step(self._text, events)
        except PenstockError as failure:
            self._failure, self.reason = failure, "failed"
        else:
            self._deltas.append(delta)
            self.reason = delta.finish or ""

    @property
    def pooled(self) -> bytes:
        """The hidden state that was asked for, once it has ended."""
        return self._deltas[-1].pooled

    def fresh(self) -> str:
        """The text that came since this was last asked."""
        text = "".join(delta.text for delta in self._deltas[self._told :])
        self._told = len(self._deltas)
        return text

    def completion(self) -> Completion:
        if self._failure is not None:
            raise self._failure
        return Completion(
            text="".join(delta.text for delta in self._deltas),
            tokens=tuple(token for delta in self._deltas for token in delta.tokens),
            finish_reason=self.reason,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=max((delta.cached for delta in self._deltas), default=0),
            logprobs=tuple(entry for delta in self._deltas for entry in delta.logprobs),
            prompt_logprobs=tuple(entry for delta in self._deltas for entry in delta.scores),
        )

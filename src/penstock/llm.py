"""Penstock in a script: blocking calls to an engine that runs in the calling thread.

with LLM("smollm2") as llm:
    print(llm.generate("The sky is blue because", SamplingParams(max_tokens=40)).text)
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar, overload

import numpy as np

from penstock.config import configure
from penstock.engine.build import build_engine, open_configured
from penstock.engine.loop import Abort, Add
from penstock.errors import InvalidRequest, PenstockError
from penstock.ipc.inprocess_engine import InProcessEngine
from penstock.model.load import text_of
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
from penstock.text.tools import MessageDict
from penstock.types import Event, Request, SamplingParams, TokenLogprob

PromptLike = str | Sequence[int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Completion:
    """Holds the answer to one prompt."""

    text: str
    tokens: tuple[int, ...]  # the one that ended it included
    finish_reason: str  # "stop" or "length"; "abort" for a stream that was closed early
    prompt_tokens: int
    cached_tokens: int = 0  # prompt tokens whose KV was reused
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class LLM:
    """Runs one model in this process, for one thread. Keyword arguments are the engine options (`penstock.config`)."""

    def __init__(self, model: str | Path = DEFAULT, **options: Any) -> None:
        path = fetch(str(model))
        config = configure(path, options)
        checkpoint = open_configured(config)
        text = _start(lambda: text_of(checkpoint))  # the tokenizer is read while native code packs weights
        self._engine = InProcessEngine(lambda: build_engine(config, checkpoint), config.name)
        self._limits = self._engine.open().limits
        try:
            self._text = text()
        except BaseException:
            self._engine.close()
            raise
        self._ids = itertools.count(1)
        self._pending: dict[int, PendingCompletion] = {}

    @overload
    def generate(self, prompts: PromptLike, params: SamplingParams | None = None) -> Completion: ...
    @overload
    def generate(
        self, prompts: list[str] | list[list[int]], params: SamplingParams | None = None
    ) -> list[Completion]: ...
    def generate(self, prompts: Any, params: SamplingParams | None = None) -> Completion | list[Completion]:
        """Continues a text or a list of token ids, or several of either at once."""
        one = _is_one(prompts)
        completions = self._complete([self._generation(prompt, params) for prompt in ([prompts] if one else prompts)])
        return completions[0] if one else completions

    def embed(
        self,
        prompts: PromptLike | list[str] | list[list[int]],
        *,
        pooling: str | None = None,
        dimensions: int | None = None,
    ) -> Vector:
        """Returns the embedding of a text or a list of token ids, [dim], or of several of either, [prompts, dim].

        An embedding is made of the hidden states after the last norm, pooled and scaled to a length of 1. `pooling` is
        "mean" (of all tokens), "last" (token) or "cls" (the first token); None takes the model's own. `dimensions`
        keeps that many leading values."""
        check_dimensions(dimensions, self._limits.dim)
        one = _is_one(prompts)
        pending = [self._pooling(prompt, pooling) for prompt in ([prompts] if one else prompts)]
        self._complete(pending)
        vectors = [embedding(entry.pooled, dimensions) for entry in pending]
        width = dimensions or self._limits.dim
        return vectors[0] if one else np.array(vectors, np.float32).reshape(len(vectors), width)

    def chat(self, messages: Sequence[MessageDict], params: SamplingParams | None = None) -> Completion:
        """Returns the assistant's next message."""
        return self._complete([self._chat_generation(messages, params)])[0]

    def stream(
        self, prompt: PromptLike | Sequence[MessageDict], params: SamplingParams | None = None
    ) -> CompletionStream:
        """Does what `generate` does, or `chat` when given messages, and returns the text as it comes."""
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        pending = self._chat_generation(prompt, params) if is_chat else self._generation(prompt, params)
        self._submit(pending)
        return CompletionStream(pending, self._pieces(pending))

    def check_answers(self) -> None:
        """Raises InvalidRequest if the model makes embeddings only."""
        check_answers(self._limits)

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generation(self, prompt: Any, params: SamplingParams | None) -> PendingCompletion:
        request = self._request(self._encode(prompt, self._text.encode_prompt), params or SamplingParams())
        return PendingCompletion(request, TextStream(self._text.tokenizer, request.sampling.stop, continuing=True))

    def _chat_generation(self, messages: Any, params: SamplingParams | None) -> PendingCompletion:
        self.check_answers()
        request = self._request(self._text.encode_chat(messages), params or SamplingParams())
        return PendingCompletion(request, TextStream(self._text.tokenizer, request.sampling.stop))

    def _pooling(self, prompt: Any, pooling: str | None) -> PendingCompletion:
        kind, ids = pooling_of(pooling, self._limits), self._encode(prompt, self._text.encode_whole)
        request = embedding_request(next(self._ids), ids, self._limits.max_len, kind, param="prompt")
        return PendingCompletion(request, TextStream(self._text.tokenizer, ()))

    def _encode(self, prompt: Any, encode: Callable[[str], list[int]]) -> list[int]:
        try:
            return encode(prompt) if isinstance(prompt, str) else [index(token) for token in prompt]
        except TypeError as error:
            raise InvalidRequest(f"a prompt is a text or a list of token ids: {error}", param="prompt") from error

    def _request(self, prompt: list[int], params: SamplingParams) -> Request:
        self.check_answers()
        return make_request(next(self._ids), prompt, params, self._text.tokenizer, self._limits.max_len)

    def _complete(self, pending: Sequence[PendingCompletion]) -> list[Completion]:
        """Runs requests to their end; the first failure ends all of them."""
        try:
            for entry in pending:
                self._submit(entry)
            while not all(entry.ended() for entry in pending):
                self._step()
        finally:
            self._abandon(pending)
        return [entry.completion() for entry in pending]

    def _pieces(self, pending: PendingCompletion) -> Generator[str]:
        try:
            yield ""  # started: from here on, dropping the generator aborts the request even if nothing was read
            while (text := pending.take_text()) or not pending.finish_reason:
                if text:
                    yield text
                else:
                    self._step()
            pending.ended()
        finally:
            self._abandon([pending])

    def _submit(self, pending: PendingCompletion) -> None:
        self._pending[pending.request.id] = pending
        self._engine.send(Add(pending.request))

    def _step(self) -> None:
        with _interrupts_deferred():
            for id, events in self._engine.step().items():
                if pending := self._pending.get(id):
                    pending.add(events)
                    if pending.finish_reason:
                        del self._pending[id]
                        self._engine.send(Abort(id))  # after a stop string the engine would go on

    def _abandon(self, pending: Iterable[PendingCompletion]) -> None:
        """Aborts those that have not ended."""
        for entry in pending:
            if self._pending.pop(entry.request.id, None):
                entry.finish_reason = "abort"
                self._engine.send(Abort(entry.request.id))


class CompletionStream(Iterator[str]):
    """Yields the text of one answer as it comes. Dropping or closing it early aborts the request."""

    def __init__(self, pending: PendingCompletion, pieces: Generator[str]) -> None:
        self._pending = pending
        self._pieces = pieces
        next(pieces)

    def __next__(self) -> str:
        return next(self._pieces)

    def rest(self) -> Completion:
        """Reads to the end and returns the whole answer."""
        for _ in self:
            pass
        return self.completion

    def close(self) -> None:
        self._pieces.close()

    @property
    def completion(self) -> Completion:
        """Returns the answer so far; all of it once the stream has ended."""
        return self._pending.completion()


class PendingCompletion:
    """Collects the events of one request as tokens, text and a reason to end."""

    def __init__(self, request: Request, text: TextStream) -> None:
        self.request = request
        self.finish_reason = ""  # empty while it goes on
        self._failure: PenstockError | None = None
        self._text = text
        self._deltas: list[Delta] = []
        self._taken = 0  # deltas whose text was taken

    def add(self, events: Sequence[Event]) -> None:
        """Adds this request's events of one step."""
        try:
            delta = read_step(self._text, events)
        except PenstockError as failure:
            self._failure, self.finish_reason = failure, "failed"
        else:
            self._deltas.append(delta)
            self.finish_reason = delta.finish or ""

    def ended(self) -> bool:
        """Returns whether the request has ended; raises the error that ended it, if one did."""
        if self._failure is not None:
            raise self._failure
        return bool(self.finish_reason)

    @property
    def pooled(self) -> bytes:
        """Returns the pooled hidden state, once the request has ended."""
        return self._deltas[-1].pooled

    def take_text(self) -> str:
        """Returns the text that came since the last call."""
        text = "".join(delta.text for delta in self._deltas[self._taken :])
        self._taken = len(self._deltas)
        return text

    def completion(self) -> Completion:
        """Returns what came so far; raises the error that ended the request, if one did."""
        self.ended()
        return Completion(
            text="".join(delta.text for delta in self._deltas),
            tokens=tuple(token for delta in self._deltas for token in delta.tokens),
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=max((delta.cached for delta in self._deltas), default=0),
            logprobs=tuple(entry for delta in self._deltas for entry in delta.logprobs),
            prompt_logprobs=tuple(entry for delta in self._deltas for entry in delta.scores),
        )


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and not isinstance(prompts[0], Sequence))


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Delays Ctrl-C to the end of the block: an engine that was left in the middle of a step could not go on."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    interrupts: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: interrupts.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if interrupts:
        previous(*interrupts[0])


def _start(work: Callable[[], T]) -> Callable[[], T]:
    """Starts the work in a thread. Returns a function that waits for its result, or raises what it raised."""
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

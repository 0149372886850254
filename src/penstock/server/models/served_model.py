"""Describes a model that is served: its engine, its text side, and the name clients know it by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from time import monotonic, perf_counter
from typing import NamedTuple, TypeVar

from penstock.errors import EngineUnavailable, InvalidRequest, Overloaded, WaitTooLong
from penstock.ipc.client import EngineClient, EngineState
from penstock.server.access.expected_wait import WaitForecast, limit_of
from penstock.server.context.request_context import RequestContext
from penstock.server.telemetry.metrics import Metrics
from penstock.store import DerivedModel
from penstock.templates.process import RenderProcess
from penstock.text import Text, check_answers, make_request
from penstock.types import AdapterInfo, AdapterUse, Limits, Request, SamplingParams

T = TypeVar("T")
TakeTokens = Callable[[Sequence[int], int], None]  # called with a step's tokens, and how many of the prompt were cached

CLIENTS_NAMES = (  # patterns of names that clients insist on; the last three are for TGI's and SGLang's clients
    "claude*", "gpt-*", "chatgpt*", "codex*", "o[0-9]*", "tgi", "dummy", "default",
)  # fmt: skip
UNLISTED = "file "  # begins the names of adapters that only a derived model's settings name
RENDER_PATIENCE = 5.0  # seconds that a chat waits for others to be rendered: usually none
OFF_LOOP = 4096  # characters: encoding more than this would hold up every other stream


class ServedModel(NamedTuple):
    client: EngineClient
    text: Text
    name: str
    created: int  # seconds since 1970
    metrics: Metrics
    path: Path | None = None  # the model's files, if known
    aliases: tuple[str, ...] = ()  # patterns of further names
    trust_templates: bool = False  # chat templates in requests are rendered
    derived: DerivedModel | None = None  # whose settings it has, if that is another name for it
    adapters: tuple[AdapterUse, ...] = ()  # implied by its name
    waits: WaitForecast | None = None  # refuses what would wait too long; None: nothing is

    @contextmanager
    def expected(self, context: RequestContext, request: Request) -> Iterator[TakeTokens]:
        """Holds a request's place among those that are forecast; yields what to call with each step's tokens. Raises
        WaitTooLong if its first token would come too late."""
        waits, client = self.waits, self.client
        if waits is None:
            yield lambda tokens, cached: None
            return
        limits = self.limits
        try:
            waits.measure(client.stats, self._engines())
            held = client.cached_tokens(request)
            expected = waits.admit(request, context.service.terms.patience, perf_counter(), limits, context, held)
        except WaitTooLong:
            client.note_refused(request)
            self._count_refused(context, request)
            raise
        answer: list[int] = []

        def take(tokens: Sequence[int], cached: int) -> None:
            if not answer:
                waits.measure(client.stats, self._engines())
                outcome = waits.answer(expected, perf_counter(), cached)
                if not request.background:
                    self.metrics.note_wait(limit_of(request.claim), outcome)
            answer.extend(tokens)

        try:
            yield take
        except WaitTooLong as error:  # the engine's word
            error.retry_after = max(error.retry_after, waits.seconds_to_retry(expected, perf_counter()))
            self._count_refused(context, request)
            raise
        finally:
            waits.end(expected, answer, limits)

    def _engines(self) -> int:
        """Returns how many engines of a fleet answer; 0: the model has one engine."""
        return sum(each.state == EngineState.READY for each in self.client.replicas)

    def _count_refused(self, context: RequestContext, request: Request) -> None:
        self.metrics.refused.labels(limit_of(request.claim)).inc()
        if context.caller.payer is not None:
            context.caller.payer.refused["wait"] += 1

    @property
    def limits(self) -> Limits:
        if self.client.hello is None:
            raise EngineUnavailable(self.client.unavailable_reason)
        return self.client.hello.limits

    @property
    def draft_tokens(self) -> int:
        """Returns the most tokens that a step drafts for one request; 0: its engine drafts nothing."""
        return 0 if self.client.hello is None else self.client.hello.draft_tokens

    @property
    def encoder(self) -> bool:
        """True if the model is known to be an encoder, which returns embeddings and no text."""
        return self.client.hello is not None and self.client.hello.limits.encoder

    @property
    def generates(self) -> bool:
        """True unless the model is known to return embeddings or labels and no text."""
        return self.client.hello is None or self.client.hello.limits.generates

    @property
    def listed_adapters(self) -> list[AdapterInfo]:
        return [info for name, info in self.client.adapters.items() if not name.startswith(UNLISTED)]

    def stands_for_it(self, name: str) -> bool:
        """Returns whether a name that is not its own means the served model."""
        return any(fnmatchcase(name, pattern) for pattern in self.aliases)

    def check_model(self, name: str | None, context: RequestContext) -> None:
        """Raises if no model has the name. No name means the served model. An alias is reported in
        the `x-penstock-model` header."""
        if name is None or name == self.name:
            return
        if not self.stands_for_it(name):
            raise context.unknown_model(name)
        context.notes.stood_in = self.name

    def check_answers(self) -> None:
        check_answers(self.limits)

    def check_ids(self, ids: Collection[int], param: str) -> None:
        vocab = min(self.limits.vocab, self.text.tokenizer.vocab_size)
        if ids and not (min(ids) >= 0 and max(ids) < vocab):
            wrong = next(id for id in ids if not 0 <= id < vocab)
            raise InvalidRequest(f"{param}: token ids are from 0 to {vocab - 1}; got {wrong}", param=param)

    def request(
        self,
        context: RequestContext,
        prompt: Sequence[int],
        sampling: SamplingParams,
        param: str,
        default: int | None = None,
    ) -> Request:
        """Returns the engine's request for a prompt; raises if prompt and answer cannot fit. `param` is the field that
        the prompt came in. Without max_tokens the answer has `default` tokens, or what the context has room for."""
        self.check_answers()
        request = make_request(
            self.client.next_id(),
            prompt,
            sampling,
            self.text.tokenizer,
            self.limits.max_len,
            param=param,
            default=default,
        )
        return context.apply_to(request)


async def off_loop(size: int, work: Callable[[], T], process: RenderProcess | None = None) -> T:
    """Runs `work` on text of `size` characters: in a thread if the text is long, or if the work waits for the process
    that renders its template. Raises Overloaded if others keep that process busy for too long."""
    if process is None:
        return work() if size <= OFF_LOOP else await asyncio.to_thread(work)
    asked = monotonic()

    def begin() -> T:
        if monotonic() - asked > RENDER_PATIENCE:
            raise Overloaded("Server is busy: other chats take long to render with this template. Retry after 1 s.")
        return work()

    return await asyncio.get_running_loop().run_in_executor(process.threads, begin)

"""Turns a request's events into text. Streamed and whole answers are made of the same deltas, so their text is the
same. Deltas are made at the moment when events arrive: nothing waits for a task to wake up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.types import Receive

from penstock.errors import StepFailed, error_of
from penstock.ipc.client import EngineClient
from penstock.server.chat.schema_check import Deltas, TakeDelta, checked
from penstock.server.context.request_context import RequestContext
from penstock.server.models.served_model import ServedModel, TakeTokens
from penstock.server.telemetry.metrics import RequestTimer
from penstock.text import Delta, TextStream, one_by_one, read_step
from penstock.types import Aborted, Event, Failed, Finished, Request, Tokens

T = TypeVar("T")
Cut = Callable[[Delta], Delta]  # may end an answer: it returns a delta with a finish reason
Complete = Callable[[], bool]  # returns whether nothing that follows the deltas so far counts


def deltas(
    served: ServedModel,
    context: RequestContext,
    request: Request,
    choice: int = 0,
    *,
    continuing: bool = False,
    shown: Collection[int] = (),
    cut: Cut | None = None,
    complete: Complete | None = None,
    single: bool = False,
) -> Deltas:
    """Answers one request with text as it is generated, with the special tokens that are `shown`. Leaving early, a stop
    string, a `cut`, or an answer that is `complete` aborts the request in the engine. An answer with a JSON schema is
    checked against what its grammar does not enforce. `single` deltas have at most one token."""

    def run(request: Request) -> Deltas:
        return partial(_run, served, context, request, choice, continuing, shown, cut, complete, single)

    grammar = request.sampling.grammar
    if grammar is None or grammar.kind != "json":
        return run(request)
    return partial(checked, context, request, run, served.client.next_id, served.text.format.reasoning)


async def _run(
    served: ServedModel,
    context: RequestContext,
    request: Request,
    choice: int,
    continuing: bool,
    shown: Collection[int],
    cut: Cut | None,
    complete: Complete | None,
    single: bool,
    take: TakeDelta,
) -> None:
    text = TextStream(
        served.text.tokenizer,
        request.sampling.stop,
        continuing=continuing,
        shown=shown,
        include_stop=request.sampling.include_stop_str_in_output,
    )
    with (
        context.answer() as computed,
        served.expected(context, request) as take_tokens,
        RequestTimer(served.metrics, context, request, served.client) as timer,
    ):
        reader = _AnswerReader(served.client, text, timer, take_tokens, cut, complete, single, choice, take)
        running = served.client.run(request, reader.read)
        served.client.when_ended(request.id, computed)
        served.client.when_placed(request.id, partial(context.place, request.id))
        await running


class _AnswerReader:
    """Reads the events of one request into deltas, which `take` is called with."""

    __slots__ = (
        "_choice",
        "_client",
        "_complete",
        "_cut",
        "_last",
        "_single",
        "_take",
        "_take_tokens",
        "_text",
        "_timer",
    )

    def __init__(
        self,
        client: EngineClient,
        text: TextStream,
        timer: RequestTimer,
        take_tokens: TakeTokens,
        cut: Cut | None,
        complete: Complete | None,
        single: bool,
        choice: int,
        take: TakeDelta,
    ) -> None:
        self._client = client
        self._text = text
        self._timer = timer
        self._take_tokens = take_tokens
        self._cut = cut
        self._complete = complete
        self._single = single or complete is not None  # how many tokens come in a step must not change what counts
        self._choice = choice
        self._take = take
        self._last: Delta | None = None  # waits for the engine's report

    def read(self, events: Sequence[Event]) -> bool:
        """Takes the events of a step; returns whether the answer has ended."""
        if self._last is not None:
            return self._read_report(events[-1])
        for each in one_by_one(events) if self._single else (events,):
            if self._read_step(each, events[-1]):
                return True
            if self._last is not None:
                break
        return False

    def _read_step(self, events: Sequence[Event], newest: Event) -> bool:
        """Takes the events of a step, or of one of its tokens; returns whether the answer has ended. `newest` is the
        last that came."""
        timer = self._timer
        try:
            delta = read_step(self._text, events)
        except StepFailed as error:  # the engine knows requests by number: the client knows the id that it was sent
            raise error_of(error.code, f"{error.message} (x-request-id {timer.context.id})") from None
        if self._cut is not None and not delta.finish:
            delta = self._cut(delta)
        if tokens := delta.tokens:
            self._take_tokens(tokens, delta.cached)
            timer.tokens(len(tokens), delta.cached)
        if not delta.finish:
            self._take(self._choice, delta)
            if self._complete is None or not self._complete():
                return False
            delta = Delta("", finish="stop", report=newest.report if isinstance(newest, Finished) else None)
        request = timer.request
        if isinstance(newest, Tokens) and (request.explain or self._client.weights.updates):
            self._last = delta  # the engine still computes: it does not know of this end
            self._client.abort(request.id)
            return False
        self._end(delta)
        return True

    def _read_report(self, event: Event) -> bool:
        """Ends an answer that was cut or met a stop string, which the engine does not know of, when the engine has
        ended it too, with its report; without one if the engine was lost meanwhile."""
        assert self._last is not None
        if not isinstance(event, Finished | Aborted | Failed):
            return False
        self._end(self._last if isinstance(event, Failed) else self._last._replace(report=event.report))
        return True

    def _end(self, delta: Delta) -> None:
        self._timer.reason, self._timer.report = delta.finish or "", delta.report
        self._take(self._choice, delta)


def all_deltas(
    served: ServedModel,
    context: RequestContext,
    requests: Sequence[Request],
    shown: Collection[int] = (),
    *,
    single: bool = False,
) -> Deltas:
    """Returns the deltas of requests whose answers continue their prompts. The choices are the requests' places in the
    list."""
    return together(
        [
            deltas(served, context, request, choice, continuing=True, shown=shown, single=single)
            for choice, request in enumerate(requests)
        ]
    )


def together(choices: Sequence[Deltas]) -> Deltas:
    """Returns the deltas of several choices, as they come. If one fails, all do."""
    return choices[0] if len(choices) == 1 else partial(_all_at_once, choices)


async def _all_at_once(choices: Sequence[Deltas], take: TakeDelta) -> None:
    tasks = [asyncio.create_task(choice(take)) for choice in choices]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the result of `work`, or None if the client disconnects first: then `work` is cancelled. It runs
    in the caller's task: in one of its own, an answer would begin several turns of the event loop later."""
    task = asyncio.current_task()
    assert task is not None
    ended = left = False

    def leave(leaving: asyncio.Task[None]) -> None:
        nonlocal left
        if not ended:
            left = True
            task.cancel()

    leaving = asyncio.create_task(_left(receive))
    leaving.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if left and task.cancelling() == 1:
            return None
        raise
    finally:
        ended = True
        leaving.cancel()
        if left:
            task.uncancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

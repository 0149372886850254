"""Turns a request's events into text. Streamed and whole answers are made of the same deltas, so their text is the
same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

from starlette.types import Receive

from penstock.errors import EngineUnavailable, StepFailed, error_of
from penstock.ipc.client import EngineClient
from penstock.server.chat.schema_check import Deltas as Deltas
from penstock.server.chat.schema_check import checked
from penstock.server.request_context import RequestContext
from penstock.server.served_model import ServedModel
from penstock.server.telemetry.metrics import RequestTimer
from penstock.text import Delta, TextStream, read_step
from penstock.types import Aborted, Event, Finished, Report, Request

T = TypeVar("T")


def deltas(
    served: ServedModel,
    context: RequestContext,
    request: Request,
    choice: int = 0,
    *,
    continuing: bool = False,
    shown: Collection[int] = (),
    ended: Callable[[], bool] | None = None,
) -> Deltas:
    """Yields one request's text as it is generated, with the special tokens that are `shown`. Leaving early, a stop
    string, or the reader of the text having `ended` it aborts the request in the engine. An answer with a JSON schema
    is checked against what its grammar does not enforce."""

    def run(request: Request) -> Deltas:
        return _run(served, context, request, choice, continuing, shown, ended)

    grammar = request.sampling.grammar
    if grammar is None or grammar.kind != "json":
        return run(request)
    return checked(context, request, run, served.client.next_id, served.text.format.reasoning)


async def _run(
    served: ServedModel,
    context: RequestContext,
    request: Request,
    choice: int,
    continuing: bool,
    shown: Collection[int],
    ended: Callable[[], bool] | None,
) -> Deltas:
    text = TextStream(
        served.text.tokenizer,
        request.sampling.stop,
        continuing=continuing,
        shown=shown,
        include_stop=request.sampling.include_stop_str_in_output,
    )
    with (
        context.answer() as computed,
        served.expected(context, request) as on_tokens,
        RequestTimer(served.metrics, context, request, served.client) as timer,
    ):
        async with aclosing(served.client.submit(request)) as steps:
            served.client.when_ended(request.id, computed)
            served.client.when_placed(request.id, partial(context.place, request.id))
            async for events in steps:
                delta = _read_step(text, events, context)
                if ended is not None and ended() and not delta.finish:
                    delta = delta._replace(text="", finish="stop")
                if delta.tokens:
                    on_tokens()
                    timer.tokens(len(delta.tokens), delta.cached)
                if delta.finish:
                    timer.reason = delta.finish
                    if delta.report is None and (request.explain or served.client.weights.updates):
                        delta = delta._replace(report=await _report(served.client, request.id, steps))
                    timer.report = delta.report
                yield choice, delta
                if delta.finish:
                    return


def _read_step(text: TextStream, events: Sequence[Event], context: RequestContext) -> Delta:
    """Returns what a step adds to an answer. An error of the engine, which knows requests by number, names the id that
    the client was sent too."""
    try:
        return read_step(text, events)
    except StepFailed as error:
        raise error_of(error.code, f"{error.message} (x-request-id {context.id})") from None


async def _report(client: EngineClient, id: int, steps: AsyncGenerator[list[Event], None]) -> Report | None:
    """Ends a request that met a stop string, which the engine does not know of, and returns the engine's report; None
    if the engine was lost meanwhile."""
    with suppress(EngineUnavailable):
        client.abort(id)
        async for events in steps:
            if isinstance(last := events[-1], Finished | Aborted):
                return last.report
    return None


def all_deltas(
    served: ServedModel, context: RequestContext, requests: Sequence[Request], shown: Collection[int] = ()
) -> Deltas:
    """Returns the merged deltas of requests whose answers continue their prompts. The choices are the requests' places
    in the list."""
    return together(
        [
            deltas(served, context, request, choice, continuing=True, shown=shown)
            for choice, request in enumerate(requests)
        ]
    )


def together(choices: Sequence[Deltas]) -> Deltas:
    """Merges the deltas of several choices. If one fails, all do."""
    return choices[0] if len(choices) == 1 else _merged(choices)


async def _merged(choices: Sequence[Deltas]) -> Deltas:
    arrived: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue(maxsize=len(choices))
    tasks = [asyncio.create_task(_feed(arrived, choice)) for choice in choices]
    try:
        running = len(choices)
        while running:
            arrival = await arrived.get()
            if isinstance(arrival, Exception):
                raise arrival
            running -= arrival[1].finish is not None
            yield arrival
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _feed(arrived: asyncio.Queue[tuple[int, Delta] | Exception], choice: Deltas) -> None:
    try:
        async with aclosing(choice) as steps:
            async for step in steps:
                await arrived.put(step)
                await asyncio.sleep(0)  # so that no choice runs ahead while the reader is slow
    except Exception as error:
        await arrived.put(error)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns what `work` returns. If the client disconnects first, `work` is cancelled and the result is None. It runs
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

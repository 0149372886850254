"""From a request's events to text. Streamed and whole answers are made of the same deltas, so both read the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.types import Receive

from penstock.errors import EngineUnavailable
from penstock.ipc.client import EngineClient
from penstock.server.served_model import ServedModel
from penstock.server.telemetry.metrics import RequestTimer
from penstock.text import Delta, TextStream, read_step
from penstock.types import Aborted, Event, Finished, Report, Request

T = TypeVar("T")


Deltas = AsyncGenerator[tuple[int, Delta], None]  # (choice, what was added to it)


async def deltas(
    served: ServedModel, request: Request, choice: int = 0, *, continuing: bool = False, shown: Collection[int] = ()
) -> Deltas:
    """One request's text as it comes, with the special tokens that are `shown`. Leaving early, or a stop string, aborts
    the request in the engine."""
    text = TextStream(served.text.tokenizer, request.sampling.stop, continuing=continuing, shown=shown)
    with served.place(), RequestTimer(served.metrics, request) as watch:
        async with aclosing(served.client.submit(request)) as steps:
            async for events in steps:
                delta = read_step(text, events)
                if delta.tokens:
                    watch.tokens(len(delta.tokens), delta.cached)
                if delta.finish:
                    watch.reason = delta.finish
                    if request.explain and delta.report is None:
                        delta = delta._replace(report=await _report(served.client, request.id, steps))
                    watch.report = delta.report
                yield choice, delta
                if delta.finish:
                    return


async def _report(client: EngineClient, id: int, steps: AsyncGenerator[list[Event], None]) -> Report | None:
    """Of a request that a stop string ended, and that the engine would go on with; none if that was lost meanwhile."""
    with suppress(EngineUnavailable):
        client.abort(id)
        async for events in steps:
            if isinstance(last := events[-1], Finished | Aborted):
                return last.report
    return None


def together(choices: Sequence[Deltas]) -> Deltas:
    """Several choices at once. One that fails fails all."""
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
                await asyncio.sleep(0)  # gives way, so that no choice runs ahead while the reader is slow
    except Exception as error:
        await arrived.put(error)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns, or None when the client left first: then it is cancelled."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

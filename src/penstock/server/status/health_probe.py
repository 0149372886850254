"""Finds out whether engines really generate, at a cost that does not grow with the number of those who ask."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import NamedTuple
from weakref import WeakKeyDictionary

from penstock.errors import EngineUnavailable, PenstockError
from penstock.ipc.client import EngineClient
from penstock.types import Event, Failed, Finished, Request, SamplingParams, Tokens

GENERATE_SECONDS = 10.0  # after which an engine that generates nothing is not healthy
FRESH_SECONDS = 1.0  # a result is reused this long
LOOK_SECONDS = 0.02  # between two looks at what an engine generates for others
FIRST = -(2**31)  # a priority before all that clients may have
PROBE, REQUESTS = "probe", "requests"  # whose token it was


class ProbeResult(NamedTuple):
    """Holds the result of a probe, and its time by the monotonic clock."""

    when: float
    generated: str  # PROBE or REQUESTS
    failure: str = ""  # why there was no token


class GenerateProbes:
    """Probes engines by generating a token. An engine has one probe at a time, whose result serves all callers
    meanwhile and for a second after it."""

    def __init__(self) -> None:
        self._probes: WeakKeyDictionary[EngineClient, asyncio.Task[ProbeResult]] = WeakKeyDictionary()

    async def check(self, client: EngineClient) -> str:
        """Returns whose token the engine has generated: one of the probe, or one of the requests that it was busy with
        meanwhile. Raises EngineUnavailable if there was none."""
        probe = self._probes.get(client)
        if probe is None or (probe.done() and not _is_fresh(probe)):
            probe = self._probes[client] = asyncio.create_task(_probe(client))
        result = await asyncio.shield(probe)  # a client that leaves does not end it
        if result.failure:
            raise EngineUnavailable(result.failure)
        return result.generated


def _is_fresh(probe: asyncio.Task[ProbeResult]) -> bool:
    whole = not probe.cancelled() and probe.exception() is None
    return whole and time.monotonic() - probe.result().when < FRESH_SECONDS


async def _probe(client: EngineClient) -> ProbeResult:
    others = asyncio.create_task(_watch_others(client, _worked(client)))
    own = asyncio.create_task(_generate(client))
    await asyncio.wait({own, others}, timeout=GENERATE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    generated = PROBE if own.done() or not others.done() else REQUESTS
    failure = f"the engine has generated no token within {GENERATE_SECONDS:.0f} s"
    if own.done() or others.done():
        failure = own.result() if own.done() else ""
    own.cancel()
    others.cancel()
    return ProbeResult(time.monotonic(), generated, failure)


async def _generate(client: EngineClient) -> str:
    """Generates one token, or an embedding if the model makes those, before all waiting requests. Returns the reason of
    a failure, or ""."""
    limits = client.hello.limits if client.hello is not None else None
    pooling = "" if limits is None or limits.generates else limits.pooling
    request = Request(
        client.next_id(),
        (0,),
        SamplingParams(seed=0),
        0 if pooling else 1,
        priority=FIRST,
        pooling=pooling,
        durable=False,
    )
    try:
        async with aclosing(client.submit(request)) as steps:
            async for events in steps:
                if any(map(_is_answer, events)):
                    return ""
                if isinstance(failed := events[-1], Failed):
                    return f"the engine generates nothing: {failed.message}"
    except PenstockError as error:
        return error.message
    return "the engine has ended a request without having generated anything"


def _is_answer(event: Event) -> bool:
    return bool((isinstance(event, Tokens) and event.tokens) or (isinstance(event, Finished) and event.pooled))


async def _watch_others(client: EngineClient, before: int) -> None:
    """Returns once an engine has computed more than the one token of the probe: it may have no place for that."""
    while _worked(client) < before + 2:
        before = min(before, _worked(client))  # one that is started again counts from the beginning
        await asyncio.sleep(LOOK_SECONDS)


def _worked(client: EngineClient) -> int:
    """Returns how many tokens an engine has generated; of one that makes embeddings, how many it has computed."""
    generates = client.hello is None or client.hello.limits.generates
    return client.stats.generated_tokens if generates else client.stats.computed_tokens

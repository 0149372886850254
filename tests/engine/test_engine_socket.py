"""Tests the end of an engine's socket: nobody waits for it, also where its owner was forgotten."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import zmq

from penstock.engine.flight_recorder import FlightRecorder
from penstock.ipc import wire
from penstock.ipc.engine_folder import connect
from penstock.ipc.process import EngineProcess, EngineSocket
from penstock.ipc.shared_wire import ID_BITS
from penstock.types import Row, StepPlan

FORGOTTEN = """
import asyncio, gc
from penstock.ipc.process import EngineSocket

class Owner: ...

async def forget():
    owner = Owner()
    owner.link, owner.itself = EngineSocket(requests=False), owner
    owner.reading = asyncio.ensure_future(owner.link.socket.recv())
    await asyncio.sleep(0)

gc.disable()
asyncio.run(forget())
gc.collect()
print("collected")
"""


def test_a_socket_that_was_forgotten_stops_no_collection() -> None:
    done = subprocess.run([sys.executable, "-c", FORGOTTEN], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("collected\n", "", 0)


def test_a_context_that_takes_long_to_end_holds_up_no_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    async def scenario() -> float:
        link = EngineSocket(requests=True)
        monkeypatch.setattr(type(link.socket.context), "term", lambda _: ended.wait(30))
        start = time.monotonic()
        link.close()
        link.close()  # two may end an engine at once
        return time.monotonic() - start

    try:
        assert asyncio.run(scenario()) < 5
    finally:
        ended.set()


def test_a_closed_socket_leaves_nothing() -> None:
    async def scenario() -> weakref.ref[object]:
        link = EngineSocket(requests=False)
        context = link.socket.context
        link.close()
        while not context.closed:
            await asyncio.sleep(0.001)
        return weakref.ref(link)

    link = asyncio.run(scenario())
    gc.collect()
    assert link() is None


def test_the_name_of_a_suspects_client_may_come_after_the_death() -> None:
    """The message is read by a thread of ZeroMQ, which a busy machine lets wait for longer than the word of the death:
    without the name nobody was suspected, and a poisoned request ended five engines."""

    class Dead:
        pid, returncode = 2**30, -11  # no process group has such a number

        async def wait(self) -> None:
            return None

    async def scenario() -> None:
        link = EngineSocket(requests=False)
        FlightRecorder(link.flight).launch(StepPlan(1, (Row(1 << ID_BITS | 12, 0, 1, 1),)))
        engine = EngineProcess(Dead(), link)  # type: ignore[arg-type]
        await engine.read(lambda _: None)
        context = zmq.Context()
        theirs = context.socket(zmq.PAIR)
        connect(theirs, link.address)
        theirs.send(wire.encode_answer(wire.ClientJoined(1, "someone")))
        assert await engine.last_suspects() == (("someone", 12),)
        theirs.close(linger=0)
        context.term()
        await engine.end(0)

    asyncio.run(scenario())

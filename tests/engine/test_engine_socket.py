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

from penstock.ipc.process import EngineSocket

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

"""Runs an engine in a thread of this process, with the same protocol as a client of an engine process."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from penstock.engine.engine import Engine
from penstock.errors import EngineUnavailable
from penstock.ipc.client import EngineState
from penstock.ipc.inprocess_engine import InProcessEngine
from penstock.ipc.request_client import SingleEngineClient
from penstock.types import Event, Hello, Stats
from penstock.types.messages import Close

log = logging.getLogger(__name__)


class InProcessClient(SingleEngineClient):
    """Runs the engine in a thread. An engine that fails is not restarted: its requests fail, and `unavailable_reason`
    has the error."""

    def __init__(self, open: Callable[[], Engine], model: str = "") -> None:
        super().__init__()
        self._engine = InProcessEngine(open, model)
        self._thread: threading.Thread | None = None

    async def start(self, *, yielding: bool = False) -> Hello:
        """Opens the engine in its thread; its errors are raised here. Starting twice changes nothing, and starting
        after `close` opens it again. `yielding` is ignored: it is for processes."""
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._opened: asyncio.Future[Hello] = self._loop.create_future()
            self._ended: asyncio.Future[None] = self._loop.create_future()
            self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
            self._thread.start()
        return await asyncio.shield(self._opened)

    async def close(self) -> None:
        if self._thread is not None:
            self._engine.send(Close())
            await self._ended
            self._thread = None

    def _reachable(self) -> InProcessEngine:
        if self.hello is None:
            raise EngineUnavailable(self.unavailable_reason)
        return self._engine

    def _present(self) -> InProcessEngine:
        return self._reachable()

    # -- in the engine's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            hello = self._engine.open()
        except Exception as error:
            return self._post(self._fail_start, error)
        self._post(self._welcome, hello, self._engine.engine.stats())
        ending = "the engine is closed"
        try:
            self._engine.run(lambda events, stats: self._post(self._take, events, stats))
        except Exception as error:
            log.exception("the engine stopped")
            ending = f"the engine stopped: {type(error).__name__}: {error}"
        try:
            self._engine.close()
        except Exception:  # the same fault may keep the engine from freeing its memory
            log.exception("the engine could not be closed")
        self._post(self._end, ending)

    def _post(self, call: Callable[..., None], *args: object) -> None:
        self._loop.call_soon_threadsafe(call, *args)

    # -- in the event loop's thread ------------------------------------------------------------------------------

    def _welcome(self, hello: Hello, stats: Stats) -> None:
        self.hello, self.stats, self.state = hello, stats, EngineState.READY
        self._settings.adapters = {info.name: info for info in hello.adapters}
        self._opened.set_result(hello)

    def _fail_start(self, error: Exception) -> None:
        self.unavailable_reason, self.state = f"the engine could not start: {error}", EngineState.FAILED
        self._opened.set_exception(error)
        self._ended.set_result(None)

    def _take(self, events: list[Event], stats: Stats) -> None:
        self.stats = stats
        self._streams.deliver(self._engine, events)

    def _end(self, ending: str) -> None:
        self.refuse(ending)
        self._ended.set_result(None)

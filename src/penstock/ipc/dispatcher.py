"""Sends requests to engines: each when it may run, to the engine that its placement names, and after the blocks that
the placement pulls were offered. For the thread of one event loop only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from penstock.ipc.dispatch import Dispatch, DispatchObserver, EngineChoice, Pull, RequestEngine
from penstock.ipc.placement import RequestPlacement
from penstock.ipc.pull_offers import PullOffers
from penstock.ipc.request_stream import RequestStream
from penstock.ipc.trust import Trust
from penstock.types import Event, Tokens
from penstock.types.messages import Abort, Add, Release

TRIAL = 2.0  # seconds for which others wait at most while a doubted request runs


class Dispatcher:
    """Sends the requests of `streams`.

    Doubted requests are tried one after the other, each on the quietest engine, once that engine has answered all
    others. New requests stay away from it meanwhile, or wait if it is the only engine. Requests that a lost engine had
    answered go first.
    """

    def __init__(self, engines: EngineChoice, streams: Mapping[int, RequestStream], pulls: PullOffers) -> None:
        self.placings: dict[int, Callable[[RequestPlacement], None]] = {}  # called when a request is sent
        self.observer: DispatchObserver | None = None  # set if there are several engines
        self._engines = engines
        self._streams = streams
        self._pulls = pulls
        self._unsent = 0
        self._recovering = False  # a request is doubted
        self._others_wait = 0.0  # monotonic time until which others wait for doubted requests

    # -- requests come, move and go ------------------------------------------------------------------------------

    def begin(self, stream: RequestStream) -> None:
        self._unsent += 1
        if self._recovering:
            self.dispatch()
        else:
            self._place(stream, None)

    def recall(self, stream: RequestStream) -> None:
        if not stream.stop_pull() and stream.engine is not None:
            stream.engine.send(Abort(stream.id))

    def lose(self, stream: RequestStream) -> None:
        """Takes a request from its engine: it waits for another one."""
        stream.stop_pull()
        stream.lose_engine()
        self._unsent += 1

    def forget(self, stream: RequestStream) -> None:
        self._unsent -= stream.engine is None
        self._engines.forget(stream.id, stream.generated)
        self.dispatch()

    def note_answer(self, stream: RequestStream, event: Event) -> None:
        if self.observer is None or stream.begun or stream.engine is None or stream.promised is None:
            return
        if isinstance(event, Tokens):
            self.observer.answered(stream.engine, stream.promised, event.cached)

    def after_step(self) -> None:
        if self._recovering:
            self.dispatch()

    # -- deciding ------------------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Sends the requests that wait for an engine and may run now."""
        if self._unsent <= self._engines.in_line and not self._recovering:
            return
        streams = list(self._streams.values())
        doubted = [stream for stream in streams if stream.trust is Trust.DOUBTED]
        self._recovering = bool(doubted)
        reserved = self._reserved(doubted)
        blamed = next((stream for stream in doubted if stream.blame), None) if reserved is not None else None
        if blamed is not None and reserved is not None and blamed.engine is None and not self.load(reserved)[0]:
            self.carry_out(blamed, self._engines.trial(reserved))
        for stream in sorted(streams, key=lambda stream: stream.trust is not Trust.RESUMED):
            if stream.engine is None and stream.trust in (Trust.NEW, Trust.RESUMED):
                self._place(stream, reserved)
                if stream.engine is None and stream.trust is Trust.RESUMED and blamed is None:
                    self._place(stream, None)
        if doubted and blamed is None:
            self._try_next(doubted, streams, isolated=reserved is not None)

    def resume(self) -> None:
        if self._recovering:
            self._let_others_wait()
        self.dispatch()

    def recover(self) -> None:
        self._recovering = True
        self._let_others_wait()

    def load(self, engine: RequestEngine) -> tuple[int, int]:
        answered = [stream.answered for stream in self._streams.values() if stream.engine is engine]
        return answered.count(False), len(answered)

    @property
    def reserved(self) -> RequestEngine | None:
        """Returns the engine that new requests stay away from now: a doubted request is tried there."""
        if not self._recovering:
            return None
        return self._reserved([stream for stream in self._streams.values() if stream.trust is Trust.DOUBTED])

    def _reserved(self, doubted: list[RequestStream]) -> RequestEngine | None:
        if not doubted or time.monotonic() >= self._others_wait:
            return None
        tried = (stream.engine for stream in doubted if stream.engine is not None)
        return next(tried, None) or self._engines.quietest()

    def _try_next(self, doubted: list[RequestStream], streams: list[RequestStream], *, isolated: bool) -> None:
        """Tries the next doubted request, unless one is being tried or its engine still has to resume others. With
        `isolated`, it waits until the engine has answered all others: they would be doubted with it."""
        engine = self._engines.quietest()
        if engine is None or any(stream.engine is not None for stream in doubted):
            return
        unanswered = [stream for stream in streams if stream.engine is engine and not stream.answered]
        if not any(isolated or stream.trust is Trust.RESUMED for stream in unanswered):
            self._let_others_wait()
            self.carry_out(doubted[0], self._engines.trial(engine))

    def _let_others_wait(self) -> None:
        self._others_wait = time.monotonic() + TRIAL
        asyncio.get_running_loop().call_later(TRIAL, self.dispatch)

    # -- carrying out --------------------------------------------------------------------------------------------

    def start(self, id: int, dispatch: Dispatch) -> None:
        if (stream := self._streams.get(id)) is not None:
            self.carry_out(stream, dispatch)

    def carry_out(self, stream: RequestStream, dispatch: Dispatch) -> None:
        stream.take_place(dispatch)
        self._unsent -= 1
        if dispatch.pull is None:
            dispatch.engine.send(Add(stream.request))
        else:
            stream.pulling = asyncio.create_task(self._send_with_blocks(stream, dispatch.engine, dispatch.pull))
        if self.observer is not None:
            self.observer.sent(dispatch, resumed=stream.resumed)
        if dispatch.why is not None and (call := self.placings.get(stream.id)) is not None:
            call(dispatch.why._replace(resumed=stream.resumed))

    def _place(self, stream: RequestStream, avoid: RequestEngine | None) -> None:
        dispatch = self._engines.place(stream.request, avoid, stream.source)
        if dispatch is not None:
            self.carry_out(stream, dispatch)

    async def _send_with_blocks(self, stream: RequestStream, engine: RequestEngine, pull: Pull) -> None:
        request = stream.request
        offer = await self._pulls.offered(pull, request)
        if stream.pulling is asyncio.current_task():
            stream.pulling = None
            engine.send(Add(request._replace(pull=offer)))
        elif offer is not None:
            pull.source.send(Release(offer.id))

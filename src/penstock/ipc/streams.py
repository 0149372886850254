"""Keeps the requests that a client has in flight and delivers their events. When an engine is lost, another one resumes
them. For the thread of one event loop only."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count

from penstock.ipc.control_answers import ControlAnswers
from penstock.ipc.crashes import CrashJudge, LostRequests
from penstock.ipc.dispatch import EngineChoice, RequestEngine
from penstock.ipc.dispatcher import Dispatcher
from penstock.ipc.inprocess_engine import by_request
from penstock.ipc.pull_offers import PullOffers
from penstock.ipc.request_stream import EventMailbox, EventReader, RequestStream
from penstock.types import Aborted, Event, Failed, Request, Tokens


class RequestStreams:
    """Holds all requests in flight, by id."""

    def __init__(self, engines: EngineChoice) -> None:
        self._ids = count(1)
        self._streams: dict[int, RequestStream] = {}
        self.endings: dict[int, Callable[[], None]] = {}  # called when a request has ended, read or not
        self.controls = ControlAnswers()
        self.pulls = PullOffers(self.controls, self.next_id)
        self.dispatcher = Dispatcher(engines, self._streams, self.pulls)
        self.judge = CrashJudge(self._streams, self.dispatcher, lambda stream, event: self._hand_over(stream, [event]))

    def __len__(self) -> int:
        return len(self._streams) + len(self.controls)

    def next_id(self) -> int:
        return next(self._ids)

    async def run(self, request: Request, read: EventReader) -> None:
        """Sends the request and calls `read` with its events, a list per step, at the moment when they arrive: no task
        is woken up for a token. Returns after the last one, or when `read` wants no more; raises the error that `read`
        raises. Leaving before the last event aborts the request."""
        with self._sent(request, read) as stream:
            await stream.ended

    async def follow(self, request: Request) -> AsyncGenerator[list[Event], None]:
        """Yields the events that `run` would pass on. One sequence bounds what waits in the mailbox."""
        box = EventMailbox()
        with self._sent(request, box.put):
            while True:
                events = await box.get()
                yield events
                if not isinstance(events[-1], Tokens):
                    break

    @contextmanager
    def _sent(self, request: Request, read: EventReader) -> Iterator[RequestStream]:
        stream = RequestStream(request, read)
        try:
            if (refusal := self.judge.refusal(request)) is not None:
                self._hand_over(stream, [refusal])
            else:
                self._streams[request.id] = stream
                self.dispatcher.begin(stream)
            yield stream
        finally:
            self.endings.pop(request.id, None)
            self.dispatcher.placings.pop(request.id, None)
            if self._forget(request.id):
                self.dispatcher.recall(stream)

    def abort(self, id: int) -> None:
        """Ends a request; its last event still arrives."""
        stream = self._streams.get(id)
        if stream is None:
            return
        stream.aborting = True
        if stream.engine is None or stream.stop_pull():
            self._hand_over(stream, [Aborted(id)])
        else:
            self.dispatcher.recall(stream)

    def deliver(self, engine: RequestEngine, events: Iterable[Event]) -> None:
        """Passes each request its share of a step. Events of a request that was left, or that another engine has now,
        are dropped."""
        for id, share in by_request(events).items():
            if (stream := self._streams.get(id)) is None:
                self.controls.deliver(engine, id, share)
            elif stream.engine is engine:
                self._hand_over(stream, share)
        self.dispatcher.after_step()

    def end(self, events: Iterable[Event]) -> None:
        for event in events:
            if (stream := self._streams.get(event.seq)) is not None:
                self._hand_over(stream, [event])

    def fail(self, code: str, message: str) -> None:
        streams = list(self._streams.values())
        self._streams.clear()  # so that nothing is sent while they end
        for stream in streams:
            self.dispatcher.forget(stream)
            self.dispatcher.recall(stream)
        for stream in streams:
            self._hand_over(stream, [Failed(stream.id, code, message)])
        self.controls.fail(code, message)

    def _hand_over(self, stream: RequestStream, share: list[Event]) -> None:
        self.dispatcher.note_answer(stream, share[0])
        stream.take(share)
        if not isinstance(share[-1], Tokens):
            self._forget(stream.id)
            if stream.id in self.endings:
                self.endings.pop(stream.id)()
            stream.end()

    def _forget(self, id: int) -> bool:
        stream = self._streams.pop(id, None)
        if stream is not None:
            self.dispatcher.forget(stream)
        return stream is not None

    # -- when an engine is lost ----------------------------------------------------------------------------------

    @property
    def requests(self) -> list[Request]:
        return [stream.so_far for stream in self._streams.values() if stream.engine is not None]

    @property
    def with_grammars(self) -> bool:
        return any(stream.journal.request.sampling.grammar is not None for stream in self._streams.values())

    def lose(self, engine: RequestEngine, reason: str) -> LostRequests:
        """Takes the requests of a lost engine back, and fails its control messages. Requests that it had answered can
        go to others; those that it had not wait for the judge."""
        lost = [stream for stream in self._streams.values() if stream.engine is engine]
        for stream in lost:
            self.dispatcher.lose(stream)
        unanswered = [stream for stream in lost if stream.trust.waits_for_cause]
        self.end([Aborted(stream.id) for stream in lost if stream.aborting])
        self.controls.fail("engine_died", f"{reason}: send this again", engine)
        return LostRequests(unanswered, len(unanswered) < len(lost), reason)

    def move(self, engine: RequestEngine) -> None:
        """Moves all requests of an engine that still answers to others. It must not be sent others."""
        moved = [stream for stream in self._streams.values() if stream.engine is engine]
        for stream in moved:
            self.dispatcher.recall(stream)
            self.dispatcher.lose(stream)
            stream.source = engine
        unanswered = [stream for stream in moved if stream.trust.waits_for_cause]
        self.judge.clear(LostRequests(unanswered, len(unanswered) < len(moved), ""))
        self.dispatcher.dispatch()

"""Shares one engine without a thread of its own among the threads of a process."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from penstock.errors import DeviceLost, EngineUnavailable, error_of
from penstock.ipc.inprocess_engine import InProcessEngine
from penstock.llm.pending import PendingChoice, PendingOutput
from penstock.types import Event, Failed
from penstock.types.messages import Abort, Add, Answer, Control

ShowProgress = bool | Callable[..., Any]  # a callable makes a bar like tqdm


@contextmanager
def progress_bar(wanted: ShowProgress, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that adds completed prompts, and shows the count on stderr, unless it is turned off or stderr
    is not a terminal. A callable `wanted` makes the bar itself.
    """
    if not wanted or not total:
        yield lambda _: None
        return
    given: dict[str, Any] = {"total": total, "desc": "Processed prompts", "dynamic_ncols": True}
    if callable(wanted):
        bar = wanted(**given)
    else:
        from tqdm import tqdm  # type: ignore[import-untyped]  # comes with huggingface-hub

        bar = tqdm(**given, disable=None)
    with bar:
        yield bar.update


class SharedEngine:
    """Runs requests of all threads together. A thread that waits for its answer runs the next step for all of them, or
    waits for another thread's step.
    """

    def __init__(self, engine: InProcessEngine) -> None:
        self.inner = engine
        self.pending: dict[int, PendingChoice] = {}
        self._answers: dict[int, Event | None] = {}  # answers to control messages, by id
        self._turn = threading.Condition()
        self._stepping = False
        self._closed = False
        self._lost: DeviceLost | None = None  # why no step can follow

    def submit(self, choices: Iterable[PendingChoice]) -> None:
        for choice in choices:
            self._check_open()
            self.pending[choice.request.id] = choice
            self.inner.send(Add(choice.request))

    @contextmanager
    def running(self, choices: Sequence[PendingChoice]) -> Iterator[None]:
        """Sends requests to the engine; aborts unfinished ones at the end of the block."""
        try:
            self.submit(choices)
            yield
        finally:
            self.abandon(choices)

    def complete(self, pending: Sequence[PendingOutput], show_progress: ShowProgress) -> None:
        """Runs requests to their end; the first failure ends all of them. Choices signal their ends, because checking
        thousands of prompts after every step would take longer than the step.
        """
        ends: deque[PendingOutput] = deque()
        unfinished = {each.id: len(each.choices) for each in pending}
        for each in pending:
            for choice in each.choices:
                choice.on_end = partial(ends.append, each)
        with (
            progress_bar(show_progress, len(pending)) as add_completed,
            self.running([choice for each in pending for choice in each.choices]),
        ):
            while unfinished:
                self.advance()
                while ends:
                    each = ends.popleft()
                    each.ended()  # raises the choice's error, if any
                    unfinished[each.id] -= 1
                    if not unfinished[each.id]:
                        del unfinished[each.id]
                        add_completed(1)

    def stream(self, choice: PendingChoice) -> Generator[str]:
        """Yields the text of a submitted choice, after an empty piece; aborts the request if closed early."""
        try:
            yield ""  # starts the generator, so that dropping it aborts the request even if nothing was read
            while True:
                ended = choice.ended()  # read before the text, because another thread may add the last text now
                if text := choice.take_text():
                    yield text
                elif ended:
                    return
                else:
                    self.advance()
        finally:
            self.abandon([choice])

    def advance(self) -> None:
        """Returns after one step, run by this thread or another."""
        mine = False
        try:
            with self._turn:
                self._check_open()
                if self._stepping:
                    self._turn.wait()
                    return
                mine = self._stepping = True
            with _interrupts_deferred():
                self._step()
        except DeviceLost as error:
            self._lost = error
            raise
        finally:
            if mine:
                with self._turn:
                    self._stepping = False
                    self._turn.notify_all()

    def ask(self, message: Control[Answer]) -> Answer:
        """Sends a control message and returns its answer or raises its error."""
        self._check_open()
        self._answers[message.id] = None
        self.inner.send(message)
        try:
            while (event := self._answers[message.id]) is None:
                self.advance()
        finally:
            del self._answers[message.id]
        if isinstance(event, Failed):
            raise error_of(event.code, event.message)
        assert isinstance(event, message.answer)
        return event

    def abandon(self, choices: Iterable[PendingChoice]) -> None:
        for choice in choices:
            if self.pending.pop(choice.request.id, None):
                choice.finish_reason = "abort"
                self.inner.send(Abort(choice.request.id))

    def close(self) -> None:
        """Frees the engine after the current step. It may be called twice."""
        with self._turn:
            while self._stepping:
                self._turn.wait()
            if not self._closed:
                self._closed = True
                try:
                    self.inner.close()
                except RuntimeError:
                    if self._lost is None:  # otherwise the device's resources are already lost
                        raise

    def _check_open(self) -> None:
        if self._closed:
            raise EngineUnavailable("this LLM is closed: create another one")
        if self._lost is not None:
            raise DeviceLost(self._lost.message)

    def _step(self) -> None:
        for id, events in self.inner.step().items():
            if id in self._answers:
                self._answers[id] = events[-1]
            if choice := self.pending.get(id):
                choice.add(events)
                if choice.finish_reason:
                    self.pending.pop(id, None)  # its own thread may have removed it
                    self.inner.send(Abort(id))  # after a stop string the engine would continue
                    choice.on_end()


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Delays Ctrl-C to the end of the block, because an engine cannot continue after a partial step."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    interrupts: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: interrupts.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if interrupts:
        previous(*interrupts[0])

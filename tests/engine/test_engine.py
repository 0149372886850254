"""The engine over the fake backend: failures stay where they are, events come once, the loop answers messages."""

from __future__ import annotations

from penstock.backend.base import Batch, Ticket
from penstock.backend.fake import FakeBackend, continuation
from penstock.engine.engine import Engine
from penstock.engine.loop import Abort, Add, Close, Message, run
from penstock.types import Aborted, Event, Failed, Limits, Request, SamplingParams, Stats, StepResult, Tokens

LIMITS = Limits(max_len=64, max_rows=4, step_tokens=16, block_size=4, num_blocks=64, vocab=100)


def request(id: int, *prompt: int, max_tokens: int = 5) -> Request:
    return Request(id, prompt, SamplingParams(temperature=0), max_tokens)


def engine(backend: FakeBackend | None = None, depth: int = 0) -> Engine:
    backend = backend or FakeBackend(LIMITS.vocab)
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    return Engine(backend, LIMITS, depth=depth)


def drain(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while not engine.idle:
        events += engine.step()
    return events


class Breaks(FakeBackend):
    """Fails one step, in `launch` or in `wait`."""

    def __init__(self, step: int, where: str) -> None:
        super().__init__(LIMITS.vocab)
        self._bad = step, where

    def launch(self, batch: Batch) -> Ticket:
        if self._bad == (batch.step, "launch"):
            raise MemoryError("no room for this step")
        return super().launch(batch)

    def wait(self, ticket: Ticket) -> StepResult:
        if self._bad == (ticket, "wait"):
            raise RuntimeError("device lost")
        return super().wait(ticket)


class Settles(FakeBackend):
    """Has three things to do when there is nothing to compute."""

    def __init__(self) -> None:
        super().__init__(LIMITS.vocab)
        self.left = 3

    def prepare_in_idle(self) -> bool:
        self.left -= 1
        return self.left > 0


def test_the_loop_settles_while_idle_and_answers_what_arrives_meanwhile() -> None:
    backend = Settles()
    told: list[Event] = []
    waits: list[tuple[bool, int]] = []

    class Inbox:
        def __init__(self) -> None:
            self.messages: list[list[Message]] = [[], [Add(request(1, 1, 2, 3))]]

        def take(self, wait: bool) -> list[Message]:
            waits.append((wait, backend.left))
            if wait:
                return [Close()]
            return self.messages.pop(0) if self.messages else []

    run(engine(backend), Inbox(), lambda events, _: told.extend(events))
    assert waits[:2] == [(False, 3), (False, 2)]  # one slice between two looks at the inbox
    assert told[-1][:2] == (1, "length")
    assert waits[-1] == (True, 0)


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on() -> None:
    for depth in (0, 1):
        for where, name in (("launch", "MemoryError"), ("wait", "RuntimeError")):
            broken = engine(Breaks(2, where), depth)
            broken.add(request(1, 1, 2, 3))
            ends = [event for event in drain(broken) if not isinstance(event, Tokens)]
            assert [type(end) for end in ends] == [Failed]
            assert name in ends[0].message
            broken.add(request(2, 1, 2, 3))
            assert drain(broken)[-1][:2] == (2, "length")
            assert broken.stats().blocks_used == 0


def test_an_abort_is_told_by_the_next_step_even_when_nothing_runs() -> None:
    small = engine()
    small.add(request(1, 1, 2))
    small.abort(1)
    small.abort(99)
    assert not small.idle
    assert [type(event) for event in small.step()] == [Aborted]
    assert small.idle


def test_the_loop_answers_in_order_and_ends_on_close() -> None:
    inbox = Script([[Add(request(1, 1, 2)), Add(request(2))], [Abort(7)], [], *[[]] * 20, [Close()]])
    sent: list[tuple[list[Event], Stats]] = []
    run(engine(), inbox, lambda events, stats: sent.append((events, stats)))
    events = [event for batch, _ in sent for event in batch]
    assert [e.code for e in events if isinstance(e, Failed)] == ["invalid_request"]
    assert [t for e in events if isinstance(e, Tokens) for t in e.tokens] == continuation((1, 2), 5, LIMITS.vocab)
    assert sent[-1][1].running == 0


class Script:
    """An inbox that says its lines one take at a time."""

    def __init__(self, lines: list[list[Message]]) -> None:
        self._lines = iter(lines)

    def take(self, wait: bool) -> list[Message]:
        return next(self._lines)

"""Tests the engine over the fake backend: failures stay where they are, events come once, the loop answers messages,
requests wait for what they need, and block events and copies are carried out."""

from __future__ import annotations

import pytest

from penstock.backend.base import Batch, Ticket
from penstock.backend.fake import FakeBackend, continuation
from penstock.core import check
from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.engine.grammars.constraints import Constraints
from penstock.engine.loop import run
from penstock.engine.request_record import RequestRecord
from penstock.engine.router_feed import BlockFeed, NoBlockFeed
from penstock.engine.waiting import Need, WaitingRoom
from penstock.errors import InvalidRequest, PenstockError
from penstock.ipc import wire
from penstock.types import (
    Aborted,
    BlockCopy,
    BlockEvent,
    BlockStored,
    Event,
    Failed,
    Finished,
    Limits,
    Request,
    SamplingParams,
    Stats,
    StepResult,
    Tokens,
)
from penstock.types.messages import Abort, Add, Close, Message

LIMITS = Limits(max_len=64, max_rows=4, step_tokens=16, block_size=4, num_blocks=64, vocab=100, host_places=16)


def request(id: int, *prompt: int, max_tokens: int = 5) -> Request:
    return Request(id, prompt, SamplingParams(temperature=0), max_tokens)


def engine(backend: FakeBackend | None = None, depth: int = 0) -> Engine:
    backend = backend or FakeBackend(LIMITS.vocab)
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    return assemble(backend, LIMITS, depth=depth)


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


class Prepares(FakeBackend):
    """Has three things to do when there is nothing to compute."""

    def __init__(self) -> None:
        super().__init__(LIMITS.vocab)
        self.left = 3

    def prepare_in_idle(self) -> bool:
        self.left -= 1
        return self.left > 0


def test_the_loop_prepares_while_idle_and_answers_what_arrives_meanwhile() -> None:
    backend = Prepares()
    received: list[Event] = []
    waits: list[tuple[bool, int]] = []

    class Inbox:
        def __init__(self) -> None:
            self.messages: list[list[Message]] = [[], [Add(request(1, 1, 2, 3))]]

        def take(self, wait: bool) -> list[Message]:
            waits.append((wait, backend.left))
            if wait:
                return [Close()]
            return self.messages.pop(0) if self.messages else []

    run(engine(backend), Inbox(), lambda events, *_: received.extend(events))
    assert waits[:2] == [(False, 3), (False, 2)]  # one slice between two looks at the inbox
    assert received[-1][:2] == (1, "length")
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
    run(engine(), inbox, lambda events, stats, _: sent.append((events, stats)))
    events = [event for batch, _ in sent for event in batch]
    assert [e.code for e in events if isinstance(e, Failed)] == ["invalid_request"]
    assert [t for e in events if isinstance(e, Tokens) for t in e.tokens] == continuation((1, 2), 5, LIMITS.vocab)
    assert sent[-1][1].running == 0


class Script:
    """Is an inbox that hands out its lines one take at a time."""

    def __init__(self, lines: list[list[Message]]) -> None:
        self._lines = iter(lines)

    def take(self, wait: bool) -> list[Message]:
        return next(self._lines)


def test_an_id_in_use_is_refused_and_its_request_goes_on() -> None:
    small = engine()
    small.add(request(1, 1, 2))
    with pytest.raises(InvalidRequest, match="request id 1 is already in use"):
        small.add(request(1, 3, 4))
    received = [token for event in drain(small) if isinstance(event, Tokens) for token in event.tokens]
    assert received == continuation((1, 2), 5, LIMITS.vocab)
    small.add(request(1, 3, 4))  # it has ended, and so the engine knows nothing of it any more
    assert not small.find(Constraints)._constrained


# -- the waiting room --------------------------------------------------------------------------------------------


class Adapter:
    """Is something that a request may need: it is there when the test says so."""

    def __init__(self) -> None:
        self.begun = self.ready = False
        self.waits: list[float] = []

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)


def test_requests_wait_for_what_they_need_and_leave_in_order_when_it_is_there() -> None:
    room, adapters = WaitingRoom(), [Adapter() for _ in range(3)]
    delivered: list[int] = []
    for id, adapter in enumerate(adapters):
        need = Need("adapter", adapter, lambda id=id: delivered.append(id))  # type: ignore[misc]
        room.enter(RequestRecord(request(id, 1)), [need], now=10.0 + id)
    room.wait(0.5)
    assert adapters[0].waits == [0.5]
    assert list(room.take_ready(20.0)) == []
    adapters[1].ready = adapters[2].ready = True
    ready = list(room.take_ready(20.0))
    assert [(record.request.id, record.waited) for record, _ in ready] == [(1, {"adapter": 9.0}), (2, {"adapter": 8.0})]
    for _, (need,) in ready:
        need.deliver()
    assert delivered == [1, 2]
    assert len(room) == 1
    assert room.drops(0)
    assert not room


def test_a_request_that_waited_says_for_what_and_how_long() -> None:
    small, adapter = engine(), Adapter()
    record = RequestRecord(request(1, 1, 2))
    small.records[1] = record
    small.waiting_room.enter(record, [Need("adapter", adapter, lambda: None)], now=0.0)
    small.add(request(2, 3, 4))
    others = drain_until(small, 2)
    assert all(event.seq == 2 for event in others)
    assert small.stats().waiting == 1
    adapter.ready = True
    (end,) = [event for event in drain(small) if isinstance(event, Finished)]
    assert end.report is not None
    assert [reason for reason, seconds in end.report.waited if seconds > 0] == ["adapter"]
    assert end.report.compiling == 0.0


def drain_until(engine: Engine, id: int) -> list[Event]:
    """Steps until a request has ended."""
    events: list[Event] = []
    while not any(isinstance(event, Finished) and event.seq == id for event in events):
        events += engine.step()
    return events


def test_what_cannot_be_had_fails_the_request_that_needs_it() -> None:
    def refuse() -> None:
        raise PenstockError("the adapter is not there")

    small, adapter = engine(), Adapter()
    adapter.ready = True
    for id, deliver in ((1, refuse), (2, lambda: None)):
        small.records[id] = record = RequestRecord(request(id, 1, 2))
        small.waiting_room.enter(record, [Need("adapter", adapter, deliver)], now=0.0)
    small.abort(2)
    assert [type(event) for event in drain(small)] == [Aborted, Failed]
    assert small.idle
    assert not small.records


# -- blocks ------------------------------------------------------------------------------------------------------


def test_block_events_come_with_the_steps_that_caused_them() -> None:
    backend = FakeBackend(LIMITS.vocab)
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    received: list[BlockEvent] = []
    inbox = Script([[Add(request(1, *range(10)))], *[[]] * 20, [Close()]])

    def send(events: list[Event], stats: Stats, blocks: list[BlockEvent]) -> None:
        step = wire.decode_answer(wire.encode_answer(wire.step(events, stats, blocks)))
        assert isinstance(step, wire.Step)
        assert step.block_events() == blocks
        received.extend(blocks)

    run(assemble(backend, LIMITS, block_events=True), inbox, send)
    assert [event.number for event in received] == [0, 1, 2]
    assert [event.tokens for event in received if isinstance(event, BlockStored)][:2] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert len({event.epoch for event in received}) == 1
    assert engine().find(NoBlockFeed).take() == []


def test_two_lives_of_an_engine_have_two_epochs() -> None:
    epochs = []
    for _ in range(2):
        backend = FakeBackend(LIMITS.vocab)
        backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
        life = assemble(backend, LIMITS, block_events=True)
        life.add(request(1, *range(10)))
        drain(life)
        epochs.append(life.find(BlockFeed).take()[0].epoch)
    assert epochs[0] != epochs[1]


def test_blocks_that_were_copied_out_and_in_again_answer_as_before() -> None:
    backend = FakeBackend(LIMITS.vocab)
    small = engine(backend)
    prompt = tuple(range(14))
    small.add(request(1, *prompt))
    drain(small)
    seq = RequestRecord(request(2, *prompt)).sequence(prefix_cache=True)
    blocks = [node.blocks[0] for node in small.scheduler.cache.prefixes.match(seq)]
    assert len(blocks) == 3
    for place, block in enumerate(blocks):
        small.scheduler.copy(BlockCopy(block, 7 + place, "out"))
    small.step()
    backend.kv.import_blocks(blocks, bytes(len(backend.kv.export_blocks(blocks))))  # what was there is lost
    assert answer_of(small, 3, prompt) != continuation(prompt, 5, LIMITS.vocab)
    for place, block in enumerate(blocks):
        small.scheduler.copy(BlockCopy(block, 7 + place, "in"))
    assert answer_of(small, 4, prompt) == continuation(prompt, 5, LIMITS.vocab)
    check(small.scheduler)


def answer_of(engine: Engine, id: int, prompt: tuple[int, ...]) -> list[int]:
    """Returns the answer to a prompt of which three blocks are reused."""
    engine.add(request(id, *prompt))
    tokens = [event for event in drain(engine) if isinstance(event, Tokens)]
    assert tokens[0].cached == 12
    return [token for event in tokens for token in event.tokens]


def test_copies_are_carried_out_in_order() -> None:
    backend = FakeBackend(LIMITS.vocab)
    small = engine(backend)
    one, other = backend.kv.export_blocks([0]), bytes(range(32))
    backend.kv.import_blocks([1], other)
    scheduler = small.scheduler
    scheduler.copy(BlockCopy(0, 5, "out"), BlockCopy(1, 5, "in"))  # block 1 has what block 0 had
    scheduler.copy(BlockCopy(1, 6, "out"), BlockCopy(2, 6, "in"))
    small.step()
    assert [backend.kv.export_blocks([block]) for block in range(3)] == [one] * 3


def test_what_was_never_copied_out_cannot_be_copied_in() -> None:
    small = engine()
    small.scheduler.copy(BlockCopy(0, 9, "in"))
    small.add(request(1, *range(10)))
    (failed,) = drain(small)
    assert isinstance(failed, Failed)
    assert "nothing was copied out to places [9]" in failed.message
    small.add(request(2, *range(10)))
    assert isinstance(drain(small)[-1], Finished)

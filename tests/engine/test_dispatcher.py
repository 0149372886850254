"""Tests how placements are carried out, without engines: a table of everything that can happen while a request waits
for the blocks that its placement pulls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from penstock.ipc.dispatch import Dispatch, Pull
from penstock.ipc.placement import RequestPlacement
from penstock.ipc.streams import RequestStreams
from penstock.types import Aborted, BlockOffer, Event, Failed, Finished, Offered, Request, SamplingParams, Tokens
from penstock.types.messages import Abort, Add, Message, Offer, Prefill

REQUEST = Request(1000, (7, 8), SamplingParams(), 4)
OFFER = BlockOffer(b"offer", 1, b"", ("shm:1",), 0, (b"hash",), (1,), 5.0)


class Engine:
    def __init__(self, name: str) -> None:
        self.name = name
        self.inbox: list[Message] = []

    def send(self, message: Message) -> None:
        self.inbox.append(message)

    @property
    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.inbox]


class Choice:
    """Places every request as the test says."""

    in_line = 0

    def __init__(self, dispatch: Dispatch) -> None:
        self.next: Dispatch | None = dispatch
        self.sources: list[Any] = []

    def place(self, request: Request, avoid: Any, source: Any = None) -> Dispatch | None:
        self.sources.append(source)
        return self.next

    def quietest(self) -> Any:
        return None

    def trial(self, engine: Any) -> Dispatch:
        return Dispatch(engine)

    def forget(self, id: int, generated: int) -> None:
        pass


class World:
    def __init__(self, *, compute: bool) -> None:
        self.reader, self.source, self.other = Engine("reader"), Engine("source"), Engine("other")
        pull = Pull(self.source, "salt", 0, "cpu", compute)
        self.choice = Choice(Dispatch(self.reader, pull, RequestPlacement("reader", "it is cheap"), waited=0.5))
        self.streams = RequestStreams(self.choice)
        self.got: list[Event] = []
        self.running = asyncio.create_task(self.streams.run(REQUEST, self.got.extend))

    def offer(self, offer: BlockOffer | None) -> None:
        (message,) = (each for each in self.source.inbox if isinstance(each, Offer | Prefill))
        self.streams.deliver(self.source, [Offered(message.id, offer)])

    def lose(self, engine: Engine) -> None:
        self.choice.next = Dispatch(self.other)
        lost = self.streams.lose(engine, "it died")
        self.streams.judge.clear(lost)
        self.streams.dispatcher.dispatch()


class Case(NamedTuple):
    happens: Callable[[World], object]
    reader: list[str]  # messages
    source: list[str]  # after the one that asks for blocks
    other: list[str]
    offered: bool  # with the request
    last: type[Event] | None  # event; None: it is still answered, or was left


CASES = {
    "offered": Case(lambda world: world.offer(OFFER), ["Add"], [], [], True, None),
    "nothing to offer": Case(lambda world: world.offer(None), ["Add"], [], [], False, None),
    "the source dies": Case(lambda world: world.streams.lose(world.source, "died"), ["Add"], [], [], False, None),
    "aborted": Case(lambda world: world.streams.abort(REQUEST.id), [], ["Abort"], [], False, Aborted),
    "left": Case(lambda world: world.running.cancel(), [], ["Abort"], [], False, None),
    "the reader dies": Case(lambda world: world.lose(world.reader), [], ["Abort"], ["Add"], False, None),
    "everything fails": Case(lambda world: world.streams.fail("gone", "away"), [], ["Abort"], [], False, Failed),
    "moved": Case(lambda world: world.streams.move(world.reader), [], ["Abort"], [], False, None),
}


@pytest.mark.parametrize("compute", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_everything_that_happens_while_a_request_waits_for_blocks(name: str, compute: bool) -> None:
    case = CASES[name]

    async def test() -> None:
        world = World(compute=compute)
        await asyncio.sleep(0.01)
        assert world.source.kinds == ["Prefill" if compute else "Offer"]
        assert not world.reader.inbox
        if name == "moved":
            world.choice.next = None  # nowhere to go yet
        case.happens(world)
        await asyncio.sleep(0.01)
        assert (world.reader.kinds, world.source.kinds[1:], world.other.kinds) == (case.reader, case.source, case.other)
        offers = [each.request.pull for each in world.reader.inbox if isinstance(each, Add)]
        assert offers == [OFFER if case.offered else None] * len(case.reader)
        assert [type(event) for event in world.got] == ([] if case.last is None else [case.last])
        assert len(world.streams.controls) == 0
        if case.last is None and name != "left":
            await finish(world, name)

    asyncio.run(asyncio.wait_for(test(), 20))


async def finish(world: World, name: str) -> None:
    if name == "moved":
        assert world.choice.sources[-1] is world.reader  # it still has what was computed
        world.choice.next = Dispatch(world.other)
        world.streams.dispatcher.dispatch()
        assert world.other.kinds == ["Add"]
    engine = world.reader if world.reader.inbox else world.other
    world.streams.deliver(engine, [Tokens(REQUEST.id, (5,)), Finished(REQUEST.id, "length")])
    await world.running
    assert isinstance(world.got[-1], Finished)
    assert len(world.streams) == 0


def test_a_request_says_where_it_was_placed_and_what_it_waited() -> None:
    async def test() -> None:
        engine, told = Engine("one"), list[RequestPlacement]()
        choice = Choice(Dispatch(engine, None, RequestPlacement("one", "it is idle"), waited=0.5))
        streams = RequestStreams(choice)
        streams.dispatcher.placings[REQUEST.id] = told.append
        claim = REQUEST.claim._replace(ttft=2.0)
        running = asyncio.create_task(streams.run(REQUEST._replace(claim=claim), lambda _: None))
        await asyncio.sleep(0)
        assert told == [RequestPlacement("one", "it is idle")]
        (sent,) = engine.inbox
        assert isinstance(sent, Add)
        assert sent.request.claim.ttft == 1.5
        streams.move(engine)
        assert told[1:] == [RequestPlacement("one", "it is idle", resumed=True)]
        assert engine.inbox[1] == Abort(REQUEST.id)
        running.cancel()

    asyncio.run(asyncio.wait_for(test(), 20))

"""Tests who is blamed when engines die, in every order in which that may be seen: on a virtual clock, with engines that
the test steps by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.fleet.deaths import DOUBTED_WORD_SECONDS, TURN_SECONDS, WORD_SECONDS, DeathNotices
from penstock.fleet.directory import Death
from penstock.ipc import request_stream, streams
from penstock.ipc.streams import TRIAL, RequestStreams
from penstock.types import Aborted, Event, Failed, Finished, Request, SamplingParams, Tokens
from penstock.types.messages import Abort, Add, Message

GATEWAY, BEFORE, AFTER = "gateway", "a gateway", "the third gateway"
POISON = 666
LENGTH = 6  # tokens of an answer
ALONE, TOGETHER = 2, 3  # engines that a poisoned request may end: alone, and if others are doubted with it


class VirtualClock(asyncio.SelectorEventLoop):
    """Is an event loop in which time passes only when there is nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        select = self._selector.select  # type: ignore[attr-defined]

        def pass_time(timeout: float | None = None) -> list[Any]:
            assert timeout is not None, "everything waits for ever"
            self.now += timeout
            return select(0)  # type: ignore[no-any-return]

        self._selector.select = pass_time  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


class Engine:
    """Answers a token a step, and dies of a poisoned prompt."""

    def __init__(self, name: str) -> None:
        self.name, self.epoch = name, 0
        self.inbox: list[Message] = []
        self.running: dict[int, Request] = {}
        self.suspects: tuple[tuple[str, int], ...] | None = None  # whom it died of; None: it lives
        self.joined = True

    def send(self, message: Message) -> None:
        self.inbox.append(message)

    def step(self, *others: tuple[str, int]) -> list[Event]:
        """Returns the events of a step, which others share whose requests the engine may have."""
        assert self.suspects is None
        events: list[Event] = []
        for message in self.inbox:
            if isinstance(message, Add):
                self.running[message.request.id] = message.request
            elif isinstance(message, Abort) and self.running.pop(message.id, None) is not None:
                events.append(Aborted(message.id))
        self.inbox.clear()
        if any(POISON in request.prompt for request in self.running.values()):
            self.suspects = (*((GATEWAY, id) for id in self.running), *others)
            return []
        for id, request in list(self.running.items()):
            done = len(request.generated)
            events.append(Tokens(id, (request.prompt[0] + done,)))
            self.running[id] = request._replace(generated=(*request.generated, done))
            if done + 1 == request.max_tokens:
                del self.running[id]
                events.append(Finished(id, "length"))
        return events


class Fleet:
    """Sends requests to engines and is told of their deaths, as a gateway's client is."""

    in_line = 0

    def __init__(self, count: int) -> None:
        self.engines = [Engine(f"engine-{number}") for number in range(count)]
        self.streams = RequestStreams(self)
        self.notices = DeathNotices(GATEWAY, self.streams)
        self.deaths = 0
        self._ids = iter(range(1, 10_000))
        self.answers: dict[int, asyncio.Task[list[Event]]] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}

    def place(self, request: Request, avoid: object) -> Engine | None:
        fit = [engine for engine in self.engines if engine.joined and engine is not avoid]
        return min(fit, key=lambda engine: self.streams.load(engine)[1], default=None)

    def quietest(self) -> Engine | None:
        return min((engine for engine in self.engines if engine.joined), key=self.streams.load, default=None)

    def forget(self, id: int, generated: int) -> None:
        pass

    async def ask(self, *prompt: int) -> int:
        """Submits a request and returns its id once it was sent, or waits."""
        id = next(self._ids)
        self.prompts[id] = prompt

        async def follow() -> list[Event]:
            request = Request(id, prompt, SamplingParams(), LENGTH)
            return [event async for share in self.streams.follow(request) for event in share]

        self.answers[id] = asyncio.create_task(follow())
        await asyncio.sleep(0)
        return id

    async def ask_at(self, engine: Engine, *prompt: int) -> int:
        """Submits a request to one engine."""
        others = [each for each in self.engines if each is not engine and each.joined]
        for other in others:
            other.joined = False
        id = await self.ask(*prompt)
        for other in others:
            other.joined = True
        return id

    def step(self, engine: Engine, *others: tuple[str, int]) -> None:
        events = engine.step(*others)
        self.deaths += engine.suspects is not None
        self.streams.deliver(engine, events)

    def lose(self, engine: Engine) -> None:
        """Has the connection with an engine lost, dead or not."""
        engine.joined = False
        lost = self.streams.lose(engine, f"{engine.name} has gone")
        self.notices.lose((engine.name, engine.epoch), lost)
        self.streams.dispatch()

    def tell(self, engine: Engine, epoch: int, suspects: tuple[tuple[str, int], ...]) -> None:
        self.notices.explain(Death(engine.name, epoch, True, suspects))

    def start(self, engine: Engine) -> None:
        """Starts an engine again that has died, and joins it."""
        assert not engine.joined
        assert engine.suspects is not None
        engine.epoch += 1
        engine.inbox, engine.running, engine.suspects = [], {}, None
        self.join(engine)

    def join(self, engine: Engine) -> None:
        engine.joined = True
        self.streams.resume()

    def die(self, engine: Engine, *others: tuple[str, int]) -> None:
        """Has an engine work on what it has, and on requests of others, and die of it, and everybody know."""
        self.step(engine, *others)
        assert engine.suspects is not None
        self.lose(engine)
        self.tell(engine, engine.epoch, engine.suspects)

    def has(self, engine: Engine) -> list[int]:
        """Returns the requests that an engine was sent and has not ended."""
        return [id for id, stream in self.streams._streams.items() if stream.engine is engine]

    async def check(self) -> None:
        """Lets all engines work, and checks that exactly the poisoned requests have failed."""
        while not all(task.done() for task in self.answers.values()):
            for engine in self.engines:
                if engine.suspects is None and engine.joined:
                    self.step(engine)
                elif engine.suspects is not None:
                    if engine.joined:
                        self.lose(engine)
                        self.tell(engine, engine.epoch, engine.suspects)
                    self.start(engine)
            await asyncio.sleep(0.01)
        for id, task in self.answers.items():
            *tokens, last = task.result()
            if POISON in self.prompts[id]:
                assert isinstance(last, Failed)
                assert last.code == "poisoned_request"
            else:
                given = [token for event in tokens for token in event.tokens]  # type: ignore[union-attr]
                assert given == [self.prompts[id][0] + number for number in range(LENGTH)]
                assert isinstance(last, Finished)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualClock]:
    loop = VirtualClock()
    for module in (streams, request_stream):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=loop.time))
    yield loop
    loop.close()


Scenario = Callable[[Fleet], Awaitable[None]]


def play(clock: VirtualClock, count: int, scenario: Scenario) -> Fleet:
    async def scene() -> Fleet:
        fleet = Fleet(count)
        await scenario(fleet)
        return fleet

    return clock.run_until_complete(scene())


def test_a_doubted_request_is_tried_where_all_others_were_answered(clock: VirtualClock) -> None:
    async def scenario(fleet: Fleet) -> None:
        first, second = fleet.engines
        poisoned = await fleet.ask_at(first, POISON)
        await fleet.ask_at(first, 10)
        others = [await fleet.ask_at(second, number) for number in (20, 30)]
        fleet.die(first)
        assert fleet.has(second) == others  # which it has not answered: they would be doubted as well
        fleet.step(second)
        assert fleet.has(second) == others
        fleet.step(second)
        assert fleet.has(second) == [poisoned, *others]
        await fleet.check()

    assert play(clock, 2, scenario).deaths == TOGETHER


def test_what_was_doubted_before_is_blamed_if_others_had_to_come_to_its_engine(clock: VirtualClock) -> None:
    """An engine that answers nobody for seconds gets a doubted request, and a doubted request that takes seconds gets
    company: what was there at both deaths is the reason."""

    async def scenario(fleet: Fleet) -> None:
        first, second = fleet.engines
        poisoned = await fleet.ask_at(first, POISON)
        await fleet.ask_at(first, 10)
        other = await fleet.ask_at(second, 20)
        fleet.die(first)
        assert fleet.has(second) == [other]
        await asyncio.sleep(TRIAL + 0.1)
        assert fleet.has(second) == [poisoned, other]
        fleet.die(second)
        fleet.start(first)
        assert fleet.has(first) == [poisoned]  # it is blamed, so it is tried before all others
        late = await fleet.ask(30)
        assert fleet.has(first) == [poisoned]
        await asyncio.sleep(TRIAL + 0.1)
        assert {poisoned, late} <= set(fleet.has(first))
        fleet.die(first)
        assert fleet.answers.keys() - fleet.streams._streams.keys() == {poisoned}
        assert not fleet.streams._streams[late].doubted  # the reason is found
        await fleet.check()

    assert play(clock, 2, scenario).deaths == TOGETHER


def test_a_request_that_does_no_harm_alone_is_not_blamed_for_its_company(clock: VirtualClock) -> None:
    async def scenario(fleet: Fleet) -> None:
        first, second = fleet.engines
        innocent = await fleet.ask_at(first, 10)
        await fleet.ask_at(first, POISON)
        fleet.die(first)
        assert fleet.has(second) == [innocent]  # which is tried
        await asyncio.sleep(TRIAL + 0.1)
        await fleet.ask(POISON, 2)
        assert len(fleet.has(second)) == 2
        fleet.die(second)
        await fleet.check()

    play(clock, 2, scenario)


@pytest.mark.parametrize("words", [1, 2])
def test_a_word_that_comes_late_counts(clock: VirtualClock, words: int) -> None:
    """One that has been doubted waits longer for the second word, since without it it would end a third engine."""

    async def scenario(fleet: Fleet) -> None:
        first, second, third = fleet.engines
        poisoned = await fleet.ask_at(first, POISON)
        fleet.step(first)
        told = [(first, first.epoch, first.suspects)]
        fleet.lose(first)
        await asyncio.sleep(WORD_SECONDS + 0.1)
        assert fleet.has(second) == [poisoned]
        fleet.step(second)
        told.append((second, second.epoch, second.suspects))
        fleet.lose(second)
        await asyncio.sleep(WORD_SECONDS + 0.1)
        assert not fleet.has(third)
        if words == 2:
            await asyncio.sleep(DOUBTED_WORD_SECONDS)
            assert fleet.has(third) == [poisoned]
        for engine, epoch, suspects in told:
            assert suspects
            fleet.tell(engine, epoch, suspects)
        assert isinstance((await fleet.answers[poisoned])[-1], Failed)
        assert third.inbox == [] if words == 1 else isinstance(third.inbox[-1], Abort)

    assert play(clock, 3, scenario).deaths == ALONE


@pytest.mark.parametrize("moment", [0.0, WORD_SECONDS + 0.1])
def test_nobody_waits_for_word_of_a_replica_that_was_forgotten(clock: VirtualClock, moment: float) -> None:
    async def scenario(fleet: Fleet) -> None:
        first, second = fleet.engines
        asked = await fleet.ask_at(first, 10)
        fleet.lose(first)
        await asyncio.sleep(moment)
        fleet.notices.forget(first.name)
        assert fleet.has(second) == [asked]
        first.suspects = ()
        await fleet.check()
        await asyncio.sleep(WORD_SECONDS + 0.1)
        notices = fleet.notices
        assert (notices._known, notices._awaited, notices._overdue) == ({}, {}, {})

    play(clock, 2, scenario)


def test_a_late_word_does_not_count_against_what_was_answered_since(clock: VirtualClock) -> None:
    async def scenario(fleet: Fleet) -> None:
        first, second, third = fleet.engines
        innocent = await fleet.ask_at(first, 10)
        fleet.lose(first)
        await asyncio.sleep(WORD_SECONDS + 0.1)
        assert fleet.has(second) == [innocent]
        fleet.lose(second)
        await asyncio.sleep(DOUBTED_WORD_SECONDS + 0.1)
        assert fleet.has(third) == [innocent]
        fleet.step(third)
        fleet.step(third)
        for engine in (first, second):
            fleet.tell(engine, 0, ((GATEWAY, innocent),))
            engine.suspects = ()
        assert fleet.streams._streams[innocent].blamed == 0
        await fleet.check()

    play(clock, 3, scenario)


def test_a_request_that_each_engine_answers_before_it_dies_is_not_blamed_and_ends(clock: VirtualClock) -> None:
    async def scenario(fleet: Fleet) -> None:
        [engine] = fleet.engines
        id = await fleet.ask(1)
        for _ in range(LENGTH // 2 - 1):
            fleet.step(engine)
            fleet.step(engine)
            engine.suspects = ((GATEWAY, id),)
            fleet.lose(engine)
            fleet.tell(engine, engine.epoch, engine.suspects)
            fleet.start(engine)
        await fleet.check()

    play(clock, 1, scenario)


@pytest.mark.parametrize("drained", [False, True])
def test_only_an_answer_ends_a_doubt(clock: VirtualClock, drained: bool) -> None:
    """A request is tried on an engine that is told to end: the next one tries it as carefully."""

    async def scenario(fleet: Fleet) -> None:
        first, second, third = fleet.engines
        poisoned = await fleet.ask_at(first, POISON)
        await fleet.ask_at(first, 10)
        other = await fleet.ask_at(third, 30)
        fleet.die(first)
        assert fleet.has(second) == [poisoned]
        second.joined = False
        if drained:
            fleet.streams.move(second)
        else:
            fleet.streams.trust(fleet.streams.lose(second, "it was told to end"))
            fleet.streams.dispatch()
        assert fleet.has(third) == [other]
        fleet.step(third)
        fleet.step(third)
        assert fleet.has(third) == [poisoned, other]
        second.suspects = ()
        await fleet.check()

    assert play(clock, 3, scenario).deaths == TOGETHER


def test_a_connection_that_is_lost_twice_in_a_moment_keeps_no_request(clock: VirtualClock) -> None:
    async def scenario(fleet: Fleet) -> None:
        (only,) = fleet.engines
        await fleet.ask(10)
        fleet.lose(only)
        fleet.join(only)
        await fleet.ask(20)
        fleet.lose(only)
        only.running.clear()
        only.inbox.clear()
        fleet.join(only)
        await fleet.check()

    play(clock, 1, scenario)


def test_a_gateway_finds_its_poisoned_request_beside_those_of_others(clock: VirtualClock) -> None:
    """Others know of no trial here: their new requests may be on its engine each time."""

    async def scenario(fleet: Fleet) -> None:
        first, second = fleet.engines
        poisoned = await fleet.ask_at(first, POISON)
        for number, engine in enumerate((first, second, first)):
            assert fleet.has(engine) == [poisoned]
            fleet.die(engine, (AFTER, number))
            if engine is second:
                fleet.start(first)
        assert isinstance((await fleet.answers[poisoned])[-1], Failed)

    assert play(clock, 2, scenario).deaths == TOGETHER


def test_gateways_that_doubt_requests_after_one_death_try_them_in_turn(clock: VirtualClock) -> None:
    """Else they would try two requests on the same engine again and again, and never learn which was the reason."""

    async def scenario(fleet: Fleet) -> None:
        first, second = fleet.engines
        poisoned = await fleet.ask_at(first, POISON)
        fleet.die(first, (BEFORE, 1))
        await asyncio.sleep(TURN_SECONDS / 2)
        assert not fleet.has(second)
        await asyncio.sleep(TURN_SECONDS)
        assert fleet.has(second) == [poisoned]
        await fleet.check()

    assert play(clock, 2, scenario).deaths == TOGETHER


def test_an_engine_that_worked_on_requests_of_others_alone_blames_none(clock: VirtualClock) -> None:
    async def scenario(fleet: Fleet) -> None:
        first, second = fleet.engines
        innocent = await fleet.ask_at(first, 10)
        first.suspects = ((BEFORE, 1),)  # before it has read what it was sent here
        fleet.lose(first)
        fleet.tell(first, 0, first.suspects)
        assert fleet.has(second) == [innocent]
        assert not fleet.streams._streams[innocent].doubted
        await fleet.check()

    play(clock, 2, scenario)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_whatever_happens_first_a_poisoned_request_ends_three_engines_at_most(clock: VirtualClock, count: int) -> None:
    """Engines step, are lost, told about and started again in any order, words come late, and new requests all the
    time."""

    async def disturb(fleet: Fleet, random: Random) -> None:
        untold: list[tuple[Engine, int, tuple[tuple[str, int], ...]]] = []
        poisoned = random.randrange(8)
        for number in range(80):
            if number < 16:
                await fleet.ask(*((POISON,) if number == poisoned else (10 * number,)))
            engine, event = random.choice(fleet.engines), random.random()
            if engine.suspects is None and engine.joined and event < 0.7:
                fleet.step(engine)
            elif engine.suspects is not None and engine.joined and event < 0.7:
                untold.append((engine, engine.epoch, engine.suspects))
                fleet.lose(engine)
            elif engine.suspects is not None and not engine.joined and event < 0.3:
                fleet.start(engine)
            elif untold and event < 0.9:
                fleet.tell(*untold.pop(random.randrange(len(untold))))
            else:
                await asyncio.sleep(random.choice([0.01, 0.1, 1.0, TRIAL]))
        for each in untold:
            fleet.tell(*each)
        await fleet.check()

    for seed in range(150):
        fleet = play(clock, count, lambda fleet, seed=seed: disturb(fleet, Random(seed)))  # type: ignore[misc]
        assert fleet.deaths <= TOGETHER, seed

"""What holds of every route and of every ledger, whatever replicas hold and owe."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.fleet.holders import DEVICE, HOST
from penstock.fleet.index import BlockIndex
from penstock.fleet.ledger import Ledger, Load, load_of
from penstock.fleet.route import Route, RoutedPrompt, Router, RoutingWeights
from penstock.fleet.timing import EngineTiming

SIZE = 256
MOST = 8  # replicas, all of which are candidates
NOW = 1000.0
TIMINGS = [
    EngineTiming(),
    EngineTiming(prefill=(0.0, 1.0, 0.0), decode=(0.0, 0.0, 20.0), kv_tokens=8192, step_tokens=512),
    EngineTiming(prefill=(0.0, 1e-3, 40.0), kv_tokens=65_536, step_tokens=2048, pull_ms_per_token=1.0),
]


class Member(NamedTuple):
    """Describes a replica: what it owes, and how many leading blocks of prompts it has."""

    load: Load
    device: int
    host: int


class World(NamedTuple):
    """Describes all that a decision depends on, but the prompt."""

    members: tuple[Member, ...]
    timing: EngineTiming
    pull: bool
    seed: int
    heat: int  # prompts with the same beginning that came before

    def router(self, prompt: RoutedPrompt) -> tuple[Router, Ledger]:
        """Returns a router that `heat` requests with the beginning of this prompt have asked before."""
        index, ledger = BlockIndex(), Ledger()
        router = Router(self.timing, index, ledger, RoutingWeights(pull=self.pull), self.seed)
        for replica, (_, device, host) in enumerate(self.members):
            held = [(DEVICE, block) for block in range(device)]
            index.apply(replica, 1, 0, held + [(HOST, block) for block in range(device, device + host)])
            ledger.join(replica)
        for _ in range(self.heat):  # at a time from which no prediction is left
            router.route(prompt._replace(tokens=1), NOW - 5000)
        for replica, (load, _, _) in enumerate(self.members):
            ledger.join(replica)
            ledger.report(replica, load, 0)
        return router, ledger

    def cost(self, replica: int, prompt: RoutedPrompt) -> Route:
        """Returns the route if no other replica could be chosen."""
        router, _ = self.router(prompt)
        return router.route(prompt, NOW, frozenset(range(len(self.members))) - {replica})


loads = st.builds(
    lambda queued, rows, kv, busy: Load(queued, queued, rows, queued + kv, NOW + busy, min(queued, 3)),
    st.integers(0, 40_000),
    st.integers(0, 300),
    st.integers(0, 300_000),
    st.floats(-500, 500),
)
members = st.builds(Member, load=loads, device=st.integers(0, 20), host=st.integers(0, 20))
worlds = st.builds(
    World,
    members=st.lists(members, min_size=1, max_size=MOST).map(tuple),
    timing=st.sampled_from(TIMINGS),
    pull=st.booleans(),
    seed=st.integers(0, 3),
    heat=st.sampled_from([0, 0, 3, 40]),
)
prompts = st.builds(
    lambda blocks, more: RoutedPrompt(tuple(range(blocks)), blocks * SIZE + more, SIZE),
    st.integers(0, 40),
    st.integers(1, SIZE),
)


@given(world=worlds, prompt=prompts)
def test_the_chosen_replica_costs_at_most_a_twentieth_more_than_the_cheapest(
    world: World, prompt: RoutedPrompt
) -> None:
    router, ledger = world.router(prompt)
    before = {replica: ledger.load(replica) for replica in ledger.replicas()}
    route = router.route(prompt, NOW)
    costs = {replica: world.cost(replica, prompt).total for replica in range(len(world.members))}
    assert route.total == pytest.approx(costs[route.replica])
    assert route.total <= 1.05 * min(costs.values()) + 1e-6
    others = {replica: cost for replica, cost in costs.items() if replica != route.replica}
    if route.next_best is None:
        assert not others
    else:
        assert route.next_best[1] == pytest.approx(min(others.values()))
    sent = before[route.replica].plus(load_of(route.uncached, prompt.tokens))
    assert {replica: ledger.load(replica) for replica in ledger.replicas()} == before | {route.replica: sent}


HOT = World((Member(Load(queued=1), 0, 0), Member(Load(queued=40_000), 16, 0)), TIMINGS[0], False, 0, heat=400)


@given(world=worlds, prompt=prompts)
@example(world=HOT, prompt=RoutedPrompt(tuple(range(16)), 16 * SIZE + 1, SIZE))
def test_no_part_of_a_cost_is_negative_and_they_add_up(world: World, prompt: RoutedPrompt) -> None:
    for replica in range(len(world.members)):
        route = world.cost(replica, prompt)
        parts = route.queue, route.prefill, route.pull, route.harm, route.memory
        assert min(*parts, route.shared, route.total) >= -1e-6
        assert route.total == pytest.approx(sum(parts) - route.shared)
        assert route.cached + route.pulled + route.uncached == prompt.tokens
        assert route.uncached >= 1
        assert (route.source is None) == (route.pulled == 0)


@given(world=worlds, prompt=prompts, more=st.integers(1, 20), data=st.data())
def test_a_replica_that_holds_more_of_a_prompt_costs_no_more(
    world: World, prompt: RoutedPrompt, more: int, data: st.DataObject
) -> None:
    world = world._replace(heat=0)  # a prefix that many ask for is to be computed where it is not held
    replica = data.draw(st.integers(0, len(world.members) - 1))
    member = world.members[replica]
    richer = member._replace(device=member.device + more, host=max(member.host - more, 0))
    others = world.members[:replica], world.members[replica + 1 :]
    after = world._replace(members=(*others[0], richer, *others[1])).cost(replica, prompt)
    assert after.total <= world.cost(replica, prompt).total + 1e-6


@given(world=worlds, prompt=prompts, data=st.data())
def test_a_replica_that_is_shut_or_avoided_is_not_chosen(
    world: World, prompt: RoutedPrompt, data: st.DataObject
) -> None:
    replicas = set(range(len(world.members)))
    gone = data.draw(st.sets(st.sampled_from(sorted(replicas)), max_size=len(replicas) - 1))
    avoided = data.draw(st.sets(st.sampled_from(sorted(replicas))))
    router, ledger = world.router(prompt)
    for replica in gone:
        ledger.leave(replica)
    for _ in range(4):
        route = router.route(prompt, NOW, avoided)
        assert route.replica in (replicas - gone - avoided or replicas - gone)
        assert route.next_best is None or route.next_best[0] not in gone


@given(world=worlds, asked=st.lists(st.tuples(prompts, st.floats(0, 200)), min_size=1, max_size=6))
def test_the_same_inputs_and_lots_give_the_same_decisions(
    world: World, asked: list[tuple[RoutedPrompt, float]]
) -> None:
    def decide() -> list[Route]:
        (router, _), now, routes = world.router(asked[0][0]), NOW, []
        for prompt, later in asked:
            now += later
            routes.append(router.route(prompt, now))
        return routes

    assert decide() == decide()


class Replica:
    """Takes requests in the order in which they were sent, and ends them in any."""

    def __init__(self) -> None:
        self.on_the_way: deque[Load] = deque()
        self.running: list[Load] = []
        self.received = 0

    def report(self) -> tuple[Load, int]:
        owed = Load()
        for load in self.running:
            owed = owed.plus(load)
        return owed, self.received


@given(data=st.data(), count=st.integers(1, 4))
def test_a_ledger_returns_to_nothing_when_all_that_was_sent_has_ended(data: st.DataObject, count: int) -> None:
    ledger, replicas, reports = Ledger(), [Replica() for _ in range(count)], list[tuple[int, Any]]()
    for number in range(count):
        ledger.join(number)
    for _ in range(data.draw(st.integers(0, 40))):
        number = data.draw(st.integers(0, count - 1))
        replica, event = replicas[number], data.draw(st.sampled_from(["send", "receive", "end", "report", "late"]))
        if event == "send":
            load = load_of(data.draw(st.integers(0, 500)), 500, data.draw(st.booleans()))
            ledger.sent(number, load)
            replica.on_the_way.append(load)
        elif event == "receive" and replica.on_the_way:
            replica.running.append(replica.on_the_way.popleft())
            replica.received += 1
        elif event == "end" and replica.running:
            replica.running.pop(data.draw(st.integers(0, len(replica.running) - 1)))
        elif event == "report":
            reports.append((number, replica.report()))
            ledger.report(number, *replica.report())
            owed = Replica()
            owed.running = [*replica.running, *replica.on_the_way]
            assert ledger.load(number) == owed.report()[0]
        elif event == "late":  # one that was overtaken by reports of more requests changes nothing
            for earlier, (load, received) in reports:
                if received < replica.received and earlier == number and (number, replica.report()) in reports:
                    before = ledger.load(number)
                    ledger.report(number, load, received)
                    assert ledger.load(number) == before
        assert min(min(ledger.load(each)) for each in range(count)) >= 0
        weights = [ledger.load(each).queued * 16 + ledger.load(each).kv_tokens for each in ledger.replicas()]
        assert weights == sorted(weights)
        assert ledger.least(2) == ledger.replicas()[:2]
    for number, replica in enumerate(replicas):
        ledger.report(number, Load(), replica.received + len(replica.on_the_way))
    assert all(ledger.load(number) == Load() for number in range(count))
    assert ledger.replicas() == list(range(count))

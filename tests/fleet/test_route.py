"""Tests that a route is cheap for the request, fair to others, and says why."""

from __future__ import annotations

from collections import Counter

import pytest

from penstock.fleet.holders import DEVICE, HOST
from penstock.fleet.index import BlockIndex
from penstock.fleet.ledger import Ledger, Load
from penstock.fleet.route import RoutedPrompt, Router, RoutingWeights
from penstock.fleet.timing import EngineTiming

TIMING = EngineTiming()


def fleet(replicas: int = 4, **weights: object) -> tuple[BlockIndex, Ledger, Router]:
    index, ledger = BlockIndex(), Ledger()
    for replica in range(replicas):
        ledger.join(replica)
    return index, ledger, Router(TIMING, index, ledger, RoutingWeights(**weights), seed=0)  # type: ignore[arg-type]


def hold(index: BlockIndex, replica: int, blocks: int, tier: int = DEVICE) -> None:
    index.apply(replica, 1, 0, [(tier, block) for block in range(blocks)])


PROMPT = RoutedPrompt(tuple(range(16)), 16 * 512 + 1, 512)


def test_who_holds_the_prompt_answers() -> None:
    index, _, router = fleet()
    hold(index, 2, 12)
    route = router.route(PROMPT, 0.0)
    assert (route.replica, route.cached, route.uncached) == (2, 12 * 512, 4 * 512 + 1)
    assert route.prefill == pytest.approx(TIMING.prefill_ms(4 * 512 + 1))
    assert route.why().startswith("replica 2: ")
    assert "prefill of 2,049" in route.why()
    assert "6,144 cached; next: replica " in route.why()


def test_a_holder_with_a_long_queue_is_passed_over() -> None:
    index, ledger, router = fleet()
    hold(index, 2, 12)
    ledger.report(2, Load(queued=50_000), 0)
    route = router.route(PROMPT, 0.0)
    assert route.replica != 2
    assert route.next_best is not None


def test_a_step_that_is_under_way_counts() -> None:
    _, ledger, router = fleet(2)
    ledger.report(0, Load(busy_until=1150.0), 0)
    assert router.route(PROMPT, 1000.0).replica == 1
    _, ledger, router = fleet(1)
    ledger.report(0, Load(busy_until=1150.0), 0)
    assert router.route(PROMPT, 1000.0).queue == pytest.approx(150.0)


def test_rows_that_answer_and_memory_count() -> None:
    _, ledger, router = fleet(2)
    ledger.report(0, Load(rows=40, kv_tokens=40 * 512), 0)
    assert router.route(PROMPT, 0.0).replica == 1
    _, ledger, router = fleet(1, harm=0.1, later=0.0)
    ledger.report(0, Load(rows=40, kv_tokens=40 * 512), 0)
    route = router.route(PROMPT, 0.0)
    assert route.harm == pytest.approx(0.1 * 40 * route.prefill)
    _, ledger, router = fleet(2)
    ledger.report(0, Load(kv_tokens=TIMING.kv_tokens), 0)
    ledger.report(1, Load(queued=2000), 0)
    assert router.route(PROMPT, 0.0).replica == 1


def test_siblings_go_where_the_first_went_before_its_events_come() -> None:
    _, _, router = fleet(8)
    first = router.route(PROMPT, 0.0)
    second = router.route(PROMPT, 1.0)
    assert second.replica == first.replica
    assert second.cached == 16 * 512
    assert router.route(PROMPT, 10_000.0).cached == 0


def test_a_prefix_that_many_ask_for_is_computed_on_another_replica_too() -> None:
    for gateways, asked in ((1, 60), (16, 4)):
        index, ledger, router = fleet(2)
        router.gateways = gateways
        hold(index, 0, 12)
        ledger.report(0, Load(rows=1), 0)
        routes = [router.route(PROMPT._replace(hashes=(*range(12), *range(-9, -5))), 100.0 * i) for i in range(asked)]
        assert routes[0].replica == 0
        spread = next(route for route in routes if route.replica == 1)
        assert spread.shared > 0
        parts = spread.queue + spread.prefill + spread.pull + spread.harm + spread.memory - spread.shared
        assert spread.total == pytest.approx(parts)
        assert "for others with this prefix" in spread.why()
    router.gateways = 1
    _, ledger, router = fleet(2)
    assert all(router.route(PROMPT, 60_000.0 * i).shared == 0 for i in range(60))  # it is not asked for often


def test_another_timing_is_used_from_then_on_and_nothing_is_forgotten() -> None:
    _, _, router = fleet(8)
    first = router.route(PROMPT, 0.0)
    router.use(TIMING._replace(prefill=(0.0, 1.0, 0.0)))
    second = router.route(PROMPT, 1.0)
    assert (second.replica, second.prefill) == (first.replica, pytest.approx(1.0))


def test_equals_are_chosen_at_random() -> None:
    chosen = Counter()
    for seed in range(200):
        ledger = Ledger()
        for replica in range(4):
            ledger.join(replica)
        chosen[Router(TIMING, BlockIndex(), ledger, seed=seed).route(PROMPT, 0.0).replica] += 1
    assert max(chosen.values()) < 2 * min(chosen.values())


def test_blocks_come_from_another_replica_when_that_is_cheaper() -> None:
    index, ledger, router = fleet(2, pull=True)
    hold(index, 0, 16)
    ledger.report(0, Load(queued=20_000), 0)
    route = router.route(PROMPT, 0.0)
    assert (route.replica, route.source, route.pulled, route.uncached) == (1, 0, 16 * 512, 1)
    assert "pull of 8,192 from replica 0" in route.why()
    index, ledger, router = fleet(2)
    slow = Router(TIMING._replace(pull_ms_per_token=0.1), index, ledger, RoutingWeights(pull=True))
    hold(index, 0, 16)
    ledger.report(0, Load(queued=20_000), 0)
    assert router.route(PROMPT, 0.0).pulled == 0
    assert slow.route(PROMPT, 0.0).pulled == 0


def test_blocks_in_host_memory_cost_their_way_back() -> None:
    index, _, router = fleet(1)
    hold(index, 0, 8, HOST)
    route = router.route(PROMPT, 0.0)
    assert route.cached == 8 * 512
    assert route.pull == pytest.approx(8 * 512 * TIMING.host_ms_per_token)
    assert route.why().endswith("; no other replica")


def test_a_replica_that_left_is_not_chosen() -> None:
    index, ledger, router = fleet(2)
    hold(index, 1, 16)
    ledger.leave(1)
    assert router.route(PROMPT, 0.0).replica == 0


def test_the_ledger_adds_what_a_report_does_not_know_of() -> None:
    ledger = Ledger()
    ledger.join(0)
    ledger.join(1)
    ledger.sent(0, Load(queued=100))
    ledger.sent(0, Load(queued=10))
    assert ledger.load(0).queued == 110
    ledger.report(0, Load(queued=60), received=1)
    assert ledger.load(0).queued == 70
    ledger.report(0, Load(queued=500), received=0)  # older than the last one
    assert ledger.load(0).queued == 70
    assert ledger.least(1) == [1]
    ledger.report(1, Load(queued=80), received=0)
    assert ledger.replicas() == [0, 1]
    ledger.report(0, Load(), received=2)
    assert ledger.load(0) == Load()

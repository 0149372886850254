"""Tests the host tier: what leaves the device comes back as it was, from places that have one owner each."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import Scheduler, Sequence, SequenceParams, check, hashing
from penstock.core.block_events import BlockEvents
from penstock.core.free_blocks import BlockPool
from penstock.core.incoming import attach
from penstock.core.prefix import PrefixNode
from penstock.core.tiers import CopyCosts
from penstock.types import BlockEvent, BlockRemoved, BlockStored, Event, Finished, Limits, blocks_for
from tests.core.test_memory_forecast import Greedy
from tests.core.test_properties import VOCAB, Arrival, Shuffles, World, beyond, run_world
from tests.core.world import answer, limits, run, step
from tests.engine.guesses import RandomDrafting
from tests.examples import examples

WINDOWS = ((0,), (0,), (0, 5), (0, 8, 8), (0, 0, 3, 17), (4,), (6, 1))
CONVERSATIONS = [tuple(range(20)), tuple(range(50)), (*range(50), *range(10)), (9,) * 60, (8,) * 50]


@st.composite
def crowded_worlds(draw: st.DrawFn) -> World:
    """Returns a world of a few conversations that come back again and again, where the device holds about one."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    windows = draw(st.sampled_from(WINDOWS))
    least = blocks_for(72, windows, block_size)
    max_rows = draw(st.integers(1, 4))
    limits = Limits(
        max_len=72,
        max_rows=max_rows,
        step_tokens=draw(st.integers(max(max_rows, 8), 64)),
        block_size=block_size,
        num_blocks=least + draw(st.integers(0, least // 2)),
        vocab=VOCAB,
        states=draw(st.sampled_from([0, 0, 0, 1, 2, 3])),
        windows=windows,
        host_places=draw(st.sampled_from([5, 20, 40, 100, 300])),
        host_states=draw(st.sampled_from([0, 1, 3, 10])),
    )
    requests = []
    for at in range(0, 41, draw(st.sampled_from([3, 5, 8]))):
        prompt = (*draw(st.sampled_from(CONVERSATIONS)), at)
        requests.append(
            Arrival(
                at,
                prompt,
                draw(st.integers(1, 72 - len(prompt))) if draw(st.booleans()) else 1,
                frozenset(),
                priority=0,
                salt="",
                score=False,
                penalty=0.0,
                pooling="",
                background=False,
                abort_at=draw(st.sampled_from([None, None, None, at + 1, at + 5])),
            )
        )
    return limits, draw(st.sampled_from([0, 1])), requests


@settings(max_examples=examples(120))
@given(crowded_worlds(), st.randoms(use_true_random=False), st.sampled_from(["", "order", "drafts", "trials"]))
def test_each_request_answers_as_if_alone_whatever_lies_on_the_host(world: World, random: Random, kind: str) -> None:
    limits = world[0]
    drafting = RandomDrafting(lambda request: beyond(request, limits), VOCAB, random) if kind == "drafts" else None
    with patch.object(CopyCosts, "trial_due", lambda _: kind == "trials"):
        run_world(world, Shuffles(limits, random) if kind else None, drafting)


# -- leaving the device and coming back --------------------------------------------------------------------------

FIRST, SECOND = tuple(range(30)), tuple(range(40, 70))


def small(host_places: int = 16, **changed: Any) -> Scheduler:
    """Returns a scheduler with room for one sequence of 32 tokens on the device."""
    return Scheduler(limits(max_len=32, num_blocks=8, step_tokens=32, host_places=host_places, **changed))


def reused(scheduler: Scheduler, id: int, prompt: tuple[int, ...]) -> dict[str, int]:
    """Returns how many tokens of a prompt came from where."""
    (end,) = (event for event in run(scheduler, Sequence(id, prompt, 1)) if isinstance(event, Finished))
    assert end.report is not None
    return dict(end.report.reused)


def nodes_of(scheduler: Scheduler, prompt: tuple[int, ...]) -> list[PrefixNode]:
    return scheduler.cache.prefixes.match(Sequence(99, prompt, 1))


def test_what_left_the_device_is_copied_out_and_in_again() -> None:
    scheduler = small()
    assert reused(scheduler, 1, FIRST) == {}
    scheduler.add(Sequence(2, SECOND, 1))
    plan, _ = step(scheduler)
    assert [copy.direction for copy in plan.copies] == ["out"] * 7
    scheduler.add(Sequence(3, FIRST, 1))
    plan, _ = step(scheduler)
    incoming = [copy for copy in plan.copies if copy.direction == "in"]
    assert [copy.place for copy in incoming] == [node.places[0] for node in nodes_of(scheduler, FIRST)]
    assert [copy.block for copy in incoming] == [node.blocks[0] for node in nodes_of(scheduler, FIRST)]
    assert [row.start for row in plan.rows] == [28]
    stats = scheduler.stats()
    assert (stats.copied_out, stats.copied_in, stats.host_blocks, stats.host_places) == (14, 7, 14, 16)
    assert stats.reused == (("ram", 28),)


def test_what_leaves_a_second_time_is_on_the_host_already() -> None:
    scheduler = small()
    for id, prompt in enumerate((FIRST, SECOND, FIRST, SECOND)):
        reused(scheduler, id, prompt)
    assert scheduler.stats().copied_out == 14
    assert reused(scheduler, 9, FIRST) == {"ram": 28}
    assert scheduler.stats().copied_out == 14


def test_several_that_wait_share_what_one_of_them_has_copied_in() -> None:
    scheduler = Scheduler(limits(max_len=32, num_blocks=12, step_tokens=32, host_places=16))
    for id, prompt in enumerate((FIRST, SECOND)):
        reused(scheduler, id, prompt)
    for id in (3, 4):
        scheduler.add(Sequence(id, FIRST, 1))
    plan, _ = step(scheduler)
    assert [copy.direction for copy in plan.copies].count("in") == 3  # four are on the device still
    assert len({scheduler_row.seq for scheduler_row in plan.rows}) == 2


def test_a_full_host_forgets_what_was_used_longest_ago_deepest_first() -> None:
    scheduler = small(host_places=9)
    for id, prompt in enumerate((FIRST, SECOND, tuple(range(70, 100)))):
        reused(scheduler, id, prompt)
    assert len(nodes_of(scheduler, FIRST)) == 2
    assert len(nodes_of(scheduler, SECOND)) == 7
    assert reused(scheduler, 9, FIRST) == {"ram": 8}


def test_what_the_device_has_too_is_forgotten_first() -> None:
    scheduler = small(host_places=8)
    for id, prompt in enumerate((FIRST, SECOND)):
        reused(scheduler, id, prompt)
    assert reused(scheduler, 3, FIRST) == {"ram": 28}  # its places go to what left for it
    assert sum(node.places[0] >= 0 for node in nodes_of(scheduler, FIRST)) == 1
    assert all(node.places[0] >= 0 for node in nodes_of(scheduler, SECOND))


def test_a_block_that_is_computed_again_backs_its_node() -> None:
    """Scores are not cached, so a prompt that wants them is computed though it lies on the host."""
    scheduler = small()
    for id, prompt in enumerate((FIRST, SECOND)):
        reused(scheduler, id, prompt)
    run(scheduler, Sequence(3, FIRST, 1, SequenceParams(score=True)))
    assert scheduler.stats().copied_in == 0
    assert all(node.blocks[0] >= 0 and node.places[0] >= 0 for node in nodes_of(scheduler, FIRST))
    assert reused(scheduler, 4, FIRST) == {"device": 28}


def test_a_node_that_finds_no_place_takes_those_below_it_along() -> None:
    scheduler = small(host_places=3)
    reused(scheduler, 1, FIRST)
    cache = scheduler.cache
    for _ in range(3):
        cache.pool.give(*cache.trie.evict(lambda node, blocks: True))
    check(scheduler)
    assert len(nodes_of(scheduler, FIRST)) == 7
    cache.pool.give(*cache.trie.evict(lambda node, blocks: False))
    check(scheduler)
    assert len(nodes_of(scheduler, FIRST)) == 3
    assert cache.host.used == 0


def test_preemption_loses_nothing_but_what_does_not_fill_a_block() -> None:
    def recomputed(host_places: int) -> int:
        few = limits(max_len=40, num_blocks=14, max_rows=4, host_places=host_places)
        scheduler = Scheduler(few, policy=Greedy(few))
        events: list[Event] = run(scheduler, *(Sequence(id, (id,) * 9, 30) for id in range(4)))
        reports = [event.report for event in events if isinstance(event, Finished) and event.report]
        assert sum(report.preemptions for report in reports) > 2
        assert all(report.recomputed <= 4 * report.preemptions for report in reports) or not host_places
        return sum(report.recomputed for report in reports)

    assert recomputed(64) < recomputed(0) / 3


# -- windows -----------------------------------------------------------------------------------------------------


def test_windows_come_back_with_what_they_are_needed_for() -> None:
    scheduler = Scheduler(limits(windows=(0, 6), num_blocks=16, max_len=32, step_tokens=8, host_places=40))
    for id, prompt in enumerate((FIRST, SECOND, tuple(range(70, 100)))):
        reused(scheduler, id, prompt)
    scheduler.add(Sequence(3, FIRST, 1))
    plan, _ = step(scheduler)
    assert [row.start for row in plan.rows] == [28]
    assert [copy.direction for copy in plan.copies].count("in") == 7 + 2  # of the window two blocks
    assert not scheduler.sequences


def test_a_window_that_is_missing_on_both_tiers_ends_what_can_be_reused() -> None:
    scheduler = Scheduler(limits(windows=(0, 6), num_blocks=16, max_len=32, step_tokens=8, host_places=40))
    for id, prompt in enumerate((FIRST, SECOND, tuple(range(70, 100)))):
        reused(scheduler, id, prompt)
    longer = (*FIRST[:20], 98, 98, 98, 98, 98)
    assert len(nodes_of(scheduler, longer)) == 5
    assert reused(scheduler, 9, longer) == {}


def test_a_smaller_window_that_leaves_with_a_larger_one_stays_where_it_is_on_the_host() -> None:
    scheduler = Scheduler(limits(windows=(0, 8, 6), num_blocks=24, max_len=32, step_tokens=8, host_places=80))
    for id, prompt in enumerate((FIRST, SECOND, tuple(range(70, 100)), FIRST)):
        reused(scheduler, id, prompt)
    cache = scheduler.cache
    both = [node for node in nodes_of(scheduler, FIRST) if min(node.blocks[1:] + node.places[1:]) >= 0]
    assert both
    for node in both:  # as if there had been no place for the larger one
        del cache.host._spare[node, 1]
        cache.host._free.append(node.places[1])
        node.places[1] = -1
    check(scheduler)
    while any(node.blocks[1] >= 0 for node in both):
        for block in cache.trie.evict(lambda node, blocks: False):
            cache.pool.give(block)
        check(scheduler)


# -- places that others fill -------------------------------------------------------------------------------------


def attached(scheduler: Scheduler, prompt: tuple[int, ...], first: int, count: int, salt: str = "") -> int:
    places = scheduler.cache.host.reserve(count)
    used = attach(scheduler.cache, salt, prompt, first, [[place] for place in places])
    check(scheduler)
    return used


def test_blocks_that_were_attached_are_reused_like_others() -> None:
    scheduler = small()
    assert attached(scheduler, FIRST, 0, 5) == 5
    assert reused(scheduler, 1, FIRST) == {"disk": 20}
    assert reused(scheduler, 2, SECOND) == {}
    assert reused(scheduler, 3, FIRST) == {"ram": 28}


def test_a_chain_may_be_attached_below_what_is_there() -> None:
    scheduler = small()
    reused(scheduler, 1, FIRST[:10])
    assert attached(scheduler, FIRST, 2, 3) == 3
    assert reused(scheduler, 2, FIRST) == {"device": 8, "disk": 12}


def test_places_of_what_is_there_are_given_back() -> None:
    scheduler = small()
    reused(scheduler, 1, FIRST)
    assert attached(scheduler, FIRST, 0, 7) == 0
    assert attached(scheduler, (*FIRST[:8], *SECOND), 3, 2) == 0  # its third block is not known
    assert scheduler.cache.host.used == 0
    assert len(scheduler.cache.host.free()) == 16
    assert attach(scheduler.cache, "", FIRST, 0, []) == 0


def test_reserved_places_are_had_by_forgetting_others() -> None:
    scheduler = small(host_places=8)
    for id, prompt in enumerate((FIRST, SECOND)):
        reused(scheduler, id, prompt)
    places = scheduler.cache.host.reserve(20)
    assert len(places) == 8
    check(scheduler)
    assert nodes_of(scheduler, FIRST) == []
    assert reused(scheduler, 3, FIRST) == {}  # nothing could leave for the host meanwhile
    scheduler.cache.host.give_back(places)
    check(scheduler)


def test_attached_blocks_keep_their_chain_before_them_on_the_host() -> None:
    scheduler = small(host_places=10)
    attached(scheduler, FIRST, 0, 3)
    attached(scheduler, SECOND, 0, 3)
    attached(scheduler, FIRST, 3, 2)
    scheduler.cache.host.reserve(2 + 3)
    check(scheduler)
    assert (len(nodes_of(scheduler, FIRST)), len(nodes_of(scheduler, SECOND))) == (5, 0)


def test_windowed_blocks_may_be_attached_too() -> None:
    scheduler = Scheduler(limits(windows=(0, 6), num_blocks=24, max_len=32, host_places=20))
    places = scheduler.cache.host.reserve(7)
    given = [[places[0], -1], [places[1], places[2]], [places[3], places[4]], [places[5], -1]]
    scheduler.cache.host.give_back(places[6:])
    assert attach(scheduler.cache, "", FIRST, 0, given) == 4
    check(scheduler)
    assert reused(scheduler, 1, FIRST) == {"disk": 12}  # the window before the fourth block's end is not there


def test_an_attached_chain_of_windows_alone_may_have_gaps() -> None:
    scheduler = Scheduler(limits(windows=(6,), num_blocks=8, max_len=32, host_places=8, step_tokens=8))
    places = scheduler.cache.host.reserve(2)
    assert attach(scheduler.cache, "", FIRST, 0, [[-1], [places[0]], [places[1]], [-1]]) == 2
    check(scheduler)
    assert len(nodes_of(scheduler, FIRST)) == 3
    assert reused(scheduler, 1, FIRST) == {"disk": 8, "device": 4}


# -- events ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(0,), (0, 6)])
def test_events_tell_what_is_on_the_device(windows: tuple[int, ...]) -> None:
    recorded = BlockEvents(1)
    small = limits(windows=windows, num_blocks=10 * len(windows), max_len=32, host_places=40)
    scheduler = Scheduler(small, watchers=(recorded,))
    attached_places = scheduler.cache.host.reserve(2 * len(windows))
    attach(scheduler.cache, "", (5,) * 8, 0, [attached_places[: len(windows)], attached_places[len(windows) :]])
    events: list[BlockEvent] = []
    present: set[bytes] = set()
    for id in range(12):
        scheduler.add(Sequence(id, ((5,) * 13, FIRST, SECOND)[id % 3], 2))
        while scheduler.sequences:
            step(scheduler)
            events += recorded.take()
    scheduler.plan()  # copies of the last plan with some have been carried out: what they brought is told now
    events += recorded.take()
    for event in events:
        if isinstance(event, BlockStored):
            assert event.hash not in present
            assert event.parent in present | {hashing.root("")}
            present.add(event.hash)
        else:
            present.remove(event.hash)
    assert scheduler.stats().copied_in > 7
    assert hashing.chain("", (5,) * 8, 4)[0] in {event.hash for event in events if isinstance(event, BlockRemoved)}
    assert present == {node.hash for node in scheduler.cache.trie.nodes() if scheduler.cache.trie.on_device(node)}
    epoch, following, held = recorded.snapshot(scheduler.cache.trie.nodes())
    assert (epoch, following) == (1, len(events))
    assert sorted(present) == sorted(held[at : at + hashing.SIZE] for at in range(0, len(held), hashing.SIZE))


def test_what_is_copied_in_is_told_once_it_is_there() -> None:
    recorded = BlockEvents(1)
    scheduler = Scheduler(limits(max_len=32, num_blocks=8, step_tokens=32, host_places=16), watchers=(recorded,))
    for id, prompt in enumerate((FIRST, SECOND)):
        reused(scheduler, id, prompt)
    recorded.take()
    scheduler.add(Sequence(3, FIRST, 1))
    plan = scheduler.plan()
    assert not any(isinstance(event, BlockStored) for event in recorded.take())
    scheduler.abort(3)
    scheduler.cache.flush()  # copies could not be carried out
    answer(scheduler, plan)
    scheduler.plan()
    assert recorded.take() == []


# -- the invariants can fail -------------------------------------------------------------------------------------


def lose_a_place(s: Scheduler) -> None:
    s.cache.host._free.pop()


def own_a_place_twice(s: Scheduler) -> None:
    first, second, *_ = s.cache.host.only()
    assert isinstance(first, PrefixNode)
    assert isinstance(second, PrefixNode)
    first.places[0] = second.places[0]


def queue_what_the_device_has(s: Scheduler) -> None:
    s.cache.host._spare.popitem()


def forget_a_parent_first(s: Scheduler) -> None:
    queue = s.cache.host._only
    queue.move_to_end(next(reversed(queue)), last=False)


def leave_a_hole_on_the_device(s: Scheduler) -> None:
    leaf = next(iter(s.cache.host.only()))
    assert isinstance(leaf, PrefixNode)
    key = (1,) * s.cache.block_size
    leaf.children[key] = child = PrefixNode(leaf, key, s.cache.trie.evict(lambda node, blocks: True), [])
    child.holders = 0
    s.cache.trie._rest(child)


def hold_what_is_on_the_host_alone(s: Scheduler) -> None:
    entry = next(reversed(s.cache.host.only()))
    assert isinstance(entry, PrefixNode)
    entry.holders = 1


@pytest.mark.parametrize(
    ("damage", "seen"),
    [
        (lose_a_place, "places of 16 blocks are lost"),
        (own_a_place_twice, "have two owners"),
        (queue_what_the_device_has, "not what its queue has"),
        (forget_a_parent_first, "would go before its child"),
        (leave_a_hole_on_the_device, "below one that is not"),
        (hold_what_is_on_the_host_alone, "held and on the host alone"),
    ],
)
def test_damage_to_the_host_is_seen(damage: Callable[[Scheduler], None], seen: str) -> None:
    scheduler = small()
    for id, prompt in enumerate((FIRST, SECOND, FIRST[:17])):
        reused(scheduler, id, prompt)
    scheduler.add(Sequence(9, (98,) * 4, 9))
    step(scheduler)
    damage(scheduler)
    with pytest.raises(AssertionError, match=seen):
        check(scheduler)


def test_reserved_places_come_in_order() -> None:
    host = small().cache.host
    host.give_back(reversed(host.reserve(5)))
    assert host.reserve(4) == sorted(host.reserved)


def test_a_pool_tells_which_blocks_it_hands_out_next() -> None:
    pool = BlockPool(5)
    pool.take()
    pool.give(0)
    for count in (0, 2, 9):
        assert pool.upcoming(count) == list(range(5))[:count]
    upcoming = pool.upcoming(5)
    assert upcoming == [pool.take() for _ in range(5)]
    assert pool.upcoming(3) == []

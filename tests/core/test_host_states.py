"""Tests the host tier of recurrent states: a prefix comes back with the state at its end."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core import Scheduler, Sequence, SequenceParams
from penstock.core.check import check
from penstock.core.incoming import attach
from penstock.core.prefix import PrefixNode
from penstock.core.states import SavedStates
from penstock.core.step_cost import PromptCost
from penstock.core.tiers import CopyCosts
from penstock.types import Finished, StepPlan
from tests.core.world import limits, run, step

FIRST, SECOND, THIRD = tuple(range(30)), tuple(range(40, 70)), tuple(range(65, 95))


def small(costs: CopyCosts | None = None, **changed: Any) -> Scheduler:
    """Returns a scheduler with room for one sequence of 32 tokens on the device, and for one state."""
    sizes = {"max_len": 32, "num_blocks": 8, "step_tokens": 32, "states": 1, "host_places": 40, "host_states": 4}
    return Scheduler(limits(**sizes | changed), copy_costs=costs)


def states_of(scheduler: Scheduler) -> SavedStates:
    assert isinstance(scheduler.cache.states, SavedStates)
    return scheduler.cache.states


def reused(scheduler: Scheduler, id: int, prompt: tuple[int, ...]) -> dict[str, int]:
    """Returns how many tokens of a prompt came from where."""
    (end,) = (event for event in run(scheduler, Sequence(id, prompt, 1)) if isinstance(event, Finished))
    assert end.report is not None
    return dict(end.report.reused)


def started(scheduler: Scheduler, id: int, prompt: tuple[int, ...]) -> StepPlan:
    scheduler.add(Sequence(id, prompt, 1))
    return step(scheduler)[0]


def nodes_of(scheduler: Scheduler, prompt: tuple[int, ...]) -> list[PrefixNode]:
    return scheduler.cache.prefixes.match(Sequence(99, prompt, 1))


def test_a_state_whose_place_is_needed_is_copied_out_and_in_again() -> None:
    scheduler = small()
    reused(scheduler, 1, FIRST)
    plan = started(scheduler, 2, SECOND)
    assert [tuple(copy) for copy in plan.state_copies] == [(0, 0, "out")]
    plan = started(scheduler, 3, FIRST)
    assert [tuple(copy) for copy in plan.state_copies] == [(0, 1, "out"), (0, 0, "in")]
    assert [(row.start, row.begin) for row in plan.rows] == [(28, 0)]


def test_what_left_the_device_comes_back_from_ram() -> None:
    scheduler = small()
    for id, prompt in enumerate((FIRST, SECOND, THIRD)):
        assert reused(scheduler, id, prompt) == {}
    for id, prompt in enumerate((FIRST, SECOND, THIRD), 3):
        assert reused(scheduler, id, prompt) == {"ram": 28}


def test_a_state_that_leaves_a_second_time_is_on_the_host_already() -> None:
    scheduler = small()
    for id, prompt in enumerate((FIRST, SECOND, FIRST)):
        reused(scheduler, id, prompt)
    plan = started(scheduler, 9, SECOND)
    assert [copy.direction for copy in plan.state_copies] == ["in"]


def test_states_stay_where_they_are_when_their_blocks_leave() -> None:
    scheduler = small(states=8)
    for id, prompt in enumerate((FIRST, SECOND)):
        reused(scheduler, id, prompt)
    plan = started(scheduler, 3, FIRST)
    assert not plan.state_copies
    assert [copy.direction for copy in plan.copies].count("in") == 7


def test_without_host_memory_for_states_those_that_lose_their_place_are_gone() -> None:
    scheduler = small(host_states=0)
    for id, prompt in enumerate((FIRST, SECOND, FIRST)):
        assert reused(scheduler, id, prompt) == {}


def test_a_full_host_forgets_the_state_used_longest_ago() -> None:
    scheduler = small(host_states=1, host_places=100)
    for id, prompt in enumerate((FIRST, SECOND, THIRD)):
        reused(scheduler, id, prompt)
    assert reused(scheduler, 4, FIRST) == {}
    assert reused(scheduler, 5, FIRST) == {"device": 28}


def test_what_the_device_has_too_makes_room_first() -> None:
    scheduler = small(states=2, host_states=2, num_blocks=40, host_places=100)
    for id, prompt in enumerate((FIRST, SECOND, THIRD, FIRST)):
        reused(scheduler, id, prompt)
    states = states_of(scheduler)
    assert len(states.host.only()) == 1
    assert len(states.host.kept()) == 2
    reused(scheduler, 5, (7, *SECOND[1:]))
    assert len(states.host.only()) == 2


def test_a_block_that_no_state_comes_after_is_not_copied_out() -> None:
    scheduler = small()
    run(scheduler, Sequence(1, FIRST[:21], 10))  # seven full blocks; states after 20 positions and no more
    plan = started(scheduler, 2, SECOND)
    assert [copy.direction for copy in plan.copies] == ["out"] * 5


def test_a_state_that_is_computed_again_is_on_both_tiers() -> None:
    """Scores are not cached, so a prompt that wants them is computed though its state lies on the host."""
    scheduler = small(num_blocks=40)
    for id, prompt in enumerate((FIRST, SECOND)):
        reused(scheduler, id, prompt)
    run(scheduler, Sequence(3, FIRST, 1, SequenceParams(score=True)))
    states = states_of(scheduler)
    assert states.saved().keys() & states.host.kept().keys() == {nodes_of(scheduler, FIRST)[-1]}


def test_a_state_on_the_host_waits_until_a_place_on_the_device_is_free() -> None:
    scheduler = small(num_blocks=40)
    for id, prompt in enumerate((FIRST, SECOND)):
        reused(scheduler, id, prompt)
    for id, prompt in ((3, SECOND), (4, FIRST)):
        scheduler.add(Sequence(id, prompt, 1))
    plan, _ = step(scheduler)
    assert [(row.seq, row.start) for row in plan.rows] == [(3, 28), (4, 0)]


def test_a_flush_forgets_states_on_both_tiers() -> None:
    scheduler = small()
    for id, prompt in enumerate((FIRST, SECOND)):
        reused(scheduler, id, prompt)
    scheduler.cache.flush()
    check(scheduler)
    assert len(states_of(scheduler).host.free()) == 4
    assert len(states_of(scheduler).free()) == 1


@pytest.mark.parametrize(("seconds", "copied"), [(1e-6, 1), (10.0, 0)])
def test_states_are_copied_where_that_is_no_slower_than_computing(seconds: float, copied: int) -> None:
    prompts = PromptCost()
    for tokens in (100, 200, 300, 400) * 20:
        prompts.observe(tokens, tokens * tokens / 2, tokens * 1e-3)
    assert prompts.known
    costs = CopyCosts(prompts)
    for direction in ("in", "out"):
        costs.observe(direction, 1, 1e-6)
        costs.observe_states(direction, 1, seconds)
    scheduler = small(costs)
    reused(scheduler, 1, FIRST)
    assert len(started(scheduler, 2, SECOND).state_copies) == copied


def test_places_are_reserved_and_given_back() -> None:
    scheduler = small(host_states=1)
    reused(scheduler, 1, FIRST)
    host = states_of(scheduler).host
    assert host.reserve() == 0
    assert host.reserve() == -1
    check(scheduler)
    host.give_back([0])
    check(scheduler)
    assert host.free() == [0]


# -- places that others fill -------------------------------------------------------------------------------------


def attached(scheduler: Scheduler, prompt: tuple[int, ...], first: int, count: int, windows: int = 1) -> int:
    """Attaches blocks of a prompt and the state at their end; returns how many blocks were used."""
    cache = scheduler.cache
    places = [[place] * windows for place in cache.host.reserve(count)]
    used = attach(cache, "", prompt, first, places, state=cache.states.reserve())
    check(scheduler)
    return used


def test_blocks_that_were_attached_are_reused_with_the_state_at_their_end() -> None:
    scheduler = small()
    assert attached(scheduler, FIRST, 0, 5) == 5
    node = nodes_of(scheduler, FIRST)[-1]
    assert scheduler.cache.states.where(node) == (-1, 0)
    assert reused(scheduler, 1, FIRST) == {"disk": 20}
    assert scheduler.cache.states.where(node) == (0, 0)


def test_blocks_may_be_attached_without_a_state() -> None:
    scheduler = small()
    places = [[place] for place in scheduler.cache.host.reserve(5)]
    assert attach(scheduler.cache, "", FIRST, 0, places) == 5
    check(scheduler)
    assert reused(scheduler, 1, FIRST) == {}


def test_a_state_that_is_there_already_is_given_back() -> None:
    scheduler = small()
    reused(scheduler, 1, FIRST)
    assert attached(scheduler, FIRST, 0, 7) == 0
    assert len(states_of(scheduler).host.free()) == 4
    started(scheduler, 2, SECOND)
    assert attached(scheduler, FIRST, 0, 7) == 0
    assert len(states_of(scheduler).host.free()) == 3


def test_a_state_without_its_blocks_is_given_back() -> None:
    scheduler = small()
    assert attached(scheduler, FIRST, 3, 2) == 0  # its third block is not known
    assert attached(scheduler, FIRST, 0, 0) == 0
    assert len(states_of(scheduler).host.free()) == 4
    windowed = small(windows=(6,), num_blocks=16)
    state = windowed.cache.states.reserve()
    assert attach(windowed.cache, "", FIRST, 0, [[-1]], state=state) == 0  # it came without a block, and is pruned
    check(windowed)
    assert len(states_of(windowed).host.free()) == 4


def test_models_without_states_have_no_places_for_them() -> None:
    scheduler = small(states=0)
    states = scheduler.cache.states
    assert states.reserve() == -1
    assert attached(scheduler, FIRST, 0, 3) == 3
    node = nodes_of(scheduler, FIRST)[0]
    states.adopt(node, 0)
    assert states.where(node) == (-1, -1)

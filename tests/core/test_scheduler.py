"""Tests what the scheduler guarantees, one guarantee at a time."""

from __future__ import annotations

import pytest

from penstock.core import Scheduler, Sequence, SequenceParams, StandardPolicy
from penstock.core.check import check
from penstock.errors import ConfigError, ContextTooLong, InvalidRequest
from penstock.types import Aborted, Failed, Finished, Report, RowResult, StepResult, Tokens
from tests.core.world import answer, counts, limits, run, step


def prompt(length: int, first: int = 0) -> tuple[int, ...]:
    return (first, *range(1, length))


# -- refusals ----------------------------------------------------------------------------------------------------


def test_refuses_at_submit_what_can_never_fit() -> None:
    scheduler = Scheduler(limits(max_len=20))
    with pytest.raises(ContextTooLong, match="15 tokens and 6 more may follow, together 21; the context holds 20"):
        scheduler.add(Sequence(1, prompt(15), 6))
    scheduler.add(Sequence(1, prompt(15), 5))


@pytest.mark.parametrize("bad", [(), (-1,), (100,)])
def test_refuses_empty_prompts_and_foreign_tokens(bad: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest):
        Scheduler(limits()).add(Sequence(1, bad, 1))


def test_refuses_an_id_in_use() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(Sequence(1, prompt(3), 1))
    with pytest.raises(InvalidRequest, match="already in use"):
        scheduler.add(Sequence(1, prompt(3), 1))


def test_refuses_limits_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="cannot serve 8 rows"):
        Scheduler(limits(max_rows=8, step_tokens=7))
    with pytest.raises(ConfigError, match="cannot hold one sequence"):
        Scheduler(limits(max_len=65))
    with pytest.raises(ConfigError, match="a step of 16 tokens cannot hold one sequence of 17"):
        Scheduler(limits(max_len=17, encoder=True))


# -- steps -------------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_and_samples_once_at_its_end() -> None:
    scheduler = Scheduler(limits(step_tokens=16))
    scheduler.add(Sequence(1, prompt(40), 2))
    rows = [step(scheduler)[0].rows[0] for _ in range(4)]
    assert [(row.start, row.count, row.sample) for row in rows] == [(0, 16, 0), (16, 16, 0), (32, 8, 1), (40, 1, 1)]


def test_a_long_prompt_leaves_room_for_every_running_stream() -> None:
    scheduler = Scheduler(limits(num_blocks=64))
    scheduler.add(Sequence(1, prompt(60), 1))
    scheduler.add(Sequence(2, prompt(3, first=9), 20, SequenceParams(priority=-1)))
    scheduler.add(Sequence(3, prompt(3, first=8), 20, SequenceParams(priority=1)))
    assert counts(step(scheduler)[0]) == {2: 3, 1: 13}
    scheduler.abort(1)
    step(scheduler)
    scheduler.add(Sequence(4, prompt(60), 1))
    for _ in range(3):
        assert counts(step(scheduler)[0]) == {2: 1, 4: 14, 3: 1}


def test_lower_priority_numbers_go_first_and_equals_in_order_of_arrival() -> None:
    scheduler = Scheduler(limits(max_rows=1))
    run_order = [
        event.seq
        for event in run(
            scheduler,
            Sequence(1, prompt(3), 1, SequenceParams(priority=5)),
            Sequence(2, prompt(3), 1),
            Sequence(3, prompt(3), 1, SequenceParams(priority=5)),
            Sequence(4, prompt(3), 1),
        )
        if isinstance(event, Finished)
    ]
    assert run_order == [2, 4, 1, 3]


def test_ends_with_stop_token_or_length() -> None:
    scheduler = Scheduler(limits())
    stopping = Sequence(1, prompt(3), 9, SequenceParams(stop_ids=frozenset({50})))
    events = run(scheduler, stopping, Sequence(2, prompt(3), 2), Sequence(3, prompt(3), 0))
    ends = {event.seq: event._replace(report=None) for event in events if isinstance(event, Finished)}
    assert ends == {1: Finished(1, "stop", 50), 2: Finished(2, "length"), 3: Finished(3, "length")}
    answers = {seq: [t for e in events if isinstance(e, Tokens) and e.seq == seq for t in e.tokens] for seq in ends}
    assert answers == {1: [50], 2: [50, 50], 3: []}


def test_a_second_step_is_planned_while_the_first_is_in_flight() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(Sequence(1, prompt(3), 9, SequenceParams(stop_ids=frozenset({7}))))
    first, second = scheduler.plan(), scheduler.plan()
    assert second.rows[0].start == 3  # the token sampled by `first`, not known here yet
    answer(scheduler, first, token=7)
    assert answer(scheduler, second) == []  # it ended meanwhile
    assert not scheduler.sequences


def test_lockstep_sequences_wait_for_their_last_token() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(Sequence(1, prompt(3), 9, SequenceParams(lockstep=True)))
    first = scheduler.plan()
    assert not scheduler.plan().rows
    answer(scheduler, first)
    assert scheduler.plan().rows


# -- leaving -----------------------------------------------------------------------------------------------------


def test_abort_works_at_any_moment_and_only_once() -> None:
    scheduler = Scheduler(limits(max_rows=1))
    for id in (1, 2):
        scheduler.add(Sequence(id, prompt(10), 9))
    plan = scheduler.plan()
    assert scheduler.abort(1) == [Aborted(1, Report())]  # in flight
    assert scheduler.abort(2) == [Aborted(2, Report())]  # waiting
    assert scheduler.abort(2) == scheduler.abort(3) == []
    assert answer(scheduler, plan) == []
    assert scheduler.stats().blocks_free == 16


def test_a_failed_step_ends_its_own_rows_and_nobody_else() -> None:
    scheduler = Scheduler(limits(max_rows=2))
    for id in (1, 2, 3):
        scheduler.add(Sequence(id, prompt(4, first=id), 9))
    plan = scheduler.plan()
    scheduler.abort(2)
    assert scheduler.fail(plan, "oops", "it broke") == [Failed(1, "oops", "it broke")]
    assert run(scheduler)[-1][:2] == (3, "length")


# -- prefix cache ------------------------------------------------------------------------------------------------


def test_a_plan_taken_back_is_made_again() -> None:
    """This holds while the step before it is in flight, whose tokens are not known yet, too."""
    undisturbed, scheduler = Scheduler(limits()), Scheduler(limits())
    for each in (undisturbed, scheduler):
        each.add(Sequence(1, prompt(6), 3))
        each.add(Sequence(2, prompt(40, first=7), 3))
    expected = run(undisturbed)
    first = scheduler.plan()
    scheduler.requeue(scheduler.plan())
    events = answer(scheduler, first)
    scheduler.requeue(scheduler.plan())
    check(scheduler)
    events += run(scheduler)
    assert answers_of(events) == answers_of(expected)


def answers_of(events: list[object]) -> dict[int, list[int]]:
    answers: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, Tokens):
            answers.setdefault(event.seq, []).extend(event.tokens)
    return answers


def cached(events: list[object]) -> dict[int, int]:
    return {event.seq: event.cached for event in events if isinstance(event, Tokens)}


def test_reuses_full_blocks_of_prompt_and_answer_but_never_the_last_token() -> None:
    scheduler = Scheduler(limits())
    run(scheduler, Sequence(1, prompt(8), 9))
    assert cached(run(scheduler, Sequence(2, prompt(8), 1))) == {2: 4}
    assert cached(run(scheduler, Sequence(3, (*prompt(8), *[50] * 8), 1))) == {3: 12}
    assert cached(run(scheduler, Sequence(4, (*prompt(7), 99, 1), 1))) == {4: 4}
    assert scheduler.stats().cached_tokens == 20


def test_salts_do_not_share() -> None:
    scheduler = Scheduler(limits())
    run(scheduler, Sequence(1, prompt(12), 1, salt="a"))
    assert cached(run(scheduler, Sequence(2, prompt(12), 1, salt="b"))) == {2: 0}
    assert cached(run(scheduler, Sequence(3, prompt(12), 1, salt="a"))) == {3: 8}


def test_evicts_the_least_recently_used_leaf_first() -> None:
    scheduler = Scheduler(limits(num_blocks=16))
    run(scheduler, Sequence(1, prompt(17), 1))  # five blocks, four of them full
    run(scheduler, Sequence(2, prompt(17, first=9), 1))
    run(scheduler, Sequence(3, prompt(6), 1))  # uses the first block of 1 again
    run(scheduler, Sequence(4, prompt(45, first=8), 1))  # twelve blocks: four must be evicted
    known = [len(scheduler.cache.prefixes.match(Sequence(5, prompt(17, first=first), 1))) for first in (0, 9, 8)]
    assert known == [1, 3, 4]


def test_a_sequence_without_prefix_cache_computes_all_of_its_prompt_and_shares_none_of_it() -> None:
    scheduler = Scheduler(limits())
    run(scheduler, Sequence(1, prompt(12), 1))
    scheduler.add(Sequence(2, prompt(12), 0, prefix_cache=False))
    assert counts(step(scheduler)[0]) == {2: 12}
    run(scheduler, Sequence(3, prompt(12, first=7), 0, prefix_cache=False))
    assert cached(run(scheduler, Sequence(4, prompt(12, first=7), 1))) == {4: 0}


def test_nobody_waits_for_the_blocks_of_a_sequence_without_prefix_cache() -> None:
    scheduler = Scheduler(limits(step_tokens=32))
    scheduler.add(Sequence(1, prompt(12), 0, prefix_cache=False))
    scheduler.add(Sequence(2, prompt(12), 1))
    assert counts(scheduler.plan()) == {1: 12, 2: 12}


def test_a_sequence_without_prefix_cache_that_was_preempted_starts_anew() -> None:
    scheduler = Scheduler(limits(step_tokens=4))
    scheduler.add(Sequence(1, prompt(12), 0, prefix_cache=False))
    step(scheduler)
    plan = scheduler.plan()
    assert plan.rows[0].start == 4
    scheduler.requeue(plan)
    assert scheduler.plan().rows[0].start == 0


def test_a_state_pooled_before_a_preemption_is_as_good_as_any() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(Sequence(1, prompt(12), 0, prefix_cache=False))
    plan = scheduler.plan()
    scheduler.requeue(plan)
    ended = scheduler.commit(plan, StepResult(plan.step, (RowResult(pooled=b"state"),)))
    assert [event._replace(report=None) for event in ended] == [Finished(1, "pooled", None, b"state")]
    assert not scheduler.plan().rows


def test_simultaneous_twins_compute_their_prefix_once() -> None:
    scheduler = Scheduler(limits(step_tokens=8, max_rows=4, num_blocks=64))
    for id in range(4):
        scheduler.add(Sequence(id, (*prompt(32), id), 1))
    computed = 0
    while scheduler.sequences:
        plan, _ = step(scheduler)
        computed += sum(counts(plan).values())
    assert computed == 32 + 4
    assert scheduler.stats().cached_tokens == 3 * 32


def test_the_one_computing_a_prefix_may_leave_and_another_takes_over() -> None:
    scheduler = Scheduler(limits(step_tokens=8, num_blocks=64))
    for id in range(3):
        scheduler.add(Sequence(id, (*prompt(32), id), 1))
    step(scheduler)
    scheduler.abort(0)
    assert {event.seq for event in run(scheduler) if isinstance(event, Finished)} == {1, 2}


# -- prompts beside answers --------------------------------------------------------------------------------------


def test_prompts_take_smaller_steps_once_a_row_answers() -> None:
    scheduler = Scheduler(limits(step_tokens=16, num_blocks=64)._replace(prefill_budget=5))
    for id in range(2):
        scheduler.add(Sequence(id, prompt(20, first=id), 3))
    taken = [counts(step(scheduler)[0]) for _ in range(6)]
    assert taken == [{0: 16}, {0: 4, 1: 12}, {0: 1, 1: 4}, {0: 1, 1: 4}, {1: 1}, {1: 1}]


@pytest.mark.parametrize(
    ("running", "answering", "tokens"), [(9, 0, 1000), (1, 1, 100), (64, 64, 100), (65, 65, 250), (150, 1, 150)]
)
def test_a_step_grows_with_the_rows_that_answer(running: int, answering: int, tokens: int) -> None:
    some = limits(step_tokens=1000)._replace(prefill_budget=100)
    rows = [Sequence(id, prompt(3), 9) for id in range(running)]
    for seq in rows[:answering]:
        seq.end += 1
    assert StandardPolicy(some).budget(rows, []).tokens == tokens
    assert StandardPolicy(some._replace(prefill_budget=0)).budget(rows, []).tokens == 1000


# -- preemption --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("overcommitted")
def test_preempts_the_last_in_line_and_finishes_everybody() -> None:
    scheduler = Scheduler(limits(num_blocks=8, max_len=32))
    events = run(scheduler, *(Sequence(id, prompt(5, first=id), 20) for id in range(4)))
    stats = scheduler.stats()
    assert stats.preemptions > 0
    assert next(event.seq for event in events if isinstance(event, Finished)) == 0
    answered = [t for event in events if isinstance(event, Tokens) for t in event.tokens]
    assert len(answered) == 4 * 20


@pytest.mark.usefixtures("overcommitted")
def test_a_preempted_prompt_is_scored_once() -> None:
    scheduler = Scheduler(limits(num_blocks=9, max_len=32, step_tokens=2, max_rows=2))
    scheduler.add(Sequence(1, prompt(4), 25))
    for _ in range(2):
        step(scheduler)
    scheduler.add(Sequence(2, prompt(19, first=9), 1, SequenceParams(score=True)))
    scores = []
    preempted_midway = False
    while scheduler.sequences:
        _, events = step(scheduler)
        scores += [s.token for event in events if isinstance(event, Tokens) and event.seq == 2 for s in event.scores]
        two = scheduler.sequences.get(2)
        preempted_midway |= two is not None and not two.blocks.tables and 1 < two.scored < 19
    assert preempted_midway
    assert scores == list(range(1, 19))


@pytest.mark.usefixtures("overcommitted")
def test_a_preempted_sequence_comes_back_only_when_all_its_tokens_are_known() -> None:
    scheduler = Scheduler(limits(num_blocks=5, max_len=16))
    scheduler.add(Sequence(1, prompt(3), 10))
    scheduler.add(Sequence(2, prompt(7, first=9), 9))
    while scheduler.sequences[1].planned < 6:
        step(scheduler)
    in_flight = [scheduler.plan(), scheduler.plan()]
    scheduler.plan()
    assert scheduler.stats().preemptions == 1
    scheduler.abort(1)
    for plan in in_flight:
        assert not scheduler.plan().rows
        answer(scheduler, plan)
    (row,) = scheduler.plan().rows
    assert (row.start + row.count, row.sample) == (len(scheduler.sequences[2].tokens), 1)


def test_block_tables_follow_from_plans_alone() -> None:
    scheduler = Scheduler(limits(num_blocks=8, max_len=32))
    for id in range(4):
        scheduler.add(Sequence(id, prompt(5), 20))
    tables: dict[int, dict[int, int]] = {}
    while scheduler.sequences:
        plan = scheduler.plan()
        for id in plan.dropped:
            del tables[id]
        for grown in plan.grown:
            tables.setdefault(grown.seq, {}).update(enumerate(grown.blocks, grown.at))
        for row in plan.rows:
            assert list(tables[row.seq].values()) == scheduler.sequences[row.seq].blocks.tables[0]
        answer(scheduler, plan)


# -- encoders ----------------------------------------------------------------------------------------------------


def test_an_encoder_has_whole_prompts_in_a_step_and_keeps_their_order() -> None:
    scheduler = Scheduler(limits(max_len=16, encoder=True))
    for id, length in enumerate((9, 6, 5, 16, 1), 1):
        scheduler.add(Sequence(id, prompt(length), 0, prefix_cache=False))
    steps = [counts(step(scheduler)[0]) for _ in range(4)]
    assert steps == [{1: 9, 2: 6}, {3: 5}, {4: 16}, {5: 1}]
    assert not scheduler.sequences
    assert scheduler.stats().blocks_free == 16


def test_an_encoder_plans_the_next_step_while_one_is_in_flight() -> None:
    scheduler = Scheduler(limits(max_len=16, encoder=True))
    for id in range(1, 4):
        scheduler.add(Sequence(id, prompt(10), 0, prefix_cache=False))
    first, second = scheduler.plan(), scheduler.plan()
    assert (counts(first), counts(second)) == ({1: 10}, {2: 10})
    assert [event.seq for plan in (first, second) for event in answer(scheduler, plan)] == [1, 2]
    assert counts(step(scheduler)[0]) == {3: 10}


def test_an_encoder_computes_again_in_one_piece_what_found_no_memory() -> None:
    scheduler = Scheduler(limits(max_len=16, encoder=True))
    scheduler.add(Sequence(1, prompt(12), 0, prefix_cache=False))
    scheduler.requeue(scheduler.plan())
    check(scheduler)
    assert counts(step(scheduler)[0]) == {1: 12}


def test_an_encoder_refuses_what_is_longer_than_its_context() -> None:
    with pytest.raises(ContextTooLong, match=r"has 17 tokens .* the context holds 16"):
        Scheduler(limits(max_len=16, encoder=True)).add(Sequence(1, prompt(17), 0))

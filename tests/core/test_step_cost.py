"""Tests the cost of steps: it is learned from what was measured, and the tightest target decides how much of a prompt a
step computes."""

from __future__ import annotations

from random import Random

import pytest

from penstock.core import Scheduler, Sequence, SequenceParams, StandardPolicy
from penstock.core.drafting.lengths import StepCost
from penstock.core.policy import CAUTIOUS, LEAST, StepBudget
from penstock.core.step_cost import CostModel, PromptCost
from penstock.types import Claim, Row
from tests.core.world import counts, limits, step

TOKEN, PAIR, ROW = 2e-4, 1e-7, 1e-3  # seconds of a machine


def taken(rows: tuple[Row, ...]) -> float:
    """Returns the seconds of a step on the machine of these tests."""
    return 4e-3 + sum(
        ROW if row.count == 1 else TOKEN * row.count + PAIR * row.count * (row.start + row.count / 2) for row in rows
    )


def learned(noise: float = 0.0) -> CostModel:
    costs, random = CostModel(StepCost(slope=ROW / 4e-3)), Random(1)
    for _ in range(60):
        answers = tuple(Row(id, 100, 1, 1) for id in range(random.randint(1, 8)))
        prompt = Row(9, random.randrange(4000), random.randint(16, 512), 0)
        for rows in (answers, (*answers, prompt)):
            costs.observe(rows, taken(rows) * random.uniform(1 - noise, 1 + noise))
    return costs


def test_nothing_is_known_before_prompts_were_measured() -> None:
    costs = CostModel(learns_answers=False)
    assert costs.answer_seconds(3, 3) == 0.0
    for _ in range(PromptCost.FEW):
        assert not costs.known
        costs.observe((Row(1, 0, 8, 0),), 0.02)
    assert costs.known
    assert costs.answer_seconds(3, 3) == 0.0
    costs.observe((Row(1, 0, 1, 1),), 0.01)
    assert costs.answer_seconds(3, 3) > 0.0


def test_a_target_is_kept_though_no_step_only_answers() -> None:
    """Prompts wait from the first step on, so the cost of answers is never measured by itself."""
    some = limits(max_len=2400, step_tokens=512, block_size=50, num_blocks=600, max_rows=8)._replace(prefill_budget=64)
    costs = CostModel(StepCost(slope=ROW / 4e-3))
    scheduler = Scheduler(some, policy=StandardPolicy(some, costs))
    for id in range(8):
        scheduler.add(Sequence(id, (id,) * 2000, 400, SequenceParams(claim=Claim(itl=0.05))))
    seconds = []
    while any(seq.computed < seq.prompt_len for seq in scheduler.sequences.values()):
        plan, _ = step(scheduler)
        costs.observe(plan.rows, taken(plan.rows))
        if any(row.count == 1 for row in plan.rows):
            seconds.append(taken(plan.rows))
    assert max(seconds[8:]) <= 1.05 * 0.05
    assert sum(seconds) / len(seconds) > 0.6 * 0.05


def test_a_step_tells_what_answers_cost_before_a_long_prompt_takes_more_than_the_budget() -> None:
    some = limits(max_len=9000, step_tokens=2048, num_blocks=3000)._replace(prefill_budget=16)
    costs = CostModel()
    scheduler = Scheduler(some, policy=StandardPolicy(some, costs))
    scheduler.add(Sequence(1, (1,), 900))
    step(scheduler)
    scheduler.add(Sequence(2, (2,) * 8000, 1))
    assert counts(step(scheduler)[0]) == {1: 1, 2: 15}
    for size in (100, 200, 300, 400):
        costs.observe((Row(9, 0, size, 0),), 1e-6 * size)
    plan, _ = step(scheduler)
    assert counts(plan) == {1: 1, 2: 1}
    costs.observe(plan.rows, 1e-3)
    assert sum(counts(step(scheduler)[0]).values()) == 512


def test_a_long_prompt_takes_few_steps_beside_answers_without_a_target() -> None:
    some = limits(max_len=9000, step_tokens=2048, num_blocks=9000)._replace(prefill_budget=16)
    for length, seconds, most in ((200, TOKEN, 16), (8000, 1e-6, 512), (8000, TOKEN, None), (8000, 1.0, 1 + LEAST)):
        costs = CostModel()
        for size in (100, 200, 300, 400):
            costs.observe((Row(9, 0, size, 0),), seconds * size)
        costs.observe((Row(9, 0, 1, 1),), 1e-3)
        scheduler = Scheduler(some, policy=StandardPolicy(some, costs))
        scheduler.add(Sequence(1, (1,), 900))
        step(scheduler)
        scheduler.add(Sequence(2, (2,) * length, 1))
        for _ in range(3):
            computed = sum(counts(step(scheduler)[0]).values())
            if most is None:  # as much as the time of a step allows
                assert 250 < computed <= CostModel.USUAL_ITL / TOKEN
            else:
                assert computed == most


def test_what_prompts_cost_is_found_from_steps_with_answers_and_noise() -> None:
    prompts = learned(noise=0.05).prompts
    for context in (0, 1000, 4000):
        real = TOKEN * 100 + PAIR * 100 * (context + 50)
        assert prompts.seconds(100, 100 * (context + 50)) == pytest.approx(real, rel=0.1)
        assert prompts.tokens_within(real, context) == pytest.approx(100, rel=0.15)
    assert prompts.tokens_within(0.0, 0) == 0


def test_a_prompt_alone_takes_no_less_than_an_answer() -> None:
    costs = learned()
    assert costs.prompt_seconds(300) == pytest.approx(TOKEN * 300 + PAIR * 300 * 150, rel=0.1)
    assert costs.prompt_seconds(2) == costs.answer_seconds(1, 1) == pytest.approx(4e-3 + ROW, rel=0.1)


def test_prompts_of_one_length_and_a_step_that_was_held_up() -> None:
    prompts = PromptCost()
    assert prompts.tokens_within(1.0, 0) == 0
    for _ in range(9):
        prompts.observe(100, 5000.0, 0.02)
    assert prompts.seconds(100, 5000.0) == pytest.approx(0.02, rel=0.05)
    prompts.observe(100, 5000.0, 9.0)
    assert prompts.seconds(100, 5000.0) < 0.04
    free = PromptCost()
    for _ in range(9):
        free.observe(100, 0.0, 0.02)
    assert free.tokens_within(0.04, 1000) == 200
    quick = PromptCost()
    for size in (10, 100, 1000):
        quick.observe(size, size * size / 2, 1e-9 * size * size)
    assert quick.seconds(100, 5000.0) >= 0.0


@pytest.mark.parametrize("target", [0.02, 0.05])
def test_a_long_prompt_keeps_the_time_between_tokens_within_the_target(target: float) -> None:
    some = limits(max_len=5000, step_tokens=2048, num_blocks=2000, max_rows=8)._replace(prefill_budget=512)
    scheduler = Scheduler(some, policy=StandardPolicy(some, learned()))
    for id in range(4):
        scheduler.add(Sequence(id, (id, 1, 2), 4000, SequenceParams(claim=Claim(itl=target))))
    step(scheduler)
    scheduler.add(Sequence(9, (9,) * 4000, 1))
    seconds = [taken(step(scheduler)[0].rows)]
    while 9 in scheduler.sequences:
        seconds.append(taken(step(scheduler)[0].rows))
    assert max(seconds) <= target
    assert sum(seconds) / len(seconds) > 0.75 * target  # and no more steps than it takes


def test_a_target_never_stops_prompts_and_a_step_without_answers_takes_all_it_can() -> None:
    some = limits(max_len=5000, step_tokens=2048, num_blocks=2000)._replace(prefill_budget=64)
    scheduler = Scheduler(some, policy=StandardPolicy(some, learned()))
    scheduler.add(Sequence(1, (1,) * 3000, 2, SequenceParams(claim=Claim(itl=0.001))))
    assert counts(step(scheduler)[0]) == {1: 2048}
    step(scheduler)
    scheduler.add(Sequence(2, (2,) * 3000, 1))
    assert 1 <= counts(step(scheduler)[0])[2] < 64


def slow(prompts: float, answers: float = 1.0) -> CostModel:
    """Returns what is known of a machine where both take so many times as long as on that of these tests."""
    costs = CostModel()
    for size in (100, 200, 300, 400):
        costs.observe((Row(9, 0, size, 0),), prompts * TOKEN * size)
    for _ in range(9):
        costs.observe((Row(9, 0, 1, 1),), answers * 5e-3)
    return costs


def most_beside(costs: CostModel, *others: Sequence, budget: int = 192) -> int:
    """Returns the most tokens of a prompt of 400 that a step computes beside other answers within a prefill budget."""
    some = limits(max_len=500, step_tokens=512, num_blocks=500)._replace(prefill_budget=budget)
    scheduler = Scheduler(some, policy=StandardPolicy(some, costs))
    for seq in others:
        scheduler.add(seq)
    step(scheduler)
    scheduler.add(Sequence(9, (9,) * 400, 1))
    computed = []
    while 9 in scheduler.sequences:
        computed.append(counts(step(scheduler)[0])[9])
    return max(computed)


def test_answers_that_state_no_target_have_the_usual_one() -> None:
    assert most_beside(slow(1.0), Sequence(1, (1,), 400)) == 191  # in 43 ms
    for factor in (3.0, 10.0):  # where that would take 120 and 390 ms
        most = most_beside(slow(factor), Sequence(1, (1,), 400))
        assert 0.6 * CostModel.USUAL_ITL < factor * TOKEN * most + 5e-3 <= CostModel.USUAL_ITL
    assert (
        most_beside(slow(10.0), Sequence(1, (1,), 400, SequenceParams(background=True))) == 191
    )  # nobody waits for it
    assert most_beside(slow(10.0), Sequence(1, (1,), 400), budget=512) == 400  # nobody is to be spared


def test_on_a_slow_machine_prompts_have_most_of_the_usual_target() -> None:
    most, alone = most_beside(slow(300.0, 100.0), Sequence(1, (1,), 400)), 0.5
    assert 0.7 * CostModel.USUAL_STEPS * alone < 300 * TOKEN * most + alone <= CostModel.USUAL_STEPS * alone


def test_the_tightest_of_a_stated_and_the_usual_target_counts() -> None:
    usual = most_beside(slow(10.0), Sequence(1, (1,), 400))
    loose, tight = (Sequence(1, (1,), 400, SequenceParams(claim=Claim(itl=itl))) for itl in (9.0, 0.05))
    assert 0.9 * usual < most_beside(slow(10.0), loose, Sequence(2, (2,), 400)) <= usual
    assert most_beside(slow(10.0), Sequence(1, (1,), 400, SequenceParams(claim=Claim(itl=9.0)))) == 400
    assert most_beside(slow(10.0), tight, Sequence(2, (2,), 400)) < 0.6 * usual


def test_a_cost_that_was_learned_wrong_is_learned_again() -> None:
    some = limits(max_len=9000, step_tokens=512, num_blocks=4000)._replace(prefill_budget=192)
    costs = slow(1000.0)
    scheduler = Scheduler(some, policy=StandardPolicy(some, costs))
    scheduler.add(Sequence(1, (1,), 900))
    step(scheduler)
    scheduler.add(Sequence(2, (2,) * 8000, 1))
    computed = []
    while 2 in scheduler.sequences:
        plan, _ = step(scheduler)
        costs.observe(plan.rows, taken(plan.rows))
        computed.append(counts(plan)[2])
    assert computed[0] == LEAST
    assert max(computed) > 100


def test_without_a_target_the_constant_holds_and_without_a_known_cost_less() -> None:
    some = limits(max_len=500, step_tokens=200, num_blocks=200)._replace(prefill_budget=64)
    for costs, target, tokens in ((learned(), None, 63), (CostModel(), 0.05, CAUTIOUS), (None, 0.05, 63)):
        scheduler = Scheduler(some, policy=StandardPolicy(some, costs))
        scheduler.add(Sequence(1, (1,), 9, SequenceParams(claim=Claim(itl=target))))
        step(scheduler)
        scheduler.add(Sequence(2, (2,) * 300, 1))
        assert counts(step(scheduler)[0]) == {1: 1, 2: tokens}


def test_time_that_is_used_up_leaves_nothing() -> None:
    prompts = learned().prompts
    budget = StepBudget(2048, 0.02, prompts)
    assert budget.prompt_share(10, 0) == 10
    count = budget.prompt_share(2000, 0)
    assert 80 < count < 110
    budget.spend_on_prompt(Row(1, 0, count, 0))
    assert budget.tokens <= 0


def test_steps_are_planned_shorter_while_the_machine_is_busy_with_something_else() -> None:
    """A step that answers two rows and computes a prompt takes as long as forecast, then longer, then again as long as
    forecast."""
    costs, rows = learned(), (Row(1, 100, 1, 1), Row(2, 100, 1, 1), Row(9, 0, 64, 0))
    quiet = taken(rows)
    for _ in range(200):
        costs.observe(rows, quiet)
    assert costs.lateness == CostModel.LATENESS[0]
    costs.observe(rows, 1.5 * quiet)
    busy = costs.lateness
    assert 1.35 < busy < 1.5, "the next step may take as long"
    for _ in range(99):
        costs.observe(rows, 9e9)
    assert costs.lateness == CostModel.LATENESS[1]
    for _ in range(999):
        costs.observe(rows, quiet)
    assert costs.lateness < busy

"""Parameters in, tokens out: each knob does what it says and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.backend.base import Batch, Floats, LogitEdit
from penstock.backend.sample import apply_edit, choose, sample
from penstock.engine.samplers.sampler import Sampler, Wanted, sample_rows, wanted_positions
from penstock.errors import InvalidRequest
from penstock.types import Request, Row, RowResult, SamplingParams

VOCAB = 50
PROMPT = (1, 2, 3)


def sampler(stop_ids: frozenset[int] = frozenset(), **params: Any) -> Sampler:
    return Sampler(Request(0, PROMPT, SamplingParams(**params), 100, stop_ids))


def logits(seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 2


def draw(row: Floats, draws: int, **params: Any) -> np.ndarray[Any, Any]:
    """Tokens chosen from one row of logits at `draws` different positions."""
    who = sampler(seed=7, **params)
    tokens = list(PROMPT)
    wanted = [Wanted(who, tokens, at) for at in range(2, 2 + draws)]
    return choose(np.tile(row, (draws, 1)), sample_rows(wanted))


def edited(row: Floats, tokens: list[int], **params: Any) -> Floats:
    return after(row, sampler(**params).edit(tokens, len(tokens) - 1))


def after(row: Floats, edit: LogitEdit | None) -> Floats:
    assert edit is not None
    return apply_edit(row, edit)


def test_temperature_zero_takes_the_most_likely() -> None:
    assert set(draw(logits(), 20, temperature=0)) == {int(logits().argmax())}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    row = logits()
    expected = np.exp(row / temperature) / np.exp(row / temperature).sum()
    counts = np.bincount(draw(row, 20_000, temperature=temperature), minlength=VOCAB)
    likely = expected > 0.002
    chi_square = ((counts - 20_000 * expected)[likely] ** 2 / (20_000 * expected[likely])).sum()
    assert chi_square < 2.0 * likely.sum()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 3}, 3),
        ({"top_k": 1}, 1),
        ({"top_p": 0.0}, 1),
        ({"min_p": 1.0}, 1),
    ],
)
def test_cuts_keep_only_the_most_likely(params: dict[str, Any], kept: int) -> None:
    best = set(np.argsort(-logits())[:kept])
    assert set(draw(logits(), 2_000, **params)) == best


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert set(draw(row, 500, top_p=0.69)) == {0, 1}
    assert set(draw(row, 500, top_p=0.71)) == {0, 1, 2}
    assert set(draw(row, 500, top_p=0.5, top_k=3)) == {0, 1}  # 0.4 of the 0.9 that top_k left is less than half


def test_min_p_is_relative_to_the_most_likely() -> None:
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert set(draw(row, 500, min_p=0.45)) == {0, 1, 2}


def test_a_seed_decides_alone() -> None:
    rows = np.stack([logits(i) for i in range(4)])
    one, other = sampler(seed=1), sampler(seed=2)
    alone = [int(choose(rows[i : i + 1], sample_rows([Wanted(one, [0] * 9, 8)]))[0]) for i in range(4)]
    together = choose(rows, sample_rows([Wanted(one, [0] * 9, 8)] * 4))
    assert alone == list(together)
    many = np.tile(logits(), (200, 1))
    streams = [choose(many, sample_rows([Wanted(who, [0], at) for at in range(200)])) for who in (one, one, other)]
    assert (streams[0] == streams[1]).all()
    assert (streams[0] != streams[2]).any()


def test_many_positions_draw_what_each_draws_alone() -> None:
    requests = [Request(id, (1, 2), SamplingParams(seed=2**63 + 7919 * id), 9) for id in range(40)]
    wanted = [Wanted(Sampler(request), [1, 2], 5 * request.id) for request in requests]
    alone = [int(sample_rows([position]).seed[0]) for position in wanted]
    assert sample_rows(wanted).seed.tolist() == alone == [each.sampler.draw(each.at) for each in wanted]


def test_the_engine_draws_no_seed() -> None:
    """So that another engine continues an answer as this one would: a seed is drawn where the request is made."""
    many = np.tile(logits(), (200, 1))
    streams = [choose(many, sample_rows([Wanted(who, [0], at) for at in range(200)])) for who in (sampler(), sampler())]
    assert (streams[0] == streams[1]).all()


def test_presence_and_frequency_count_the_answer_only() -> None:
    row = logits()
    result = edited(row, [*PROMPT, 9, 9, 8], presence_penalty=0.5, frequency_penalty=0.25)
    change = row - result
    assert change[9] == pytest.approx(1.0)
    assert change[8] == pytest.approx(0.75)
    assert change[1] == 0
    assert np.count_nonzero(change) == 2


def test_repetition_counts_prompt_and_answer() -> None:
    row = np.array([2.0, 2.0, -2.0, 2.0, 2.0], np.float32)
    assert edited(row, [1, 2, 3, 4], repetition_penalty=2.0).tolist() == [2.0, 1.0, -4.0, 1.0, 1.0]


def test_a_window_counts_its_tokens_of_prompt_and_answer() -> None:
    row = np.full(VOCAB, 4.0, np.float32)
    params = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 2.0}
    who = sampler(penalty_window=3, **params)
    tokens = [*PROMPT, 9, 3, 3]
    for end, counts in ((3, {1: 1, 2: 1, 3: 1}), (5, {9: 1, 3: 2}), (6, {9: 1, 3: 2}), (6, {9: 1, 3: 2})):
        change = after(row, who.edit(tokens, end - 1))
        assert {token: (float(value) - 2.0) for token, value in enumerate(change) if value != 4.0} == {
            token: -0.5 - 0.25 * count for token, count in counts.items()
        }
    assert sampler(penalty_window=0, **params).edit(tokens, 5) is None


def test_penalties_grow_with_the_answer() -> None:
    who = sampler(frequency_penalty=1.0)
    tokens = list(PROMPT)
    for count in range(1, 4):
        tokens.append(9)
        edit = who.edit(tokens, len(tokens) - 1)
        assert edit is not None
        assert edit.add_values.tolist() == [-count]


def test_bias_adds_and_min_tokens_bans_the_end() -> None:
    row = np.zeros(VOCAB, np.float32)
    result = after(row, sampler(frozenset({5}), min_tokens=2, logit_bias={7: 3.0}).edit(list(PROMPT), 2))
    assert result[7] == 3.0
    assert result[5] == -np.inf
    late = sampler(frozenset({5}), min_tokens=2).edit([*PROMPT, 8, 8], 4)
    assert late is None
    assert row[7] == 0, "the caller's logits were changed"


def test_answers_rows_with_tokens_logprobs_and_scores() -> None:
    table = np.stack([logits(i) for i in range(3)])
    chooser = sampler(temperature=0, logprobs=2, prompt_logprobs=1)
    wanted = list(wanted_positions(chooser, list(PROMPT), Row(0, 0, 3, 3)))
    batch = Batch(
        step=4,
        tokens=np.array([1, 2, 3], np.int32),
        positions=np.arange(3, dtype=np.int32),
        row_start=np.array([0, 3], np.int32),
        slots=np.zeros(1, np.int32),
        tables=np.zeros((1, 1, 1), np.int32),
        sampled=np.arange(3, dtype=np.int32),
        sample_start=np.array([0, 3], np.int32),
        sample=sample_rows(wanted),
    )
    (row,) = sample(table, batch).rows
    logprobs = table - np.log(np.exp(table.astype(np.float64)).sum(axis=1, keepdims=True))
    assert row.tokens == (int(table[2].argmax()),)
    assert [entry.token for entry in row.scores] == [2, 3]
    assert [entry.logprob for entry in row.scores] == pytest.approx([logprobs[0, 2], logprobs[1, 3]], abs=1e-5)
    (entry,) = row.logprobs
    assert [token for token, _ in entry.top] == list(np.argsort(-table[2])[:2])
    assert entry.logprob == entry.top[0][1] == pytest.approx(logprobs[2].max(), abs=1e-5)


def test_a_step_that_samples_nothing_answers_empty_rows() -> None:
    none = np.zeros(0, np.int32)
    two = np.zeros(2, np.int32)
    batch = Batch(1, two, two, two, two[:1], np.zeros((1, 1), np.int32), none, two, sample_rows([]))
    assert sample(np.zeros((0, VOCAB), np.float32), batch).rows == (RowResult(),)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 2},
        {"presence_penalty": 3},
        {"repetition_penalty": 0},
        {"max_tokens": -1},
        {"logprobs": 21},
        {"logit_bias": {1: 101}},
        {"stop": ("",)},
    ],
)
def test_nonsense_is_refused_by_name(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**params)
    assert refusal.value.param in params

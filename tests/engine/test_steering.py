"""Samplers beyond the usual three cuts, and what is ruled out or penalized, show in the answers of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.backend.cpu import CpuBackend
from penstock.backend.fake import FakeBackend
from penstock.backend.ref import RefBackend
from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.errors import InvalidRequest
from penstock.model.load import load_model, open_checkpoint
from penstock.types import (
    BANNED,
    DryPenalty,
    Finished,
    Limits,
    Request,
    SamplerChain,
    SamplingParams,
    TokenLogprob,
    Tokens,
)

CHECKPOINT = open_checkpoint(Path(__file__).parents[1] / "models" / "goldens" / "llama3")
VOCAB = CHECKPOINT.spec.vocab
LIMITS = Limits(max_len=64, max_rows=4, step_tokens=16, block_size=4, num_blocks=64, vocab=VOCAB)
PROMPT = (5, 9, 3, 7, 5, 2)
GREEDY = {"temperature": 0.0}


@cache
def engine(name: str) -> Engine:
    backend = RefBackend() if name == "ref" else CpuBackend(2)
    backend.load(load_model(CHECKPOINT, backend))
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    return assemble(backend, LIMITS)


IDS = iter(range(10**6))


def run(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    answers: dict[int, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while not engine.idle:
        for event in engine.step():
            assert isinstance(event, Tokens | Finished), event
            if isinstance(event, Tokens):
                answers[event.seq] += event.tokens
    return list(answers.values())


def request(count: int = 24, bad_words: tuple[tuple[int, ...], ...] = (), **params: Any) -> Request:
    settings = SamplingParams(**{"seed": 1} | params)
    return Request(next(IDS), PROMPT, settings, count, bad_words=bad_words)


def answer(name: str = "cpu", **params: Any) -> list[int]:
    return run(engine(name), [request(**params)])[0]


def draws(name: str = "cpu", count: int = 60, **params: Any) -> set[int]:
    """Returns the different tokens that are drawn after the prompt."""
    return {answer[0] for answer in run(engine(name), [request(1, seed=seed, **params) for seed in range(count)])}


def chained(**chain: Any) -> dict[str, Any]:
    return {"chain": SamplerChain(**chain)}


BEST = answer(**GREEDY)


@pytest.mark.parametrize("name", ["ref", "cpu"])
@pytest.mark.parametrize(
    "params",
    [
        chained(order=("top_k",)) | {"top_k": 1},
        chained(order=("top_p",)) | {"top_p": 0.0},
        chained(order=("min_p",)) | {"min_p": 1.0},
        chained(top_n_sigma=1e-6),
        chained(mirostat=1, mirostat_tau=0.0),
        chained(mirostat=2, mirostat_tau=0.0),
        chained(order=("temperature",)) | {"temperature": 1e-3},
        chained() | GREEDY,
        chained(order=()) | GREEDY,
        chained(mirostat=2) | GREEDY,
    ],
)
def test_a_chain_that_leaves_one_candidate_is_greedy(name: str, params: dict[str, Any]) -> None:
    assert answer(name, **params) == BEST


def test_samplers_that_are_not_in_the_order_do_nothing() -> None:
    params = {"top_k": 1, "temperature": 1e-3}
    assert len(draws(**chained(order=("top_p",)), **params)) > 5
    assert len(draws(**chained(), **params)) == 1


def test_the_order_counts() -> None:
    """A high temperature leaves top_p more candidates, unless top_p comes first."""
    params = {"temperature": 100.0, "top_p": 0.5}
    early, late = (
        draws(**chained(order=order), **params) for order in (("temperature", "top_p"), ("top_p", "temperature"))
    )
    assert len(late) < len(early)


def test_typical_p_leaves_out_what_is_too_likely_or_too_unlikely() -> None:
    assert len(draws(**chained(typical_p=0.2))) < len(draws(**chained()))


def test_xtc_excludes_the_top_choices() -> None:
    never = draws(**chained(xtc_probability=1.0, xtc_threshold=1e-6, order=("xtc",)))
    assert len(never) == 1
    assert BEST[0] not in never
    sometimes = draws(**chained(xtc_probability=0.5, xtc_threshold=1e-6), top_k=2)
    assert len(sometimes) == 2
    assert draws(**chained(xtc_probability=1.0, xtc_threshold=0.6), top_k=1) == {BEST[0]}  # off above one half


def test_a_dynamic_temperature_follows_the_entropy() -> None:
    """The toy is unsure, so its temperature is near the highest: with an exponent that makes it low, it is greedy."""
    hot = chained(dynatemp_range=1.0, order=("temperature",))
    cold = chained(dynatemp_range=1.0, dynatemp_exponent=100.0, order=("temperature",))
    assert len(draws(**hot)) > len(draws(**cold))


def test_min_keep_is_what_every_cut_leaves() -> None:
    assert len(draws(**chained(), top_p=0.0)) == 1
    assert len(draws(**chained(min_keep=3), top_p=0.0)) == 3


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_holds_the_surprise_that_it_aims_at(version: int) -> None:
    """A high target has more candidates, and each choice changes how many the next one has."""
    few, many = (draws(**chained(mirostat=version, mirostat_tau=tau)) for tau in (0.8, 4.0))
    assert len(few) < len(many)
    fixed, learning = (
        answer(count=40, **chained(mirostat=version, mirostat_tau=1.5, mirostat_eta=eta)) for eta in (0.0, 1.0)
    )
    assert fixed != learning


@pytest.mark.parametrize("name", ["ref", "cpu"])
def test_a_seed_decides_and_a_neighbour_does_not(name: str) -> None:
    params = chained(mirostat=2, mirostat_tau=3.0)
    alone = answer(name, seed=3, **params)
    neighbours = [request(), request(logprobs=2, **GREEDY), request(seed=3, **params)]
    plain, best, steered = run(engine(name), neighbours)
    assert steered == alone
    assert best == BEST
    assert plain == answer(name)


def test_logprobs_are_those_of_the_chosen_token() -> None:
    params = chained(xtc_probability=1.0, xtc_threshold=1e-6, order=("xtc",))
    engine("cpu").add(request(3, logprobs=20, **params))
    entries = []
    while not engine("cpu").idle:
        entries += [entry for event in engine("cpu").step() if isinstance(event, Tokens) for entry in event.logprobs]
    assert len(entries) == 3
    assert all(entry.logprob < entry.top[0][1] for entry in entries)


@pytest.mark.usefixtures("overcommitted")
@pytest.mark.parametrize("depth", [0, 1])
def test_neither_preemption_nor_steps_in_flight_disturb_mirostat(depth: int) -> None:
    params = chained(mirostat=2, mirostat_tau=2.0, mirostat_eta=0.7)
    found, lost = [], []
    for blocks in (64, 12):
        limits = Limits(max_len=40, max_rows=4, step_tokens=16, block_size=4, num_blocks=blocks, vocab=100)
        backend = FakeBackend(limits.vocab)
        backend.reserve_kv(limits.num_blocks, limits.block_size)
        small = assemble(backend, limits, depth=depth)
        found.append(run(small, [request(30, seed=seed, **params) for seed in range(3)]))
        lost.append(small.stats().preemptions)
    assert found[0] == found[1]
    assert lost[0] == 0 < lost[1]
    assert len(set(found[0][0])) > 5


def test_a_scored_prompt_is_computed_whole_though_it_is_cached() -> None:
    prompt = tuple(range(1, 21))
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    scores: list[list[TokenLogprob]] = []
    for settings in (SamplingParams(temperature=0.0), params, params):
        engine("cpu").add(Request(next(IDS), prompt, settings, 1))
        events = []
        while not engine("cpu").idle:
            events += engine("cpu").step()
        told = [event for event in events if isinstance(event, Tokens)]
        scores.append([entry for event in told for entry in event.scores])
        assert settings is not params or {event.cached for event in told} == {0}
    assert scores[0] == []
    assert [entry.token for entry in scores[1]] == list(prompt[1:])
    assert scores[1] == scores[2]


# -- bans and penalties -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ref", "cpu"])
def test_nothing_but_allowed_tokens_is_generated(name: str) -> None:
    allowed = (4, 8, 31, 32, VOCAB - 1)
    assert set(answer(name, allowed_token_ids=allowed)) <= set(allowed)
    assert draws(name, allowed_token_ids=allowed, temperature=5.0) == set(allowed)
    assert set(answer(name, allowed_token_ids=allowed, **chained())) <= set(allowed)


@pytest.mark.parametrize("field", ["allowed_token_ids", "logit_bias", "bad_words"])
def test_token_ids_without_a_logit_are_refused(field: str) -> None:
    value = {"allowed_token_ids": (VOCAB,), "logit_bias": {VOCAB: 1.0}, "bad_words": ((1, VOCAB),)}[field]
    with pytest.raises(InvalidRequest, match=f"{field}: token ids are from 0 to {VOCAB - 1}; got {VOCAB}"):
        engine("cpu").add(request(**{field: value}))


def test_a_bias_of_minus_infinity_bans() -> None:
    assert BEST[0] not in answer(logit_bias={BEST[0]: BANNED}, **GREEDY)
    assert BEST[0] not in draws(logit_bias={BEST[0]: BANNED}, **chained())


def test_bad_words_are_never_completed() -> None:
    first, second, third = BEST[:3]
    assert first not in answer(bad_words=((first,),), **GREEDY)
    other = answer(bad_words=((first, second),), **GREEDY)
    assert other[0] == first
    assert (first, second) not in pairwise(other)
    assert answer(bad_words=((first, second, third),), **GREEDY)[:2] == [first, second]
    assert answer(bad_words=((PROMPT[-1], first),), **GREEDY) == BEST  # words of the answer alone


@pytest.mark.parametrize("window", [1, 2, 5])
def test_penalties_look_back_on_a_window(window: int) -> None:
    params = {"presence_penalty": 2.0, "repetition_penalty": 100.0, **GREEDY}
    text = [*PROMPT, *answer(penalty_window=window, **params)]
    recent = [text[at - window : at] for at in range(len(PROMPT), len(text))]
    assert all(token not in before for token, before in zip(text[len(PROMPT) :], recent, strict=True))
    assert answer(penalty_window=0, **params) == BEST
    whole = answer(penalty_window=-1, **params)
    assert len({*PROMPT, *whole}) == len(set(PROMPT)) + len(whole)


def test_dry_ends_repetitions() -> None:
    looping = {"logit_bias": dict.fromkeys(range(8), 50.0), **GREEDY}
    plain, dry = answer(count=50, **looping), answer(count=50, dry=DryPenalty(10.0, allowed_length=2), **looping)
    assert repeated(plain, 4) > 0 == repeated(dry, 4)
    assert answer(count=50, dry=DryPenalty(10.0, window=0), **looping) == plain


def repeated(tokens: list[int], length: int) -> int:
    """Returns how often a sequence of this length occurs again."""
    found = [tuple(tokens[at : at + length]) for at in range(len(tokens) - length + 1)]
    return len(found) - len(set(found))


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"penalty_window": -2}, "penalty_window"),
        ({"dry": DryPenalty(-1.0)}, "dry_multiplier"),
        ({"dry": DryPenalty(1.0, base=0.5)}, "dry_base"),
        ({"dry": DryPenalty(1.0, allowed_length=-1)}, "dry_allowed_length"),
        ({"dry": DryPenalty(1.0, window=-2)}, "dry_penalty_last_n"),
        (chained(top_n_sigma=float("nan")), "top_n_sigma"),
        (chained(typical_p=1.5), "typical_p"),
        (chained(xtc_probability=-0.1), "xtc_probability"),
        (chained(xtc_threshold=2.0), "xtc_threshold"),
        (chained(dynatemp_range=float("inf")), "dynatemp_range"),
        (chained(dynatemp_exponent=-1.0), "dynatemp_exponent"),
        (chained(mirostat=3), "mirostat"),
        (chained(mirostat_tau=float("nan")), "mirostat_tau"),
        (chained(mirostat_eta=-1.0), "mirostat_eta"),
        (chained(min_keep=-1), "min_keep"),
        (chained(order=("top_k", "magic")), "samplers"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"temperature": float("inf")}, "temperature"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(params: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as refusal:
        SamplingParams(**params)
    assert refusal.value.param == name

"""Chains of samplers leave what llama.cpp leaves, and the DRY penalty is its own: its library wrote the goldens."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from penstock.backend.base import ChainRow
from penstock.backend.sample import apply_edit
from penstock.backend.sampler_chain import Candidates, candidates, choose_by_chain
from penstock.engine.samplers.dry import DryHistory
from penstock.engine.samplers.sampler import Sampler
from penstock.types import DryPenalty, Request, SamplerChain, SamplingParams
from tests.engine.llama_cpp_samplers import GOLDENS, Golden, logits_of, row_of

RECORDED: dict[str, list[Golden]] = json.loads(GOLDENS.read_text())


@pytest.mark.parametrize("case", RECORDED["penalties"])
def test_penalties_over_a_window_are_those_of_llama_cpp(case: Golden) -> None:
    history, row = case["history"], np.arange(-3, 4, dtype=np.float32)
    sampler = Sampler(Request(0, tuple(history[:5]), SamplingParams(**case["settings"]), 100))
    for end in range(1, len(history) + 1):
        edit = sampler.edit(history, end - 1)
    found = row if edit is None else apply_edit(row, edit)
    assert found.tolist() == pytest.approx(case["logits"], abs=1e-4)


def chances_of(left: Candidates) -> dict[int, float]:
    found = zip(left.tokens.tolist(), left.probabilities().tolist(), strict=True)
    return {token: p for token, p in found if p > 0}


@pytest.mark.parametrize("case", RECORDED["chains"])
def test_a_chain_leaves_what_llama_cpp_leaves(case: Golden) -> None:
    got = chances_of(candidates(logits_of(case), row_of(case), seed=0))
    wanted = {int(token): p for token, p in case["left"].items()}
    assert got.keys() == wanted.keys()
    assert got == pytest.approx(wanted, abs=2e-6, rel=1e-4)


EXTREMES = (
    *(
        SamplerChain(order=(name,), top_n_sigma=1e-9, typical_p=0.0, xtc_probability=1.0)
        for name in SamplerChain().order
    ),
    SamplerChain(typical_p=1e-9, dynatemp_range=100.0, dynatemp_exponent=100.0),
    SamplerChain(xtc_probability=1.0, xtc_threshold=0.0),
    SamplerChain(min_keep=2**31 - 1, typical_p=0.5, xtc_probability=1.0),
    *(SamplerChain(mirostat=version) for version in (1, 2)),
)


@pytest.mark.parametrize("chain", EXTREMES)
@pytest.mark.parametrize("mu", [-1e6, 0.0, 1e6])
@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1.0, 100.0])
def test_nothing_impossible_is_chosen_under_extreme_settings(
    chain: SamplerChain, mu: float, temperature: float
) -> None:
    for logits in (
        [3.0, -np.inf, 3.0],
        [-np.inf, -1e30, -np.inf],
        [0.0, -3e38, 3e38],
        [5.0] * 4,
        [-np.inf, 1e-30, 0.0],
    ):
        row = ChainRow(0, chain, temperature, 0.0, 1, 1.0, mu)
        values = np.array(logits, np.float32)
        for seed in (0, 2**63, 2**64 - 1):
            chosen = choose_by_chain(values, row, seed)
            assert values[chosen.token] > -np.inf
            assert chosen.surprise is None or 0 <= chosen.surprise < np.inf


def test_where_nothing_is_possible_the_first_token_is_chosen() -> None:
    row = ChainRow(0, SamplerChain(mirostat=2), 1.0, 1.0, 0, 0.0)
    assert choose_by_chain(np.full(4, -np.inf, np.float32), row, 1) == (0, None)


@pytest.mark.parametrize("case", RECORDED["mirostat"])
def test_mirostat_follows_the_surprise_as_llama_cpp_does(case: Golden) -> None:
    row = row_of(case)
    for step in case["steps"]:
        chances = chances_of(candidates(logits_of(step), row, seed=0))
        assert len(chances) == step["left"]
        assert chances[step["chosen"]] == pytest.approx(step["p"], abs=2e-6, rel=1e-4)
        surprise = -math.log2(chances[step["chosen"]])
        row = row._replace(mu=row.mu - row.chain.mirostat_eta * (surprise - row.chain.mirostat_tau))


@pytest.mark.parametrize("case", RECORDED["dry"])
@pytest.mark.parametrize("prompt", [0, 1, 10**9])
def test_dry_penalizes_what_llama_cpp_does(case: Golden, prompt: int) -> None:
    history = case["history"]
    follower = DryHistory(DryPenalty(*case["dry"], ()), tuple(map(tuple, case["breakers"])))
    for end in range(max(min(prompt, len(history)), 1), len(history) + 1):  # all at once, or token by token
        found = follower.penalties(history, end)
    assert found == pytest.approx({int(token): value for token, value in case["penalties"].items()}, rel=1e-5)

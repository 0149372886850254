"""Chains of samplers leave what llama.cpp leaves, and the DRY penalty is its own: its library wrote the goldens."""

from __future__ import annotations

import json
import math

import pytest

from penstock.backend.sampler_chain import Candidates, candidates
from penstock.engine.dry import DryHistory
from penstock.types import DryPenalty
from tests.engine.llama_cpp_samplers import GOLDENS, Golden, logits_of, row_of

RECORDED: dict[str, list[Golden]] = json.loads(GOLDENS.read_text())


def chances_of(left: Candidates) -> dict[int, float]:
    found = zip(left.tokens.tolist(), left.probabilities().tolist(), strict=True)
    return {token: p for token, p in found if p > 0}


@pytest.mark.parametrize("case", RECORDED["chains"])
def test_a_chain_leaves_what_llama_cpp_leaves(case: Golden) -> None:
    got = chances_of(candidates(logits_of(case), row_of(case), seed=0))
    wanted = {int(token): p for token, p in case["left"].items()}
    assert got.keys() == wanted.keys()
    assert got == pytest.approx(wanted, abs=2e-6, rel=1e-4)


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

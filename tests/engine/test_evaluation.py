"""Scoring texts: models with recurrent states, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.config import Config
from penstock.planning.evaluation import Scorer, followers, log_softmax

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
CONTEXT = 32


@pytest.mark.parametrize("device", ["ref", "cpu"])
@pytest.mark.parametrize("golden", ["qwen3next", "qwen35", "qwen35moe", "gemma3", "tied"])
def test_a_window_is_scored_as_the_original_scores_it(golden: str, device: str) -> None:
    """Windows before it leave nothing behind."""
    expected = np.load(GOLDENS / golden / "expected.npz")
    window = expected["tokens"][:CONTEXT].astype(np.int32)
    scorer = Scorer(Config(model=str(GOLDENS / golden), device=device, threads=1), CONTEXT)
    predicted = slice(CONTEXT // 2, CONTEXT - 1)
    truth = log_softmax(expected["logits"][predicted])[np.arange(CONTEXT // 2 - 1), followers(window)]
    scorer.scores([window[::-1].copy()])
    assert scorer.scores([window]) == pytest.approx(truth, abs=2e-2)
    assert log_softmax(scorer.logits([window])) == pytest.approx(log_softmax(expected["logits"][predicted]), abs=2e-2)
    scorer.close()

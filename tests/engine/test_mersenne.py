"""Numbers as llama.cpp draws them."""

from __future__ import annotations

import numpy as np

from penstock.backend.base import ChainRow
from penstock.backend.sampler_chain import choose_by_chain
from penstock.engine.samplers.mersenne import MersenneDraws
from penstock.types import SamplerChain


def test_the_numbers_are_those_of_std_mt19937() -> None:
    """C++'s std::mt19937 with seed 42 gives 1608637542, 3421126067, 4083286876 and 787846414 first."""
    draws = MersenneDraws(42)
    assert draws.at(0) == 3421126067 << 32 | 1608637542
    assert draws.at(0) == draws.at(0)
    assert draws.at(1) == 787846414 << 32 | 4083286876
    assert MersenneDraws(42).at(1) == draws.at(1)
    assert MersenneDraws(2**32 + 42).at(0) == MersenneDraws(42).at(0)


def test_the_most_likely_are_drawn_first() -> None:
    logits = np.array([0.0, 3.0, 1.0], np.float32)
    chain = SamplerChain(mersenne=True)
    chosen = [
        choose_by_chain(logits, ChainRow(0, chain, 1.0, 1.0, 0, 0.0, 0.0), int(at * 2**64)).token
        for at in (0.0, 0.8, 0.9, 0.97)
    ]
    assert chosen == [1, 1, 2, 0]  # their probabilities: 0.84, 0.11 and 0.04

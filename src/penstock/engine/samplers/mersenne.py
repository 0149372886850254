"""Draws random numbers as llama.cpp does, so that a seed gives the text that it gives there."""

from __future__ import annotations

import numpy as np


class MersenneDraws:
    """Draws 64 bits for each token of an answer: two numbers of C++'s std::mt19937, the first of which are the lower
    bits, as std::uniform_real_distribution<double> combines them."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.RandomState(seed & 0xFFFFFFFF)  # seeded as std::mt19937 is
        self._drawn: list[int] = []

    def at(self, index: int) -> int:
        while len(self._drawn) <= index:
            self._drawn.append(int.from_bytes(self._generator.bytes(8), "little"))
        return self._drawn[index]

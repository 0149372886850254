"""Describes samplers and penalties beyond temperature, top-k, top-p and min-p."""

from __future__ import annotations

from typing import NamedTuple


class SamplerChain(NamedTuple):
    """Describes samplers beyond top_k, top_p and min_p, and the order in which all of them cut a row's candidates. The
    host runs a chain, so a request has one only if it asks for something that the usual three cuts cannot say."""

    order: tuple[str, ...] = ("top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature")
    top_n_sigma: float = -1.0  # keeps logits within that many standard deviations of the highest; at most 0: off
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0  # 1 or 2: it replaces the cuts, and `order` does not count
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    min_keep: int = 0  # candidates that every cut leaves
    mersenne: bool = False  # draws with llama.cpp's generator: a seed gives the text that it gives there


SAMPLERS = frozenset(SamplerChain().order)  # the names that an order may have


class DryPenalty(NamedTuple):
    """Describes a penalty for tokens that would continue a repetition ("don't repeat yourself")."""

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    window: int = -1  # tokens that are searched; -1: all of them
    breakers: tuple[str, ...] = ("\n", ":", '"', "*")  # texts across which nothing counts as repeated

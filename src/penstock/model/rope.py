"""Rotary frequencies: how far each pair of a head turns per position, and how that is stretched for long contexts."""

from __future__ import annotations

from math import ceil, floor, log, pi, sqrt

Freqs = tuple[float, ...]

MAX_DIMS = 4096  # of one head


def plain(base: float, dims: int) -> Freqs:
    return tuple(base ** (-2 * i / dims) for i in range(dims // 2))


def divided(freqs: Freqs, factors: Freqs) -> Freqs:
    """By a factor of its own each, as GGUF's rope_freqs tensor gives them."""
    return tuple(freq / factor for freq, factor in zip(freqs, factors, strict=True))


def linear(freqs: Freqs, factor: float) -> Freqs:
    return tuple(freq / factor for freq in freqs)


def llama3(freqs: Freqs, factor: float, low: float, high: float, original: int) -> Freqs:
    """A pair that turns at least `high` times within the original context stays, one that turns at most `low` times
    is slowed by `factor`, and those between are blended."""
    return tuple(blend(freq, factor, keep=(freq * original / (2 * pi) - low) / (high - low)) for freq in freqs)


def yarn(freqs: Freqs, base: float, factor: float, original: int, fast: float, slow: float, whole: bool) -> Freqs:
    """As llama3, but blended by the pair's place between those that turn `fast` and `slow` times; `whole` rounds those
    places outwards."""
    dims = 2 * len(freqs)

    def place(turns: float) -> float:
        return dims * log(original / (turns * 2 * pi)) / (2 * log(base))

    first, last = place(fast), place(slow)
    if whole:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    width = last - first or 0.001
    return tuple(blend(freq, factor, keep=1 - (i - first) / width) for i, freq in enumerate(freqs))


def blend(freq: float, factor: float, keep: float) -> float:
    keep = min(max(keep, 0.0), 1.0)
    return keep * freq + (1 - keep) * freq / factor


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """What yarn multiplies cos and sin by, to make up for the flatter attention of a longer context."""
    return 1.0 if factor <= 1 else 1 + 0.1 * weight * log(factor)


def longrope_scale(factor: float, original: int) -> float:
    """The same of longrope."""
    return 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(original))

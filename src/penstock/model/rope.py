"""Computes rotary frequencies, the angle per position of each pair of a head, and their long-context scaling."""

from __future__ import annotations

from math import ceil, floor, log, pi, sqrt

from penstock.errors import MalformedFile

Freqs = tuple[float, ...]

MAX_DIMS = 4096  # dimensions of one head


def plain(base: float, dims: int) -> Freqs:
    """Returns the unscaled frequencies. Raises MalformedFile for more dimensions than MAX_DIMS."""
    if dims > MAX_DIMS:
        raise MalformedFile(f"the model's config has heads of {dims} dimensions; at most {MAX_DIMS} are supported")
    return tuple(base ** (-2 * i / dims) for i in range(dims // 2))


def divided(freqs: Freqs, factors: Freqs) -> Freqs:
    return tuple(freq / factor for freq, factor in zip(freqs, factors, strict=True))


def linear(freqs: Freqs, factor: float) -> Freqs:
    return tuple(freq / factor for freq in freqs)


def llama3(freqs: Freqs, factor: float, low: float, high: float, original: int) -> Freqs:
    """Scales as Llama 3: pairs that rotate at least `high` times within the original context are unchanged, those that
    rotate at most `low` times are divided by `factor`, and those between are blended.
    """
    width = high - low or 1e-30  # equal bounds leave nothing between them
    return tuple(blend(freq, factor, keep=(freq * original / (2 * pi) - low) / width) for freq in freqs)


def yarn(freqs: Freqs, base: float, factor: float, original: int, fast: float, slow: float, whole: bool) -> Freqs:
    """Scales as YaRN: pairs are blended by their index between the pairs that rotate `fast` and `slow` times in the
    original context; `whole` rounds these two indices outwards.
    """
    dims = 2 * len(freqs)

    def index_of(rotations: float) -> float:
        return dims * log(original / (rotations * 2 * pi)) / (2 * log(base))

    first, last = index_of(fast), index_of(slow)
    if whole:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    width = last - first or 0.001
    return tuple(blend(freq, factor, keep=1 - (i - first) / width) for i, freq in enumerate(freqs))


def blend(freq: float, factor: float, keep: float) -> float:
    """Interpolates between freq / factor and freq by `keep`, clamped to [0, 1]."""
    keep = min(max(keep, 0.0), 1.0)
    return keep * freq + (1 - keep) * freq / factor


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """Returns YaRN's factor of cos and sin, which compensates for the flatter attention of a longer context."""
    return 1.0 if factor <= 1 else 1 + 0.1 * weight * log(factor)


def longrope_scale(factor: float, original: int) -> float:
    return 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(original))

"""Scales the number of examples of property tests with Hypothesis's profile."""

from hypothesis import settings


def examples(count: int) -> int:
    """Returns the examples of a test that has `count` where the profile has 100."""
    return max(1, count * settings.default.max_examples // 100)

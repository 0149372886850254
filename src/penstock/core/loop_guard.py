"""Finds answers that have fallen into a loop: at temperature 0 a model that repeats a phrase often enough never leaves
it again.

Only the tokens of an answer decide whether it is a loop. So it ends at the same token with drafts or without, in any
batch, and if another engine resumes it. The rule is careful: an answer is a loop only if it repeats the same few tokens
without any change, dozens of times and over a thousand tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

EVERY = 64  # tokens after which an answer is looked at again, so that this costs nearly nothing
SPAN = 1024  # tokens that a loop has at least
REPEATS = 24  # times that it repeats its phrase at least
LONGEST = 128  # tokens of a phrase
TAIL = max(SPAN, REPEATS * LONGEST)  # tokens at an answer's end that are looked at


def loop_phrase(answer: Sequence[int]) -> int:
    """Returns how many tokens the phrase has that the end of an answer repeats; 0: it is not a loop."""
    longest = min(LONGEST, len(answer) // REPEATS) if len(answer) >= SPAN else 0
    for length in range(1, longest + 1):
        if answer[-1 - length] == answer[-1]:
            end = answer[-max(SPAN, REPEATS * length) :]
            if end[length:] == end[:-length]:
                return length
    return 0


def lengths_to_check(before: int, after: int, least: int) -> range:
    """Returns at which of its lengths an answer is looked at that grows from `before` tokens to `after`, once it has
    `least` tokens."""
    first = max(before + 1, least, SPAN)
    return range(-(-first // EVERY) * EVERY, after + 1, EVERY)

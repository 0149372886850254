"""Tests the suffix automaton against a search through the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.drafting.suffixes import ALIKE, DIFFERENT, SEPARATOR, SINGLE, SuffixAutomaton, SuffixCursor

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def ends_of(text: Sequence[int], string: Sequence[int]) -> list[int]:
    """Returns where a string ends in a text."""
    size = len(string)
    return [at for at in range(size, len(text) + 1) if list(text[at - size : at]) == list(string)]


def longest_match(text: Sequence[int], stream: Sequence[int], before: int) -> int:
    """Returns the length of the longest suffix of a stream that ends in the text at `before` or earlier."""
    sizes = range(len(stream) + 1)
    found = [size for size in sizes if any(end <= before for end in ends_of(text, stream[len(stream) - size :]))]
    return max(found, default=0)


def repeated(text: Sequence[int], end: int, most: int) -> list[int]:
    """Returns what follows a place in a text that goes on periodically from there."""
    period = len(text) - end
    return [text[end + at % period] for at in range(most)]


@given(TOKENS, st.integers(1, 6))
def test_a_text_is_continued_as_after_its_longest_repeated_suffix(text: list[int], most: int) -> None:
    automaton = SuffixAutomaton(100)
    automaton.extend(text)
    found, match, agreements = automaton.continuation(most)
    assert match == longest_match(text, text, len(text) - 1)
    places = ends_of(text, text[len(text) - match :])[:-1] if match else []
    assert found in [repeated(text, end, most) for end in places] if match else not found
    assert len(agreements) == len(found)
    for depth, agreement in enumerate(agreements[: len(text) - max(places, default=0)]):
        before = [*text[len(text) - match :], *found[:depth]]
        followers = [text[end] for end in ends_of(text, before) if end < len(text)]
        assert (agreement == DIFFERENT) == (len(set(followers)) > 1)
        assert agreement != ALIKE or len(ends_of(text, before)) > 1
    assert len(automaton) == len(text)


@given(TOKENS, TOKENS, st.integers(1, 6))
def test_a_cursor_finds_the_longest_suffix_that_is_followed_by_something(
    text: list[int], stream: list[int], most: int
) -> None:
    automaton = SuffixAutomaton(100)
    automaton.extend(text)
    cursor = SuffixCursor(automaton)
    cursor.advance(stream)
    found, match, _ = cursor.continuation(most)
    assert match == longest_match(text, stream, len(text) - 1)
    places = ends_of(text, stream[len(stream) - match :])[: len(text)]
    assert found in [text[end : end + most] for end in places if end < len(text)] if match else not found


@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=5))
def test_a_cursor_stays_right_while_the_text_grows(pieces: list[tuple[list[int], list[int]]]) -> None:
    automaton, text, stream = SuffixAutomaton(1000), list[int](), list[int]()
    cursor = SuffixCursor(automaton)
    for grown, followed in pieces:
        automaton.extend(grown)
        text += grown
        cursor.advance(followed)
        stream += followed
        found, match, _ = cursor.continuation(3)
        assert match <= longest_match(text, stream, len(text) - 1)  # it does not look back at what it passed
        assert not match or found in [text[end : end + 3] for end in ends_of(text, stream[len(stream) - match :])]


def test_the_latest_occurrence_is_continued() -> None:
    automaton = SuffixAutomaton(100)
    automaton.extend([1, 2, 3, 7, 1, 2, 4, 7, 1, 2])
    assert automaton.continuation(2) == ([4, 7], 3, [SINGLE, SINGLE])
    automaton.extend([3, 9, 1, 2])
    assert automaton.continuation(2) == ([3, 9], 2, [DIFFERENT, DIFFERENT])


def test_occurrences_that_go_on_alike_are_told_from_a_single_one() -> None:
    automaton = SuffixAutomaton(100)
    automaton.extend([1, 2, 3, 4, 1, 2])
    assert automaton.continuation(1) == ([3], 2, [SINGLE])
    automaton.extend([3, 5, 1, 2])
    assert automaton.continuation(1) == ([3], 2, [ALIKE])
    cursor = SuffixCursor(automaton)
    cursor.advance([1])
    assert cursor.continuation(1) == ([2], 1, [ALIKE])


def test_a_repetition_goes_on() -> None:
    automaton = SuffixAutomaton(100)
    automaton.extend([5, 6, 7, 5, 6, 7])
    assert automaton.continuation(7) == ([5, 6, 7, 5, 6, 7, 5], 3, [SINGLE] * 7)


def test_nothing_is_found_where_nothing_was_repeated() -> None:
    automaton = SuffixAutomaton(100)
    assert automaton.continuation(4) == ([], 0, [])
    automaton.extend([1, 2, 3])
    cursor = SuffixCursor(automaton)
    assert automaton.continuation(4) == ([], 0, [])
    assert cursor.continuation(4) == ([], 0, [])
    cursor.advance([2, 9])
    assert cursor.continuation(4) == ([], 0, [])


def test_no_continuation_crosses_a_separator() -> None:
    automaton = SuffixAutomaton(100)
    automaton.extend([1, 2, SEPARATOR, 3, 1, 2])
    assert automaton.continuation(4) == ([], 2, [])
    cursor = SuffixCursor(automaton)
    cursor.advance([1])
    assert cursor.continuation(4) == ([2], 1, [ALIKE])


def test_a_text_that_is_too_long_starts_anew() -> None:
    automaton = SuffixAutomaton(4)
    automaton.extend([1, 2, 1])
    cursor = SuffixCursor(automaton)
    cursor.advance([1])
    assert cursor.continuation(1) == ([2], 1, [SINGLE])
    automaton.extend([2, 9])
    assert len(automaton) == 2
    assert cursor.continuation(1) == ([], 0, [])
    cursor.advance([2])
    assert cursor.continuation(1) == ([9], 1, [SINGLE])
    automaton.extend([1, 2, 3, 4, 5])
    assert len(automaton) == 4
    with pytest.raises(ValueError, match="capacity"):
        SuffixAutomaton(0)


def test_its_size_is_known() -> None:
    automaton = SuffixAutomaton(100)
    before = automaton.nbytes
    automaton.extend(range(50))
    assert automaton.nbytes > before

"""The native suffix automaton against the one in Python."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backend.cpu import _native
from penstock.core.drafting import suffixes

PIECES = st.lists(
    st.tuples(st.lists(st.integers(-1, 4), max_size=12), st.lists(st.integers(0, 4), max_size=6)), max_size=10
)


@given(PIECES, st.sampled_from((8, 25, 1000)), st.integers(0, 8))
def test_native_code_finds_the_same(pieces: list[tuple[list[int], list[int]]], capacity: int, most: int) -> None:
    native, wanted = _native.SuffixAutomaton(capacity), suffixes.SuffixAutomaton(capacity)
    native_cursor, cursor = _native.SuffixCursor(native), suffixes.SuffixCursor(wanted)
    for grown, followed in pieces:
        native.extend(grown)
        wanted.extend(grown)
        assert native.continuation(most) == wanted.continuation(most)
        native_cursor.advance(followed)
        cursor.advance(followed)
        assert native_cursor.continuation(most) == cursor.continuation(most)
        assert len(native) == len(wanted)


def test_long_texts_with_many_tokens_agree() -> None:
    chance = random.Random(0)
    words = [[chance.randrange(150_000) for _ in range(chance.randrange(1, 9))] for _ in range(300)]
    native, wanted = _native.SuffixAutomaton(2**20), suffixes.SuffixAutomaton(2**20)
    for _ in range(3000):
        word = chance.choice(words)
        native.extend(word)
        wanted.extend(word)
        assert native.continuation(16) == wanted.continuation(16)
    assert native.nbytes < 150 * len(native)


def test_a_cursor_keeps_its_automaton() -> None:
    automaton = _native.SuffixAutomaton(10)
    automaton.extend([1, 2, 3])
    cursor = _native.SuffixCursor(automaton)
    del automaton
    cursor.advance((1,))
    assert cursor.continuation(2) == ([2, 3], 1, [suffixes.SINGLE] * 2)


def test_what_cannot_be_indexed_is_refused() -> None:
    for capacity in (0, 2**30):
        with pytest.raises(ValueError, match="capacity"):
            _native.SuffixAutomaton(capacity)
    with pytest.raises(ValueError, match="32 bits"):
        _native.SuffixAutomaton(4).extend([2**31])
    with pytest.raises((TypeError, OverflowError)):
        _native.SuffixAutomaton(4).extend(["1"])  # type: ignore[list-item]

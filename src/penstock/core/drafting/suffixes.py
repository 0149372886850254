"""Finds where the end of a token stream occurred before and what followed: a suffix automaton that grows online.

A state of the automaton is a set of strings that occur at the same places; its link leads to the next shorter suffix
that also occurs elsewhere. This is the definition; the native module has the same at a hundredth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REFRESHED = 4  # suffixes of the text whose latest occurrence is kept current at every token
SEPARATOR = -1  # a negative token stands between two streams: no continuation crosses it

# Agreement at a token: what stands before it occurred with different followers, once, or more often with the same.
DIFFERENT, SINGLE, ALIKE = range(3)

# What followed an earlier occurrence, how many tokens before it match, and the agreement at each token.
Continuation = tuple[list[int], int, list[int]]


class StreamIndex(Protocol):
    """Is a suffix automaton, written in Python or native."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens. A text that would become longer than the capacity starts anew, without the older tokens."""

    def continuation(self, most: int) -> Continuation: ...

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class StreamCursor(Protocol):
    """Follows another stream through a suffix automaton."""

    def advance(self, tokens: Sequence[int]) -> None: ...

    def continuation(self, most: int) -> Continuation: ...


class SuffixState:
    """Holds a state: the length of its longest string, where that ended, its link and its transitions."""

    __slots__ = ("end", "length", "link", "next", "repeated")

    def __init__(self, length: int, end: int) -> None:
        self.length = length
        self.end = end
        self.link: SuffixState | None = None
        self.next: dict[int, SuffixState] = {}
        self.repeated = False  # it is known to have occurred more than once

    @property
    def agreement(self) -> int:
        return DIFFERENT if len(self.next) > 1 else ALIKE if self.repeated else SINGLE


class SuffixAutomaton:
    """Indexes all substrings of a text of at most `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        if not 0 < capacity <= 2**29:
            raise ValueError("a capacity is 1 to 2^29 tokens")
        self._capacity = capacity
        self._clear()

    def _clear(self) -> None:
        self.text: list[int] = []
        self.root = self._last = SuffixState(0, 0)
        self._states = 1

    def __len__(self) -> int:
        return len(self.text)

    @property
    def nbytes(self) -> int:
        return 300 * self._states

    def extend(self, tokens: Sequence[int]) -> None:
        if len(self.text) + len(tokens) > self._capacity:
            self._clear()
        for token in tokens[-self._capacity :]:
            self._append(token)

    def continuation(self, most: int) -> Continuation:
        """Returns the tokens after the latest earlier occurrence of the longest repeated suffix. At the end of the text
        it repeats periodically. A negative token ends it."""
        match = self._last.link
        return self.followers(match, match.length, most) if match is not None and match.length else ([], 0, [])

    def followers(self, start: SuffixState, length: int, most: int) -> Continuation:
        state: SuffixState | None = start
        period = len(self.text) - start.end
        tokens: list[int] = []
        agreements: list[int] = []
        for at in range(most):
            token = self.text[start.end + at] if at < period else tokens[at - period]
            if token < 0:
                break
            agreements.append(state.agreement if state else SINGLE)
            tokens.append(token)
            state = state.next.get(token) if state else None
        return tokens, length, agreements

    def _refresh(self) -> None:
        """Keeps the latest end of the longest suffixes that occurred before. It runs before a token is appended,
        because until then the end that counts is the one before."""
        state = self._last.link
        for _ in range(REFRESHED):
            if state is None or state is self.root:
                break
            state.end = len(self.text)
            state.repeated = True
            state = state.link

    def _append(self, token: int) -> None:
        self._refresh()
        self.text.append(token)
        added = SuffixState(self._last.length + 1, len(self.text))
        self._states += 1
        state: SuffixState | None = self._last
        while state is not None and token not in state.next:
            state.next[token] = added
            state = state.link
        self._last = added
        added.link = self.root if state is None else self._split(state, token)

    def _split(self, before: SuffixState, token: int) -> SuffixState:
        """Returns the state of the longest string that leads from `before` by the token. If the state there has longer
        strings, it is split."""
        state = before.next[token]
        if state.length == before.length + 1:
            return state
        clone = SuffixState(before.length + 1, state.end)
        self._states += 1
        clone.link, clone.next, clone.repeated = state.link, dict(state.next), state.repeated
        state.link = clone
        at: SuffixState | None = before
        while at is not None and at.next.get(token) is state:
            at.next[token] = clone
            at = at.link
        return clone


class SuffixCursor:
    """Follows another stream through an automaton: the longest suffix of it that occurs in the automaton's text."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self._automaton = automaton
        self._root = self._state = automaton.root
        self._length = 0

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._settle()
            while token not in self._state.next and self._state.link is not None:
                self._state = self._state.link
                self._length = self._state.length
            if token in self._state.next:
                self._state = self._state.next[token]
                self._length += 1

    def continuation(self, most: int) -> Continuation:
        """Returns the tokens after the longest suffix of the stream that has a continuation. A negative token ends
        it."""
        self._settle()
        text, state = self._automaton.text, self._state
        while state.link is not None and state.end == len(text):
            state = state.link
        if state.link is None:
            return [], 0, []
        left = len(text) - state.end
        return self._automaton.followers(state, min(self._length, state.length), min(most, left))

    def _settle(self) -> None:
        """Goes back to the beginning if the text has started anew, and to the shorter state if one was split."""
        if self._root is not self._automaton.root:
            self._root = self._state = self._automaton.root
            self._length = 0
        while self._state.link is not None and self._state.link.length >= self._length:
            self._state = self._state.link

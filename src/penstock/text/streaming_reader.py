"""Reads text that arrives in pieces as if it were complete. Readers are generators that yield when they need more.

Every question waits until the available text decides it, so results never depend on how the text was split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from penstock.text.detok import partial_match
from penstock.text.tool_formats import pieces

T = TypeVar("T")
Reading = Generator[None, None, T]
Emit = Callable[[str], None]

SPACE = " \t\r\n"
MAX_FIELD = 256  # characters
MAX_RUN = 2**20
_SPACES = re.compile(f"[{SPACE}]+")
_FIELDS = {
    "{name}": re.compile(r"[\w./-]+"),
    "{key}": re.compile(r'[^<>"\n]+'),
    "{id}": re.compile(r"[\w.:/-]+"),
    "{string}": re.compile(r"[a-z]+"),
    "{word}": re.compile(r"[\w.$-]+"),
}


class StreamingReader:
    """Holds a text that may grow, and a position in it."""

    def __init__(self) -> None:
        self.ended = False
        self.cut = False  # the end of the text decided a question; more text could have changed it
        self._text = ""
        self._at = 0
        self._marks: list[int] = []  # positions to rewind to, innermost last

    def push(self, piece: str) -> None:
        done = self._marks[0] if self._marks else self._at
        self._text = self._text[done:] + piece
        self._at -= done
        self._marks = [mark - done for mark in self._marks]

    # ---- rewinding ----

    def mark(self) -> None:
        """Saves this position for `rewind`."""
        self._marks.append(self._at)

    def rewind(self) -> None:
        self._at = self._marks.pop()

    def release(self) -> None:
        self._marks.pop()

    def commit(self) -> None:
        self._marks.clear()

    # ---- reading ----

    def take(self, count: int) -> str:
        """Takes `count` available characters."""
        self._at += count
        return self._text[self._at - count : self._at]

    def rest(self) -> str:
        return self.take(len(self._text) - self._at)

    def peek(self) -> Reading[str]:
        """Returns the next character without taking it; "" at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        self.cut |= self._at == len(self._text)
        return self._text[self._at : self._at + 1]

    def next_is(self, *literals: str) -> Reading[bool]:
        """Returns True if one of the literals comes next; takes nothing."""
        while True:
            if self._text.startswith(literals, self._at):
                return True
            available = self._text[self._at :]
            begun = any(literal.startswith(available) for literal in literals)
            self.cut |= self.ended and begun
            if self.ended or not begun:
                return False
            yield

    def next_in(self, *patterns: str) -> Reading[bool]:
        """Returns True if one of the patterns begins after white space; takes nothing."""
        self.mark()
        yield from self.space()
        begun = yield from self.next_is(*(pieces(pattern)[0] for pattern in patterns))
        self.rewind()
        return begun

    def space(self) -> Reading[str]:
        return (yield from self.take_run(_SPACES))

    def take_available(self, kind: re.Pattern[str], limit: int = MAX_RUN) -> str:
        """Takes the available part of a run, without waiting."""
        found = kind.match(self._text, self._at, self._at + limit)
        return self.take(found.end() - self._at) if found else ""

    def take_run(self, kind: re.Pattern[str], limit: int = MAX_RUN) -> Reading[str]:
        """Takes a run of such characters, at most `limit`."""
        taken = self.take_available(kind, limit)
        while (
            len(taken) < limit and (yield from self.peek()) and (more := self.take_available(kind, limit - len(taken)))
        ):
            taken += more
        return taken

    def match(self, pattern: str) -> Reading[dict[str, str] | None]:
        """Takes text that matches a pattern (tool_formats.py) and returns its fields. Otherwise takes nothing and
        returns None.
        """
        self.mark()
        fields = {}
        for piece in pieces(pattern):
            if piece in _FIELDS:
                fields[piece[1:-1]] = yield from self.take_run(_FIELDS[piece], MAX_FIELD)
                matched = fields[piece[1:-1]] != ""
            elif piece in SPACE:
                yield from self.space()
                matched = True
            else:
                matched = yield from self.match_literal(piece)
            if not matched:
                self.rewind()
                return None
        self.release()
        return fields

    def match_literal(self, literal: str) -> Reading[bool]:
        """Takes a literal if it comes next; returns True if it did."""
        matched = yield from self.next_is(literal)
        if matched:
            self.take(len(literal))
        return matched

    def until(self, ends: Sequence[str], emit: Emit, *, spaced: bool = False) -> Reading[str]:
        """Emits the text before the first of `ends` and returns that end without taking it; "" at the end of the text.
        With `spaced`, preceding white space is not taken either.
        """
        while True:
            available = self._text[self._at :]
            found = min(((at, end) for end in ends if (at := available.find(end)) >= 0), default=(len(available), ""))
            safe = (
                len(available)
                if self.ended
                else min((partial_match(end, available) for end in ends), default=len(available))
            )
            cut = min(found[0], safe)
            if spaced:
                cut = len(available[:cut].rstrip(SPACE))
            if cut:
                emit(self.take(cut))
            if (found[1] and found[0] <= safe) or self.ended:
                return found[1]
            yield

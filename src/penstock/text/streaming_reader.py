"""Text that comes in pieces, read as if all of it were there: what reads it is a generator that yields for more.

Every question waits until what has come decides it, so that the answer never depends on how the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from penstock.text.detok import beginning
from penstock.text.tool_formats import pieces

T = TypeVar("T")
Wait = Generator[None, None, T]
Say = Callable[[str], None]

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


class Incoming:
    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0
        self._marks: list[int] = []  # places that may be gone back to

    def push(self, piece: str) -> None:
        done = self._marks[0] if self._marks else self._at
        self._text = self._text[done:] + piece
        self._at -= done
        self._marks = [mark - done for mark in self._marks]

    # -- going back -----------------------------------------------------------------------------------------------

    def hold(self) -> None:
        self._marks.append(self._at)

    def back(self) -> None:
        self._at = self._marks.pop()

    def release(self) -> None:
        self._marks.pop()

    def commit(self) -> None:
        """What was read stays read."""
        self._marks.clear()

    # -- reading --------------------------------------------------------------------------------------------------

    def take(self, count: int) -> str:
        """That many characters, which must be there."""
        self._at += count
        return self._text[self._at - count : self._at]

    def rest(self) -> str:
        return self.take(len(self._text) - self._at)

    def peek(self) -> Wait[str]:
        """The next character; none at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def next_is(self, *literals: str) -> Wait[bool]:
        while True:
            if self._text.startswith(literals, self._at):
                return True
            come = self._text[self._at :]
            if self.ended or not any(literal.startswith(come) for literal in literals):
                return False
            yield

    def next_in(self, *patterns: str) -> Wait[bool]:
        """Whether one of the patterns begins after white space; nothing is taken."""
        self.hold()
        yield from self.space()
        begun = yield from self.next_is(*(pieces(pattern)[0] for pattern in patterns))
        self.back()
        return begun

    def space(self) -> Wait[str]:
        """Takes the white space that comes next."""
        return (yield from self.run(_SPACES))

    def come(self, kind: re.Pattern[str], limit: int = MAX_RUN) -> str:
        """Takes what has come of a run, without waiting."""
        found = kind.match(self._text, self._at, self._at + limit)
        return self.take(found.end() - self._at) if found else ""

    def run(self, kind: re.Pattern[str], limit: int = MAX_RUN) -> Wait[str]:
        """Takes a run, to the character that ends it or to `limit` characters."""
        taken = self.come(kind, limit)
        while len(taken) < limit and (yield from self.peek()) and (more := self.come(kind, limit - len(taken))):
            taken += more
        return taken

    def match(self, pattern: str) -> Wait[dict[str, str] | None]:
        """Takes what a pattern of penstock.text.families describes and gives its fields; None, and nothing taken,
        where something else comes."""
        self.hold()
        fields = {}
        for piece in pieces(pattern):
            if piece in _FIELDS:
                fields[piece[1:-1]] = yield from self.run(_FIELDS[piece], MAX_FIELD)
                met = fields[piece[1:-1]] != ""
            elif piece in SPACE:
                yield from self.space()
                met = True
            else:
                met = yield from self.match_literal(piece)
            if not met:
                self.back()
                return None
        self.release()
        return fields

    def match_literal(self, literal: str) -> Wait[bool]:
        met = yield from self.next_is(literal)
        if met:
            self.take(len(literal))
        return met

    def until(self, ends: Sequence[str], say: Say, *, spaced: bool = False) -> Wait[str]:
        """Says what comes before the first of `ends` and gives that one, not taken; none at the end of the text.
        `spaced`: white space before it, or before the end of the text, is not taken either."""
        while True:
            come = self._text[self._at :]
            found = min(((at, end) for end in ends if (at := come.find(end)) >= 0), default=(len(come), ""))
            held = len(come) if self.ended else min((beginning(end, come) for end in ends), default=len(come))
            cut = min(found[0], held)
            if spaced:
                cut = len(come[:cut].rstrip(SPACE))
            if cut:
                say(self.take(cut))
            if (found[1] and found[0] <= held) or self.ended:
                return found[1]
            yield

"""Remembers the latest token streams, to explain which prefix a prompt could have shared."""

from __future__ import annotations

from array import array
from collections import deque
from typing import NamedTuple

from penstock.core.sequence import Sequence
from penstock.types import Nearest

STREAMS = 256
TOKENS = 2**20  # total of all streams: four megabytes
BEFORE, AFTER = 8, 24  # tokens that are shown around the position where two streams diverge


class EndedStream(NamedTuple):
    """Holds the computed tokens of a sequence that has ended."""

    scope: tuple[str, str]
    tokens: array[int]
    prompt_len: int


class RecentStreams:
    """Keeps the last `streams` ended streams, of at most `tokens` tokens together."""

    def __init__(self, streams: int = STREAMS, tokens: int = TOKENS) -> None:
        self._streams, self._tokens = streams, tokens
        self._ended: deque[EndedStream] = deque()
        self._size = 0

    def keep(self, seq: Sequence) -> None:
        if not seq.blocks.prefix_cache or not seq.computed:
            return
        self._ended.append(EndedStream(_scope(seq), array("i", seq.tokens[: seq.computed]), seq.prompt_len))
        self._size += seq.computed
        while len(self._ended) > self._streams or self._size > self._tokens:
            self._size -= len(self._ended.popleft().tokens)

    def nearest(self, seq: Sequence) -> Nearest | None:
        """Returns the stream with the same salt and owner that shares most of the prompt: of equals, the latest."""
        prompt = array("i", seq.tokens[: seq.prompt_len])
        scope = _scope(seq)
        found = [(_shared(ended.tokens, prompt), at) for at, ended in enumerate(self._ended) if ended.scope == scope]
        shared, at = max(found, default=(0, 0))
        if not shared:
            return None
        held = self._ended[at].tokens
        before, had, got = held[max(shared - BEFORE, 0) : shared], held[shared:][:AFTER], prompt[shared:][:AFTER]
        known = min(self._ended[at].prompt_len, len(held))
        return Nearest(shared, len(held), known, tuple(before), tuple(had), tuple(got))


def _scope(seq: Sequence) -> tuple[str, str]:
    return seq.blocks.salt, seq.params.owner


def _shared(one: array[int], other: array[int]) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

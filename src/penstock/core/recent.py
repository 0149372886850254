"""The token streams that ended last: what a prompt could have shared its KV with, even where that is gone."""

from __future__ import annotations

from array import array
from collections import deque
from typing import NamedTuple

from penstock.core.sequence import Sequence
from penstock.types import Nearest

STREAMS = 256
TOKENS = 2**20  # of all of them together: four megabytes
BEFORE, AFTER = 8, 24  # tokens that are shown around the place where two part


class Ended(NamedTuple):
    whose: tuple[str, str]
    tokens: array[int]
    prompt: int


class Recent:
    def __init__(self, streams: int = STREAMS, tokens: int = TOKENS) -> None:
        self._streams, self._tokens = streams, tokens
        self._ended: deque[Ended] = deque()
        self._size = 0

    def keep(self, seq: Sequence) -> None:
        """What has been computed of it, if anything that others could share."""
        if seq.private or not seq.computed:
            return
        self._ended.append(Ended(_whose(seq), array("i", seq.tokens[: seq.computed]), seq.prompt_len))
        self._size += seq.computed
        while len(self._ended) > self._streams or self._size > self._tokens:
            self._size -= len(self._ended.popleft().tokens)

    def nearest(self, seq: Sequence) -> Nearest | None:
        """Under its salt and of its owner; of those that share as much, the latest."""
        prompt = array("i", seq.tokens[: seq.prompt_len])
        mine = _whose(seq)
        found = [(_shared(ended.tokens, prompt), at) for at, ended in enumerate(self._ended) if ended.whose == mine]
        shared, at = max(found, default=(0, 0))
        if not shared:
            return None
        held = self._ended[at].tokens
        before, had, got = held[max(shared - BEFORE, 0) : shared], held[shared:][:AFTER], prompt[shared:][:AFTER]
        known = min(self._ended[at].prompt, len(held))
        return Nearest(shared, len(held), known, tuple(before), tuple(had), tuple(got))


def _whose(seq: Sequence) -> tuple[str, str]:
    return seq.salt, seq.owner


def _shared(one: array[int], other: array[int]) -> int:
    """How many of their first tokens are the same: whole stretches are compared, halving them."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

"""Names what the scheduler asks of whoever proposes drafts: tokens with which a sequence may go on. They are computed
in the same row as the last known token, and count as far as they are what is sampled."""

from __future__ import annotations

from collections.abc import Sequence as Line
from typing import NamedTuple, Protocol

from penstock.core.sequence import Sequence


class Proposal(NamedTuple):
    """Holds tokens with which a sequence may go on, and what is known of how likely that is."""

    tokens: tuple[int, ...] = ()
    survival: tuple[float, ...] = ()  # of each token: the chance that it and all before it are accepted
    source: str = ""
    match: int = 0  # tokens before it that were found where it comes from

    def first(self, count: int) -> Proposal:
        """Returns it cut to its first tokens."""
        return self._replace(tokens=self.tokens[:count], survival=self.survival[:count])


class DraftRoom(NamedTuple):
    """Names a sequence that may go on with a draft of at most so many tokens."""

    seq: Sequence
    most: int


class Drafts(Protocol):
    """Is asked once for every step that has rows with room for a draft."""

    def propose(self, asked: Line[DraftRoom], rows: int, tokens: int, budget: int) -> Line[tuple[int, ...]]:
        """Returns a draft for each of the sequences, mostly an empty one, of at most `budget` tokens together. The step
        has so many rows and tokens without them. A draft holds no token that would end its sequence."""

"""Names what the scheduler asks of whoever proposes drafts: tokens with which a sequence may go on. They are computed
in the same row as the last known token, and count as far as they are what is sampled."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Line
from typing import NamedTuple, Protocol

from penstock.core.kvcache import KvCache
from penstock.core.sequence import Sequence
from penstock.types import Grown, Row


class DraftRoom(NamedTuple):
    """Names a sequence that may go on with a draft of at most so many tokens."""

    seq: Sequence
    most: int


class Drafts(Protocol):
    """Is asked once for every step that has rows with room for a draft."""

    def propose(self, asked: Line[DraftRoom], rows: int, tokens: int, budget: int) -> Line[tuple[int, ...]]:
        """Returns a draft for each of the sequences, mostly an empty one, of at most `budget` tokens together. The step
        has so many rows and tokens without them. A draft holds no token that would end its sequence."""


class DraftRows:
    """Adds what `drafts` proposes to the answering rows of a step, in the room that step and cache have left."""

    def __init__(self, drafts: Drafts, cache: KvCache, step_tokens: int) -> None:
        self._drafts = drafts
        self._cache = cache
        self._step_tokens = step_tokens

    def extend(self, rows: list[Row], sequences: Mapping[int, Sequence], running: int) -> list[Grown]:
        """Gives rows of a step their drafts, while so many sequences are running; returns the blocks that they took."""
        blocks = max(self._cache.available // self._cache.groups - running, 0)  # the running ones may need one each
        room = {at: most for at, row in enumerate(rows) if (most := self._room(row, sequences[row.seq], blocks)) > 0}
        if not room:
            return []
        asked = [DraftRoom(sequences[rows[at].seq], most) for at, most in room.items()]
        tokens = sum(row.count for row in rows)
        proposed = self._drafts.propose(asked, len(rows), tokens, self._step_tokens - tokens)
        grown: list[Grown] = []
        for at, (seq, _), draft in zip(room, asked, proposed, strict=True):
            if draft:
                rows[at] = self._with_draft(seq, rows[at], draft, grown)
        return grown

    def _room(self, row: Row, seq: Sequence, blocks: int) -> int:
        """Returns how many tokens could be drafted behind a row: none but where its last token is known and the answer
        goes on."""
        end = row.start + row.count
        if row.sample != 1 or row.start < seq.prompt_len or end != len(seq.tokens):
            return 0
        positions = seq.capacity - end + blocks * self._cache.block_size
        return min(seq.max_len - end - 1, positions, self._cache.states.draft_room(seq, row))

    def _with_draft(self, seq: Sequence, row: Row, draft: tuple[int, ...], grown: list[Grown]) -> Row:
        """Returns the row with its draft; as it was, if the rows before it have left too little."""
        end = row.start + row.count + len(draft)
        if self._cache.blocks_for(end - seq.capacity) * self._cache.groups > self._cache.available:
            return row
        drafted = self._cache.states.with_draft(row, draft)
        if drafted.draft and end > seq.capacity:
            grown += self._cache.grow(seq, end)
        seq.drafted = bool(drafted.draft)
        return drafted

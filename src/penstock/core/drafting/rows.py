"""Adds drafts to rows. Drafted tokens are computed in the same row as the last known token, and count as far as they
match the sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Line
from functools import partial
from typing import NamedTuple, Protocol

from penstock.core.kvcache import KvCache
from penstock.core.sequence import Sequence
from penstock.types import Row, TableUpdate


class DraftRoom(NamedTuple):
    """Names a sequence that may have a draft of at most `most` tokens."""

    seq: Sequence
    most: int
    reserve: Callable[[int], bool]  # takes the blocks for a draft of this length; False: too few are left


class Drafts(Protocol):
    """Is asked once for every step that has rows with room for a draft."""

    def propose(self, asked: Line[DraftRoom], rows: int, tokens: int, budget: int) -> Line[tuple[int, ...]]:
        """Returns a draft for each of the sequences, mostly an empty one, of at most `budget` tokens together. `rows`
        and `tokens` count the step without drafts. A draft holds no token that would end its sequence."""

    def halves(self, rows: int) -> bool:
        """Returns whether this many rows with drafts run better as two alternating steps: while one is computed, the
        drafts of the other are verified and made."""


class NoDraftRows:
    """Serves engines without drafts."""

    def held(self, running: Iterable[Sequence], held: Collection[int]) -> Collection[int]:
        return held

    def extend(self, rows: list[Row], sequences: Mapping[int, Sequence], running: int) -> list[TableUpdate]:
        """Gives rows of a step their drafts, while `running` sequences run; returns the blocks that they took."""
        return []


class DraftRows(NoDraftRows):
    """Adds what `drafts` proposes to the answering rows of a step, in the room that step and cache have left."""

    def __init__(self, drafts: Drafts, cache: KvCache, step_tokens: int) -> None:
        self._drafts = drafts
        self._cache = cache
        self._step_tokens = step_tokens

    def held(self, running: Iterable[Sequence], held: Collection[int]) -> Collection[int]:
        """Adds sequences that skip this step so that sequences with drafts meet: all in one step, or half of them in
        each of two."""
        waiting, drafting, others = 0, list[int](), list[int]()
        for seq in running:
            if seq.end > len(seq.tokens) and (seq.drafted or seq.awaits_drafts):
                waiting += 1
            elif seq.end - seq.planned == 1 and not seq.must_wait:
                (drafting if seq.awaits_drafts else others).append(seq.id)
        if self._drafts.halves(waiting + len(drafting)):
            return {*held, *drafting[(waiting + len(drafting) + 1) // 2 :]}
        return {*held, *drafting, *others} if waiting >= len(drafting) + len(others) else held

    def extend(self, rows: list[Row], sequences: Mapping[int, Sequence], running: int) -> list[TableUpdate]:
        blocks = max(self._cache.available // self._cache.groups - running, 0)  # the running ones may need one each
        room = {at: most for at, row in enumerate(rows) if (most := self._room(row, sequences[row.seq], blocks)) > 0}
        if not room:
            return []
        grown: list[TableUpdate] = []
        asked = []
        for at, most in room.items():
            row, seq = rows[at], sequences[rows[at].seq]
            asked.append(DraftRoom(seq, most, partial(self._reserve, seq, row.start + row.count, grown)))
        tokens = sum(row.count for row in rows)
        proposed = self._drafts.propose(asked, len(rows), tokens, self._step_tokens - tokens)
        for at, (seq, _, reserve), draft in zip(room, asked, proposed, strict=True):
            if draft and reserve(len(draft)):
                rows[at] = self._cache.saving.with_draft(rows[at], draft)
                seq.drafted = bool(rows[at].draft)
        return grown

    def _room(self, row: Row, seq: Sequence, blocks: int) -> int:
        end = row.start + row.count
        if row.sample != 1 or row.start < seq.prompt_len or end != len(seq.tokens):
            return 0
        positions = seq.blocks.capacity - end + blocks * self._cache.block_size
        return min(seq.max_len - end - 1, positions, self._cache.saving.draft_room(seq, row))

    def _reserve(self, seq: Sequence, known: int, grown: list[TableUpdate], count: int) -> bool:
        """Takes the blocks that a draft of `count` tokens needs behind the `known` ones; returns False, and takes none,
        if the rows before it have left too few."""
        end = known + count
        if self._cache.blocks_for(end - seq.blocks.capacity) * self._cache.groups > self._cache.available:
            return False
        if end > seq.blocks.capacity:
            grown += self._cache.grow(seq, end)
        return True

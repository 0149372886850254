"""Decides where sequences save their recurrent states, and gives rows the places to save to and to begin with.

A place is taken when the step that writes it is planned, and counts when that step is committed. Steps run in order, so
a place may be handed on in the next plan; within a step rows run in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

from penstock.core.prefix import PrefixNode
from penstock.core.sequence import Sequence as TokenSequence
from penstock.core.states import SavedStates
from penstock.types import Row

ROLLING = 4  # blocks of an answer from one saved state to the next


class NoSaving:
    """Serves models without recurrent layers."""

    def awaited(
        self, ahead: Sequence[bytes], matched: int, other: TokenSequence, in_flight: Mapping[bytes, int]
    ) -> bytes | None:
        """Returns the hash of the block that is worth waiting for, of those `ahead` of `matched` blocks. The sequence
        `other` is computing the first of them."""
        return ahead[0]

    def begin(self, seq: TokenSequence, matched: Sequence[PrefixNode], known: int, diverges: Callable[[], int]) -> int:
        """Decides where the state of a sequence that starts will be saved; returns the place of the saved state that
        it begins with, or -1."""
        return -1

    def clip(self, seq: TokenSequence, count: int) -> int:
        return count

    def assign_saves(self, rows: list[Row], sequences: Mapping[int, TokenSequence]) -> list[Row]:
        return rows

    def draft_room(self, seq: TokenSequence, row: Row) -> int:
        return seq.max_len

    def with_draft(self, row: Row, draft: tuple[int, ...]) -> Row:
        return extended(row, draft)

    def settle(self, seq: TokenSequence, row: Row, accepted: int) -> int:
        return row.start + row.count - len(row.draft) + accepted

    def keep(self, seq: TokenSequence, row: Row) -> None: ...

    def give_back(self, *rows: Row) -> None: ...

    def leave(self, seq: TokenSequence) -> None: ...


class StateSaving(NoSaving):
    """Saves `states` at the ends of prompts, where prompts diverge, every `spacing` positions, and every few blocks of
    an answer, of which only the latest is kept."""

    def __init__(self, states: SavedStates, block_size: int, spacing: int) -> None:
        self._states = states
        self._block_size = block_size
        self._spacing = spacing
        self._restores: dict[int, tuple[int, int]] = {}  # places of states before drafts: their sequence and position

    def awaited(
        self, ahead: Sequence[bytes], matched: int, other: TokenSequence, in_flight: Mapping[bytes, int]
    ) -> bytes | None:
        """Returns the hash of the last block that the two share and that `other` saves its state after."""
        shared = sum(1 for _ in takewhile(lambda hash: in_flight.get(hash) == other.id, ahead))
        saved = [at // self._block_size - matched for at in other.states.saving]
        return next((ahead[count - 1] for count in reversed(saved) if 0 < count <= shared), None)

    def begin(self, seq: TokenSequence, matched: Sequence[PrefixNode], known: int, diverges: Callable[[], int]) -> int:
        """Blocks that are `known` beyond the matched ones show where prompts diverge, and so do prompts that wait: the
        next to come that far shall find a state there."""
        if seq.blocks.prefix_cache:
            asked = (known * self._block_size, diverges())
            seq.states.saving = save_positions(seq, self._block_size, self._spacing, self._states.total, asked)
        return self._states.read(matched[-1]) if matched else -1

    def clip(self, seq: TokenSequence, count: int) -> int:
        ahead = [at - seq.planned for at in seq.states.saving if 0 < at - seq.planned <= count]
        return ahead[0] if len(ahead) > 1 else count

    def assign_saves(self, rows: list[Row], sequences: Mapping[int, TokenSequence]) -> list[Row]:
        return [self._with_save(sequences[row.seq], row) for row in rows]

    def draft_room(self, seq: TokenSequence, row: Row) -> int:
        """Returns nothing for a row that saves its state already. A draft ends before the position at which the next
        row is to save it."""
        end = row.start + row.count
        rolling = ROLLING * self._block_size
        return 0 if row.save >= 0 else max((end // rolling + 1) * rolling - 1 - end, 0)

    def with_draft(self, row: Row, draft: tuple[int, ...]) -> Row:
        """Returns the row unchanged if it gets no place for the state before the draft."""
        place = self._states.take()
        if place is None:
            return row
        self._restores[place] = (row.seq, row.start + row.count)
        return extended(row, draft)._replace(save=place, at=row.start + row.count)

    def settle(self, seq: TokenSequence, row: Row, accepted: int) -> int:
        """Returns the position before the draft if any of it was wrong: accepted tokens are computed again from the
        state there."""
        self._give_back_restore(row.begin, row.seq, row.start)
        if not row.draft:
            return row.start + row.count
        if accepted == len(row.draft):
            self._give_back_restore(row.save, row.seq, row.at)
            return row.start + row.count
        seq.states.restore = row.save
        return row.at

    def keep(self, seq: TokenSequence, row: Row) -> None:
        seq.states.saving = [at for at in seq.states.saving if at > seq.computed]
        if row.save < 0 or row.draft:
            return
        node = seq.blocks.nodes[row.at // self._block_size - 1]
        self._states.keep(row.save, node)
        if row.at > seq.prompt_len:
            if seq.states.rolling:
                self._states.forget(seq.states.rolling)
            seq.states.rolling = node

    def give_back(self, *rows: Row) -> None:
        for row in rows:
            self._give_back_restore(row.begin, row.seq, row.start)
            self._restores.pop(row.save, None)
            if row.save >= 0:
                self._states.give_back(row.save)

    def leave(self, seq: TokenSequence) -> None:
        self._give_back_restore(seq.states.restore, seq.id, seq.computed)
        seq.states.saving, seq.states.rolling, seq.states.restore = [], None, -1

    def _with_save(self, seq: TokenSequence, row: Row) -> Row:
        at = save_position(seq, row, ROLLING * self._block_size) if seq.blocks.prefix_cache else 0
        place = self._states.take() if at else None
        return row if place is None else row._replace(save=place, at=at)

    def _give_back_restore(self, place: int, seq: int, position: int) -> None:
        """Frees a place if it holds the state of a sequence at a position before a draft. It may be another's by now:
        a place that a step in flight reads may be written by the next."""
        if self._restores.get(place) == (seq, position):
            del self._restores[place]
            self._states.give_back(place)


def extended(row: Row, draft: tuple[int, ...]) -> Row:
    count = len(draft)
    return row._replace(count=row.count + count, sample=row.sample + count, draft=draft)


def save_positions(seq: TokenSequence, block_size: int, spacing: int, places: int, asked: tuple[int, ...]) -> list[int]:
    """Returns where the state of a sequence that starts is saved: where that was `asked` for, after the last block that
    one with the same prompt could use, and every `spacing` positions, less often if that would take most places."""
    last = (len(seq.tokens) - 1) // block_size * block_size
    while last - seq.planned > spacing * max(places // 4, 1):
        spacing *= 2
    between = range((seq.planned // spacing + 1) * spacing, last, spacing)
    return sorted({at for at in (*asked, *between, last) if at > seq.planned})


def save_position(seq: TokenSequence, row: Row, rolling: int) -> int:
    """Returns where a row saves its state, or 0: as its sequence intended and, in an answer, every `rolling`
    positions."""
    end = row.start + row.count
    intended = next((at for at in seq.states.saving if row.start < at <= end), 0)
    rolled = end // rolling * rolling
    return intended or (rolled if rolled > row.start >= seq.prompt_len else 0)

"""Keeps saved recurrent states. A model with recurrent layers has more than its KV: a state that each token changes, so
a prefix can be reused only up to a block at whose end the state was saved.

A saved state belongs to its block's node in the trie: it goes when the node goes, or when it is the least recently used
one and its place is needed; then host memory may keep it (host_states.py). A place is taken when the step that writes
it is planned, and counts when that step is committed. Steps run in order, so a place may be handed on in the next plan;
within a step rows run in any order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile

from penstock.core.block_events import BlockWatcher
from penstock.core.host_states import HostStates
from penstock.core.prefix import PrefixNode
from penstock.core.sequence import Sequence as TokenSequence
from penstock.types import BlockCopy, Row

ROLLING = 4  # blocks of an answer from one saved state to the next


class NoStates:
    """Serves models without recurrent layers, whose KV is all there is."""

    total = 0
    pending: Collection[int] = ()  # places that steps in flight write, or that a draft's next row begins with

    def deepest(self, chain: Sequence[PrefixNode], count: int, host: bool = True) -> int:
        """Returns how many of a chain's first `count` blocks a sequence can begin with. Without `host`, only states on
        the device count."""
        return count

    def absent(self, matched: Sequence[PrefixNode]) -> int:
        """Returns how many states must be copied in for a sequence that begins with these nodes."""
        return 0

    def needs_block(self, node: PrefixNode) -> bool:
        """Returns whether a block that leaves the device can be of use later."""
        return True

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
        """Returns how many of `count` positions the next row may compute: a row saves its state at most once."""
        return count

    def open_step(self) -> None:
        """Begins to plan a step."""

    def assign_saves(self, rows: list[Row], sequences: Mapping[int, TokenSequence]) -> list[Row]:
        """Returns the rows of a step, each with the place where it saves its state, if it does."""
        return rows

    def draft_room(self, seq: TokenSequence, row: Row) -> int:
        """Returns how many tokens could be drafted behind a row."""
        return seq.max_len

    def with_draft(self, row: Row, draft: tuple[int, ...]) -> Row:
        """Returns the row with a draft, and with the place of the state before it."""
        return extended(row, draft)

    def settle(self, seq: TokenSequence, row: Row, accepted: int) -> int:
        """Takes note of how much of a committed row's draft was accepted; returns where its sequence goes on."""
        return row.start + row.count - len(row.draft) + accepted

    def keep(self, seq: TokenSequence, row: Row) -> None:
        """Takes note of what a committed row has saved."""

    def give_back(self, *rows: Row) -> None:
        """Frees the places of rows that wrote nothing of use."""

    def forget(self, node: PrefixNode) -> None:
        """Frees the state saved at the end of a node that leaves the trie."""

    def leave(self, seq: TokenSequence) -> None:
        """Forgets what a sequence that ends or is preempted would still have saved."""

    def clear(self) -> None:
        """Forgets all saved states."""

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Returns the copies of states that the plan being made is to carry out, in order."""
        return ()

    def try_copies(self) -> None:
        """Has a state copied to host memory and back as it is, to learn what that takes."""

    def reserve(self) -> int:
        """Returns a place in host memory for whoever writes a state there by other means; -1: there is none."""
        return -1

    def unreserve(self, place: int) -> None:
        """Takes a reserved place back; -1 is none."""

    def attach(self, node: PrefixNode | None, place: int) -> None:
        """Lets a reserved place, if it is one, be that of a node's state, unless that is known."""

    def adopt(self, node: PrefixNode, place: int) -> None:
        """Takes note that a free place has the state at the end of a node: an engine before has saved it there."""

    def where(self, node: PrefixNode) -> tuple[int, int]:
        """Returns the places of a node's state on the device and in host memory; -1: it is not there."""
        return -1, -1

    def saved(self) -> dict[PrefixNode, int]:
        """Returns the place of each saved state."""
        return {}

    def free(self) -> list[int]:
        """Returns the places that are free."""
        return []


class SavedStates(NoStates):
    """Saves states in `places` places: at the ends of prompts, where prompts diverge, every `spacing` positions, and
    every few blocks of an answer, of which only the latest is kept. The `host` may keep those whose place is needed."""

    def __init__(
        self, places: int, block_size: int, spacing: int, host: HostStates, watchers: Sequence[BlockWatcher] = ()
    ) -> None:
        self.total = places
        self.host = host
        self._watchers = watchers
        self.pending: set[int] = set()
        self._block_size = block_size
        self._spacing = spacing
        self._free = list(range(places - 1, -1, -1))
        self._saved: OrderedDict[PrefixNode, int] = OrderedDict()  # the least recently used one comes first
        self._read: set[int] = set()  # places that rows of the step being planned begin with
        self._restores: dict[int, tuple[int, int]] = {}  # places of states before drafts: their sequence and position

    def deepest(self, chain: Sequence[PrefixNode], count: int, host: bool = True) -> int:
        """Counts states on the host only if the plan being made has a place on the device for one."""
        host = host and self.host.total > 0 and (bool(self._free) or self._oldest() is not None)
        known = (node in self._saved or (host and node in self.host) for node in reversed(chain[:count]))
        return next((count - at for at, found in enumerate(known) if found), 0)

    def absent(self, matched: Sequence[PrefixNode]) -> int:
        return int(bool(matched) and matched[-1] not in self._saved)

    def needs_block(self, node: PrefixNode) -> bool:
        """Returns False for a block that no state comes after."""
        return bool(node.children) or node in self._saved or node in self.host

    def awaited(
        self, ahead: Sequence[bytes], matched: int, other: TokenSequence, in_flight: Mapping[bytes, int]
    ) -> bytes | None:
        """Returns the hash of the last block that the two share and that `other` saves its state after."""
        shared = sum(1 for _ in takewhile(lambda hash: in_flight.get(hash) == other.id, ahead))
        saved = [at // self._block_size - matched for at in other.saving]
        return next((ahead[count - 1] for count in reversed(saved) if 0 < count <= shared), None)

    def begin(self, seq: TokenSequence, matched: Sequence[PrefixNode], known: int, diverges: Callable[[], int]) -> int:
        """Blocks that are `known` beyond the matched ones show where prompts diverge, and so do prompts that wait: the
        next to come that far shall find a state there."""
        if seq.prefix_cache:
            asked = (known * self._block_size, diverges())
            seq.saving = save_positions(seq, self._block_size, self._spacing, self.total, asked)
        return self._read_state(matched[-1]) if matched else -1

    def clip(self, seq: TokenSequence, count: int) -> int:
        ahead = [at - seq.planned for at in seq.saving if 0 < at - seq.planned <= count]
        return ahead[0] if len(ahead) > 1 else count

    def open_step(self) -> None:
        self._read.clear()

    def assign_saves(self, rows: list[Row], sequences: Mapping[int, TokenSequence]) -> list[Row]:
        return [self._with_save(sequences[row.seq], row) for row in rows]

    def draft_room(self, seq: TokenSequence, row: Row) -> int:
        """Returns nothing for a row that saves its state already. A draft ends before the position at which the next
        row is to save it."""
        end = row.start + row.count
        rolling = ROLLING * self._block_size
        return 0 if row.save >= 0 else max((end // rolling + 1) * rolling - 1 - end, 0)

    def with_draft(self, row: Row, draft: tuple[int, ...]) -> Row:
        """Returns the row as it was if there is no place for the state before the draft."""
        place = self._take()
        if place is None:
            return row
        self._restores[place] = (row.seq, row.start + row.count)
        return extended(row, draft)._replace(save=place, at=row.start + row.count)

    def settle(self, seq: TokenSequence, row: Row, accepted: int) -> int:
        """Returns the position before the draft if any of it was wrong: what was accepted is computed again from the
        state there."""
        self._give_back_restore(row.begin, row.seq, row.start)
        if not row.draft:
            return row.start + row.count
        if accepted == len(row.draft):
            self._give_back_restore(row.save, row.seq, row.at)
            return row.start + row.count
        seq.restore = row.save
        return row.at

    def keep(self, seq: TokenSequence, row: Row) -> None:
        seq.saving = [at for at in seq.saving if at > seq.computed]
        if row.save < 0 or row.draft:
            return
        node = seq.nodes[row.at // self._block_size - 1]
        self._keep_at(row.save, node)
        if row.at > seq.prompt_len:
            if seq.rolling:
                self.forget(seq.rolling)
            seq.rolling = node

    def give_back(self, *rows: Row) -> None:
        for row in rows:
            self._give_back_restore(row.begin, row.seq, row.start)
            self._restores.pop(row.save, None)
            if row.save >= 0:
                self._give_back_place(row.save)

    def forget(self, node: PrefixNode) -> None:
        self.host.forget(node)
        if node in self._saved:
            self._free.append(self._lose(node))

    def clear(self) -> None:
        for node in (*self._saved, *self.host.kept()):
            self.forget(node)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        copies, self.host.copies = tuple(self.host.copies), []
        return copies

    def try_copies(self) -> None:
        if self._saved and self.host.total:
            self.host.try_copies(next(iter(self._saved.values())))

    def leave(self, seq: TokenSequence) -> None:
        self._give_back_restore(seq.restore, seq.id, seq.computed)
        seq.saving, seq.rolling, seq.restore = [], None, -1

    def reserve(self) -> int:
        return self.host.reserve()

    def unreserve(self, place: int) -> None:
        if place >= 0:
            self.host.give_back([place])

    def attach(self, node: PrefixNode | None, place: int) -> None:
        if node is None or place < 0 or node in self._saved or node in self.host:
            self.unreserve(place)
        else:
            self.host.fill(node, place)

    def adopt(self, node: PrefixNode, place: int) -> None:
        if place in self._free and node not in self._saved:
            self._free.remove(place)
            self._saved[node] = place

    def where(self, node: PrefixNode) -> tuple[int, int]:
        return self._saved.get(node, -1), self.host.place(node)

    def saved(self) -> dict[PrefixNode, int]:
        return dict(self._saved)

    def free(self) -> list[int]:
        return list(self._free)

    def _read_state(self, node: PrefixNode) -> int:
        """Returns the place of a node's state, which is copied in first if it is on the host alone."""
        if node not in self._saved:
            kept, place = self.host.pin(node), self._take()
            assert place is not None, "whoever found the state has found a place for it"
            self._own(node, place)
            self.host.load(node, kept, place)
        self._saved.move_to_end(node)
        self._read.add(self._saved[node])
        return self._saved[node]

    def _with_save(self, seq: TokenSequence, row: Row) -> Row:
        at = save_position(seq, row, ROLLING * self._block_size) if seq.prefix_cache else 0
        place = self._take() if at else None
        return row if place is None else row._replace(save=place, at=at)

    def _take(self) -> int | None:
        """Returns a place to save to; None if rows of this step or of those in flight use all of them."""
        if self._free:
            place = self._free.pop()
        else:
            oldest = self._oldest()
            if oldest is None:
                return None
            place = self._lose(oldest)
            self.host.keep(oldest, place)
        self.pending.add(place)
        return place

    def _oldest(self) -> PrefixNode | None:
        """Returns the node of the least recently used state that no row of the step being planned begins with."""
        return next((node for node, place in self._saved.items() if place not in self._read), None)

    def _keep_at(self, place: int, node: PrefixNode) -> None:
        if node in self._saved:
            self._give_back_place(place)
        else:
            self._own(node, place)
            self.host.duplicated(node)
        self._saved.move_to_end(node)

    def _own(self, node: PrefixNode, place: int) -> None:
        """Lets a place that was taken be that of a node's state."""
        self.pending.remove(place)
        self._saved[node] = place
        for watcher in self._watchers:
            watcher.state_saved(node, place)

    def _lose(self, node: PrefixNode) -> int:
        """Takes a node's state from its place, and returns that."""
        place = self._saved.pop(node)
        for watcher in self._watchers:
            watcher.state_lost(place)
        return place

    def _give_back_restore(self, place: int, seq: int, position: int) -> None:
        """Frees a place if it holds the state of a sequence at a position before a draft. It may be another's by now:
        a place that a step in flight reads may be written by the next."""
        if self._restores.get(place) == (seq, position):
            del self._restores[place]
            self._give_back_place(place)

    def _give_back_place(self, place: int) -> None:
        self.pending.remove(place)
        self._free.append(place)


def extended(row: Row, draft: tuple[int, ...]) -> Row:
    """Returns a row that verifies a draft behind its own positions."""
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
    intended = next((at for at in seq.saving if row.start < at <= end), 0)
    rolled = end // rolling * rolling
    return intended or (rolled if rolled > row.start >= seq.prompt_len else 0)

"""Keeps saved recurrent states. A model with recurrent layers has more than its KV: a state that each token changes, so
a prefix can be reused only up to a block at whose end the state was saved.

A saved state belongs to its block's node in the trie: it goes when the node goes, or when it is the least recently used
one and its place is needed; then host memory may keep it (host_states.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from penstock.core.block_events import Watchers
from penstock.core.host_states import HostStates
from penstock.core.prefix import PrefixNode
from penstock.types import BlockCopy


class NoStates:
    """Serves models without recurrent layers, whose KV is all there is."""

    total = 0
    pending: Collection[int] = ()  # places that steps in flight write, or that a draft's next row begins with

    def deepest(self, chain: Sequence[PrefixNode], count: int, host: bool = True) -> int:
        """Returns how many of a chain's first `count` blocks a sequence can begin with. Without `host`, only states on
        the device count."""
        return count

    def absent(self, matched: Sequence[PrefixNode]) -> int:
        return 0

    def needs_block(self, node: PrefixNode) -> bool:
        return True

    def open_step(self) -> None: ...

    def forget(self, node: PrefixNode) -> None: ...

    def clear(self) -> None: ...

    def take_copies(self) -> tuple[BlockCopy, ...]:
        return ()

    def try_copies(self) -> None: ...

    def reserve(self) -> int:
        """Returns a place in host memory that the caller fills itself; -1: there is none."""
        return -1

    def unreserve(self, place: int) -> None: ...

    def attach(self, node: PrefixNode | None, place: int) -> None:
        """Makes a reserved place hold a node's state, unless the state is known. -1 is ignored."""

    def adopt(self, node: PrefixNode, place: int) -> None: ...

    def where(self, node: PrefixNode) -> tuple[int, int]:
        """Returns the places of a node's state on the device and in host memory; -1: it is not there."""
        return -1, -1

    def saved(self) -> dict[PrefixNode, int]:
        return {}

    def free(self) -> list[int]:
        return []


class SavedStates(NoStates):
    """Saves states in `places` places of the device. The `host` may keep states whose place is needed."""

    def __init__(self, places: int, host: HostStates, watchers: Watchers) -> None:
        self.total = places
        self.host = host
        self.pending: set[int] = set()
        self._watchers = watchers
        self._free = list(range(places - 1, -1, -1))
        self._saved: OrderedDict[PrefixNode, int] = OrderedDict()  # the least recently used one comes first
        self._read: set[int] = set()  # places that rows of the step being planned begin with

    def deepest(self, chain: Sequence[PrefixNode], count: int, host: bool = True) -> int:
        """Counts states on the host only if the plan being made has a place on the device for one."""
        host = host and self.host.total > 0 and (bool(self._free) or self._oldest() is not None)
        known = (node in self._saved or (host and node in self.host) for node in reversed(chain[:count]))
        return next((count - at for at, found in enumerate(known) if found), 0)

    def absent(self, matched: Sequence[PrefixNode]) -> int:
        return int(bool(matched) and matched[-1] not in self._saved)

    def needs_block(self, node: PrefixNode) -> bool:
        return bool(node.children) or node in self._saved or node in self.host

    def open_step(self) -> None:
        self._read.clear()

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

    def read(self, node: PrefixNode) -> int:
        """Returns the place of a node's state, which is copied in first if it is only on the host."""
        if node not in self._saved:
            kept, place = self.host.pin(node), self.take()
            assert place is not None, "whoever found the state has found a place for it"
            self._own(node, place)
            self.host.load(node, kept, place)
        self._saved.move_to_end(node)
        self._read.add(self._saved[node])
        return self._saved[node]

    def take(self) -> int | None:
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
        return next((node for node, place in self._saved.items() if place not in self._read), None)

    def keep(self, place: int, node: PrefixNode) -> None:
        if node in self._saved:
            self.give_back(place)
        else:
            self._own(node, place)
            self.host.duplicated(node)
        self._saved.move_to_end(node)

    def _own(self, node: PrefixNode, place: int) -> None:
        self.pending.remove(place)
        self._saved[node] = place
        self._watchers.state_saved(node, place)

    def _lose(self, node: PrefixNode) -> int:
        place = self._saved.pop(node)
        self._watchers.state_lost(place)
        return place

    def give_back(self, place: int) -> None:
        self.pending.remove(place)
        self._free.append(place)

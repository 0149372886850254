"""Where states of sequences are saved. A model with recurrent layers has more than its KV: a state that each token
changes, so a prefix can be used again only up to a block at whose end the state was saved.

A saved state belongs to its block's node in the trie: it goes when that does, or when it is the one that was not used
for longest and its place is needed. A place is taken when the step that writes it is planned, and counts when that is
committed. Steps run in order, so one may be handed on in the next plan; within a step rows run in any order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from penstock.core.prefix import Node


class StatePool:
    def __init__(self, places: int) -> None:
        self.total = places
        self.pending: set[int] = set()  # to be written by steps that are not committed yet
        self._free = list(range(places - 1, -1, -1))
        self._saved: OrderedDict[Node, int] = OrderedDict()  # the one not used for longest comes first
        self._read: set[int] = set()  # in the step that is being planned

    def open_step(self) -> None:
        self._read.clear()

    def deepest(self, chain: Sequence[Node]) -> int:
        """How many nodes of a chain from the root there are up to the last one with a state."""
        return next((count for count in range(len(chain), 0, -1) if chain[count - 1] in self._saved), 0)

    def read(self, node: Node) -> int:
        """The place of its state, for a row that begins there."""
        self._saved.move_to_end(node)
        self._read.add(self._saved[node])
        return self._saved[node]

    def take(self) -> int | None:
        """A place to save to; none where rows of this step or of those in flight use all of them."""
        if self._free:
            place = self._free.pop()
        else:
            oldest = next((node for node, place in self._saved.items() if place not in self._read), None)
            if oldest is None:
                return None
            place = self._saved.pop(oldest)
        self.pending.add(place)
        return place

    def keep(self, place: int, node: Node) -> None:
        """What was written there is the state at the end of this node's block."""
        if node in self._saved:
            self.give_back(place)
        else:
            self.pending.remove(place)
            self._saved[node] = place
        self._saved.move_to_end(node)

    def give_back(self, place: int) -> None:
        """Nothing of use was written there."""
        self.pending.remove(place)
        self._free.append(place)

    def forget(self, node: Node) -> None:
        if node in self._saved:
            self._free.append(self._saved.pop(node))

    def saved(self) -> dict[Node, int]:
        return dict(self._saved)

    def free(self) -> list[int]:
        return list(self._free)

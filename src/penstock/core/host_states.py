"""Keeps the host tier of saved recurrent states: places in host memory that hold states which have left the device.

A state moves independently of its block: a state on the device may belong to a block on the host, and vice versa.
States on both tiers lose their place in host memory first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from penstock.core.prefix import PrefixNode
from penstock.types import BlockCopy


class HostStates:
    """Maps nodes to places of their states, and collects the copies of the next plan. `pays` decides whether a node's
    state is worth its copies."""

    def __init__(self, places: int, pays: Callable[[PrefixNode], bool]) -> None:
        self.total = places
        self.copies: list[BlockCopy] = []
        self.reserved: set[int] = set()
        self._pays = pays
        self._free = list(range(places - 1, -1, -1))
        self._spare: OrderedDict[PrefixNode, int] = OrderedDict()  # the device has these states too
        self._only: OrderedDict[PrefixNode, int] = OrderedDict()  # it does not; the least recently used comes first

    def __contains__(self, node: PrefixNode) -> bool:
        return node in self._only or node in self._spare

    def place(self, node: PrefixNode) -> int:
        """Returns the place of a node's state; -1 if it is not here."""
        return self._only.get(node, self._spare.get(node, -1))

    # -- copies out and in ----------------------------------------------------------------------------------------

    def keep(self, node: PrefixNode, state: int) -> None:
        if node in self._spare:
            self._only[node] = self._spare.pop(node)
        elif self.total and self._pays(node) and (place := self._take()) is not None:
            self._only[node] = place
            self.copies.append(BlockCopy(state, place, "out"))

    def pin(self, node: PrefixNode) -> int:
        return self._only.pop(node)

    def load(self, node: PrefixNode, place: int, state: int) -> None:
        self.copies.append(BlockCopy(state, place, "in"))
        self._spare[node] = place

    def try_copies(self, state: int) -> None:
        if (place := self.reserve()) >= 0:
            self.copies += [BlockCopy(state, place, "out"), BlockCopy(state, place, "in")]
            self.give_back([place])

    def duplicated(self, node: PrefixNode) -> None:
        if node in self._only:
            self._spare[node] = self._only.pop(node)

    def forget(self, node: PrefixNode) -> None:
        for queue in (self._spare, self._only):
            if node in queue:
                self._free.append(queue.pop(node))

    # -- places --------------------------------------------------------------------------------------------------

    def reserve(self) -> int:
        """Takes a place that the caller fills itself; returns -1 if there is none."""
        place = self._take()
        if place is None:
            return -1
        self.reserved.add(place)
        return place

    def give_back(self, places: Iterable[int]) -> None:
        for place in places:
            self.reserved.remove(place)
            self._free.append(place)

    def fill(self, node: PrefixNode, place: int) -> None:
        self.reserved.remove(place)
        self._only[node] = place

    def kept(self) -> dict[PrefixNode, int]:
        return {**self._spare, **self._only}

    def only(self) -> set[PrefixNode]:
        return set(self._only)

    def free(self) -> list[int]:
        return list(self._free)

    def _take(self) -> int | None:
        """Returns a place; the one of what the device has too or, if there is nothing, of the least recently used state
        if none is free. None: there is none."""
        if self._free:
            return self._free.pop()
        queue = self._spare or self._only
        return queue.popitem(last=False)[1] if queue else None

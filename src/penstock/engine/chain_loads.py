"""Loads chains of blocks into reserved places of the host tier, where the prefix cache finds them (core/tiers.py), from
wherever else they are: disk, or another engine. The scheduler knows nothing of either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.core.incoming import attach
from penstock.core.kvcache import KvCache
from penstock.engine.host_blocks import HostBlocks, HostStateCopies
from penstock.engine.kv_disk.loading import Loading, Targets
from penstock.types import Limits


class ChainLoad(NamedTuple):
    """Is a part of a prompt that is being read."""

    loading: Loading[Any]
    salt: str
    prompt: Sequence[int]
    first: int  # block
    places: list[list[int]]  # a place in each layer group, for each block
    state: int = -1  # the place of the state at the end of the last; -1: there are none


class Reserved(NamedTuple):
    """Holds places for a chain of blocks, and their memory."""

    places: list[list[int]]  # a place in each layer group, for each block; -1: not wanted
    targets: Sequence[Targets]
    state: int = -1  # the place of the state at the chain's end; -1: there are none
    state_target: memoryview | None = None

    @property
    def parts(self) -> Sequence[Targets]:
        if self.state_target is None:
            return self.targets
        return [*self.targets[:-1], [*self.targets[-1], self.state_target]]


class ChainLoads:
    """Reserves places of the `host` for blocks that are read in threads, and puts the blocks into the `cache`. With
    `states`, the last block of a chain comes with the recurrent state at its end."""

    def __init__(self, cache: KvCache, host: HostBlocks | None, states: HostStateCopies | None, limits: Limits) -> None:
        self._cache = cache
        self._host = host
        self._states = states
        self._size = limits.block_size
        self._windows = limits.windows
        self._abandoned: list[ChainLoad] = []  # threads may still write to their places

    def wanted(self, count: int, first: int) -> list[list[bool]]:
        """Returns of each block whether its layer groups are needed, if a request begins after `count` blocks."""
        starts = self._cache.trie.window_starts((first + count) * self._size)
        return [[first + at >= start for start in starts] for at in range(count)]

    def reusable(self, present: Sequence[int], first: int) -> int:
        """Returns how many blocks a request can begin with, from block `first` on: the most whose last windows are
        there too and, for models with recurrent layers, the state. `present` has for each block a bit for each layer
        group whose block is there and, after these, one for a state."""
        count = len(present)
        while count > 0:
            wanted = self.wanted(count, first)
            holes = [
                at
                for at in range(count)
                for group, want in enumerate(wanted[at])
                if want and not present[at] >> group & 1
            ]
            if self._states is not None and not present[count - 1] >> len(self._windows) & 1:
                holes.append(count - 1)
            if not holes:
                break
            count = max(holes)
        return count

    def reserve(self, count: int, first: int) -> Reserved | None:
        """Returns places for `count` blocks; None if they do not all fit."""
        if self._host is None:
            return None
        wanted, states = self.wanted(count, first), self._cache.states
        places = self._cache.host.reserve(sum(map(sum, wanted)))
        state = -1 if self._states is None else states.reserve()
        if len(places) < sum(map(sum, wanted)) or (self._states is not None and state < 0):
            self._cache.host.give_back(places)
            states.unreserve(state)
            return None
        left = iter(places)
        chosen = [[next(left) if want else -1 for want in groups] for groups in wanted]
        targets = [[self._host.fill(place) if place >= 0 else None for place in each] for each in chosen]
        return Reserved(chosen, targets, state, None if self._states is None else self._states.fill(state))

    def deliver(self, load: ChainLoad, tier: str) -> int:
        """Puts the blocks read so far into the prefix cache, as coming from this tier; returns how many blocks it
        uses."""
        usable = min(load.loading.usable, len(load.places))
        state = load.state if load.loading.whole else -1
        used = attach(self._cache, load.salt, load.prompt, load.first, load.places[:usable], tier, state)
        left = -1 if state >= 0 else load.state
        self._abandoned.append(load._replace(places=load.places[usable:], state=left))
        self.collect()
        return used

    def collect(self) -> None:
        for load in [load for load in self._abandoned if load.loading.finished]:
            self._abandoned.remove(load)
            self._cache.host.give_back(place for each in load.places for place in each if place >= 0)
            self._cache.states.unreserve(load.state)

    def free_places(self, load: ChainLoad) -> None:
        """Frees the places of blocks that were read and that the device has now. The next prompt is read into the same
        memory, which is faster than memory that was never touched. Windowed blocks stay: the device loses them soon."""
        if any(self._windows):
            return
        for node in self._cache.trie.match(load.salt, load.prompt, load.first + len(load.places))[load.first :]:
            if self._cache.trie.on_device(node):
                self._cache.host.drop(node)

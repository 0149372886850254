"""Keeps copies of KV blocks, and of saved recurrent states, in host memory, carries out the copies of plans and
measures them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from penstock.backend.base import Backend, BlockMemory, HostRoom
from penstock.core.prefix import PrefixNode
from penstock.core.tiers import CopyCosts
from penstock.errors import StepFailed
from penstock.types import BlockCopy, Limits, StepPlan

PROBED = 4  # blocks that are copied at first, to know what that costs


class HostCopies:
    """Stores the bytes of blocks in places. What plans number from 0 on are the blocks `numbered` of a `memory`, none
    of which is in use yet. `observe` learns how long copies take: direction, blocks, seconds."""

    def __init__(
        self, places: int, memory: BlockMemory, numbered: range, observe: Callable[[str, int, float], None]
    ) -> None:
        self.block_bytes = len(memory.export_blocks([0]))
        self.places = places
        self._memory = memory
        self._numbered = numbered
        self._observe = observe
        self._opened: HostRoom | None = None
        self.release()
        self._probe(range(min(PROBED, len(numbered), places)))

    def carry_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks in and out, in order; neighbours in one direction are copied together. Learns how long earlier
        copies took."""
        for direction, group in groupby(copies, key=lambda copy: copy.direction):
            run = list(group)
            blocks, places = [self._numbered[copy.block] for copy in run], [copy.place for copy in run]
            if direction == "out":
                self._room().copy_out(blocks, places)
                for place in places:
                    self._written[place] = 1
            else:
                self._check_written(places)
                self._room().copy_in(blocks, places)
        self._learn()

    def write(self, place: int, data: bytes | memoryview) -> None:
        self.fill(place)[:] = data

    def fill(self, place: int) -> memoryview:
        """Returns the memory of a reserved place, to write a block's bytes there before the place is used, in any
        thread."""
        self._written[place] = 1
        return self.read(place)

    def read(self, place: int) -> memoryview:
        """Returns the bytes in a place, which the next copy to it changes."""
        room = self._room()
        room.finish()
        return memoryview(room.array[place])

    def copy_of(self, block: int, place: int) -> bytes | None:
        """Returns the bytes of a block on the device or, if it is not there (-1), in a place; None: it is nowhere."""
        if block >= 0:
            return self._memory.export_blocks([self._numbered[block]])
        return bytes(self.read(place)) if place >= 0 else None

    def release(self) -> None:
        if self._opened is not None:
            self._opened.close()
        self._opened = None
        self._written = bytearray(self.places)

    def _room(self) -> HostRoom:
        if self._opened is None:
            self._opened = self._memory.host_room(self.places)
        return self._opened

    def _check_written(self, places: Sequence[int]) -> None:
        missing = [place for place in places if not self._written[place]]
        if missing:
            raise StepFailed(f"KV blocks cannot be copied in: nothing was copied out to places {missing}")

    def _probe(self, places: Sequence[int]) -> None:
        room, blocks = self._room(), self._numbered[: len(places)]
        for _ in range(2):
            room.finish()
            room.timings()
            room.copy_out(blocks, places)
            room.copy_in(blocks, places)
        room.finish()
        self._learn()

    def _learn(self) -> None:
        for direction, blocks, seconds in self._room().timings():
            self._observe(direction, blocks, seconds)


class HostBlocks(HostCopies):
    """Stores KV blocks that have left the device. `costs` learn what copies take."""

    def __init__(self, limits: Limits, memory: BlockMemory, costs: CopyCosts) -> None:
        super().__init__(limits.host_places, memory, range(limits.num_blocks), costs.observe)

    def contents(self, node: PrefixNode, group: int) -> bytes | None:
        """Returns a copy of a node's block of a layer group; None if it is on neither tier."""
        return self.copy_of(node.blocks[group], node.places[group])


class HostStateCopies(HostCopies):
    """Stores saved recurrent states that have left the device. They follow the states of the slots."""

    def __init__(self, limits: Limits, memory: BlockMemory, costs: CopyCosts) -> None:
        numbered = range(limits.max_rows, limits.max_rows + limits.states)
        super().__init__(limits.host_states, memory, numbered, costs.observe_states)


class HostMemory(NamedTuple):
    """Holds an engine's copies in host memory; None: it has none of that kind."""

    blocks: HostBlocks | None = None
    states: HostStateCopies | None = None

    @classmethod
    def open(cls, limits: Limits, backend: Backend, costs: CopyCosts) -> HostMemory:
        blocks = HostBlocks(limits, backend.kv, costs) if limits.host_places else None
        if not min(limits.states, limits.host_states):
            return cls(blocks)
        return cls(blocks, HostStateCopies(limits, backend.states, costs))

    def carry_out(self, plan: StepPlan) -> None:
        if plan.copies and self.blocks is not None:
            self.blocks.carry_out(plan.copies)
        if plan.state_copies and self.states is not None:
            self.states.carry_out(plan.state_copies)

    def release(self) -> None:
        for each in self:
            if each is not None:
                each.release()

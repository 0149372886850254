"""Keeps the host tier of the prefix cache: places in host memory that hold blocks which have left the device.

A place holds one block. Evicted blocks are copied out to places if that pays, and their node stays in the trie; a
sequence that begins with such nodes takes blocks for them, and its plan copies them in. A node that is back on the
device keeps its places until they are needed, so that leaving again costs nothing.

Nodes leave the device deepest first and enter the queue here in that order. A node whose blocks are only on the host
thus always comes after its children: the front of the queue is a leaf.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

from penstock.core.prefix import Idle, PrefixNode
from penstock.core.sequence import Sequence as TokenSequence
from penstock.core.step_cost import PromptCost
from penstock.types import BlockCopy

DEVICE, RAM, DISK, PEER = "device", "ram", "disk", "peer"  # where reused tokens come from; a peer is another engine


def worth_loading(tokens: int, context: int, seconds: float, prompts: PromptCost) -> bool:
    """Returns whether copying for `seconds` is at least as fast as computing `tokens` tokens after `context` others;
    True before any prompt was measured."""
    return not prompts.known or seconds <= prompts.seconds(tokens, tokens * (context + tokens / 2))


class CopyCosts:
    """Compares the measured costs of copying blocks and computing them. Times come in as arguments.

    Blocks that do not pay are not copied, so a faster copy speed would go unnoticed. Hence a small share of the time
    spent on computing such blocks is saved up for trials: some blocks are copied out and back.
    """

    MEMORY = 3.0  # weight of all earlier copies, relative to a new one: rates change
    OUTLIER = 3.0  # cap on a copy, in expected times: stalls are outliers
    TRIALS = 0.05  # share of the time spent on computing blocks that do not pay to copy
    TRIED = 4  # blocks, and a state

    def __init__(self, prompts: PromptCost | None = None) -> None:
        self._prompts = prompts or PromptCost()
        self._copied: dict[str, tuple[float, float]] = {}  # decayed: blocks or states, and seconds
        self._saved_up = 0.0  # seconds for trials

    def observe(self, direction: str, blocks: int, seconds: float) -> None:
        before, took = self._copied.get(direction, (0.0, 0.0))
        if before:
            seconds = min(seconds, self.OUTLIER * blocks * took / before)
            kept = min(1.0, self.MEMORY * blocks / before)
            before, took = kept * before, kept * took
        self._copied[direction] = before + blocks, took + seconds

    def observe_states(self, direction: str, states: int, seconds: float) -> None:
        self.observe(f"states {direction}", states, seconds)

    def seconds(self, direction: str, blocks: int, states: int = 0) -> float:
        """Returns the seconds to copy these blocks and states; 0 before any was measured."""
        return self._took(direction, blocks) + (self._took(f"states {direction}", states) if states else 0.0)

    def _took(self, what: str, count: int) -> float:
        copied, took = self._copied.get(what, (0.0, 0.0))
        return count * took / copied if copied else 0.0

    def pays_to_load(self, tokens: int, context: int, blocks: int, states: int = 0) -> bool:
        return worth_loading(tokens, context, self.seconds("in", blocks, states), self._prompts)

    def may_pay_to_keep(self, tokens: int, context: int, blocks: int, states: int = 0) -> bool:
        seconds = self.seconds("in", blocks, states) + self.seconds("out", blocks, states)
        return worth_loading(tokens, context, seconds, self._prompts)

    def decline(self, tokens: int, context: int) -> None:
        """Saves up time for trials: `tokens` after `context` others are computed because copies do not pay."""
        self._saved_up += self.TRIALS * self._prompts.seconds(tokens, tokens * (context + tokens / 2))

    def trial_due(self) -> bool:
        """Returns whether enough is saved up for a trial, and spends it."""
        seconds = sum(self.seconds(direction, self.TRIED, 1) for direction in ("in", "out"))
        due = self._saved_up > seconds
        self._saved_up = 0.0 if due else self._saved_up
        return due


class HostTier:
    """Knows which of `places` places hold the blocks of which nodes, and collects the copies of the next plan. `lost`
    is called with every node that has lost places."""

    def __init__(self, places: int, windows: Sequence[int], lost: Callable[[PrefixNode], None]) -> None:
        self.total = places
        self.copies: list[BlockCopy] = []
        self.copied_in = self.copied_out = 0  # blocks
        self.reserved: set[int] = set()
        self._full = tuple(group for group, window in enumerate(windows) if not window)
        self._lost = lost
        self._free = list(range(places - 1, -1, -1))
        self._spare: OrderedDict[Idle, None] = OrderedDict()  # the device has these blocks too
        self._only: OrderedDict[Idle, None] = OrderedDict()  # it does not; the least recently used comes first

    @property
    def used(self) -> int:
        return self.total - len(self._free) - len(self.reserved)

    @property
    def room(self) -> int:
        """Returns how many blocks can come, at least, without costing the only copy of another."""
        return len(self._free) + len(self._spare)

    def blocks_of(self, entries: Iterable[Idle]) -> int:
        return sum(len(self._parts(entry)[1]) for entry in entries)

    # -- copies out and in ----------------------------------------------------------------------------------------

    def keep(self, entry: Idle, pays: bool) -> bool:
        """Takes over blocks that leave the device, while their node still has them. Returns False if they have no
        places and either copying does not pay or no place is free."""
        node, groups = self._parts(entry)
        if node.places[groups[0]] >= 0:
            del self._spare[entry]
        elif pays and (places := self._take(len(groups))):
            for group, place in zip(groups, places, strict=True):
                node.places[group] = place
                self.copies.append(BlockCopy(node.blocks[group], place, "out"))
            self.copied_out += len(groups)
            node.tier = RAM
        else:
            return False
        self._only[entry] = None
        return True

    def pin(self, entry: Idle) -> None:
        del self._only[entry]

    def load(self, entry: Idle, take: Callable[[], int]) -> None:
        node, groups = self._parts(entry)
        for group in groups:
            node.blocks[group] = take()
            self.copies.append(BlockCopy(node.blocks[group], node.places[group], "in"))
        self.copied_in += len(groups)
        self._spare[entry] = None

    def try_copies(self, blocks: Sequence[int]) -> None:
        places = self.reserve(len(blocks))
        self.copies += [BlockCopy(block, place, "out") for block, place in zip(blocks, places, strict=False)]
        self.copies += [BlockCopy(block, place, "in") for block, place in zip(blocks, places, strict=False)]
        self.give_back(places)

    def duplicated(self, entry: Idle) -> None:
        if entry in self._only:
            del self._only[entry]
            self._spare[entry] = None

    # -- places --------------------------------------------------------------------------------------------------

    def reserve(self, count: int) -> list[int]:
        """Takes at most `count` places that the caller fills itself. The least recently used blocks make room. Places
        come in order, because neighbours are copied in faster."""
        while len(self._free) < count and self._forget():
            pass
        taken = sorted(self._free.pop() for _ in range(min(count, len(self._free))))
        self.reserved.update(taken)
        return taken

    def give_back(self, places: Iterable[int]) -> None:
        for place in places:
            self.reserved.remove(place)
            self._free.append(place)

    def fill(self, entry: Idle, places: Sequence[int], tier: str) -> None:
        node, groups = self._parts(entry)
        for group in groups:
            self.reserved.remove(places[group])
            node.places[group] = places[group]
        node.tier = tier
        self._only[entry] = None

    def touch(self, entry: Idle) -> None:
        if entry in self._only:
            self._only.move_to_end(entry)

    def drop(self, node: PrefixNode) -> None:
        for group, place in enumerate(node.places):
            if place >= 0:
                self._free.append(place)
                node.places[group] = -1
                entry = node if group in self._full else (node, group)
                self._spare.pop(entry, None)
                self._only.pop(entry, None)

    def clear(self) -> None:
        while self._forget():
            pass

    def spare(self) -> Collection[Idle]:
        return self._spare.keys()

    def only(self) -> Collection[Idle]:
        return self._only.keys()

    def free(self) -> list[int]:
        return list(self._free)

    def _take(self, count: int) -> list[int]:
        while len(self._free) < count:
            if not self._forget():
                return []
        return [self._free.pop() for _ in range(count)]

    def _forget(self) -> bool:
        """Frees the places of what the device has too or, if there is nothing, of the least recently used leaf. Returns
        False if nothing is left."""
        queue = self._spare or self._only
        if not queue:
            return False
        node, groups = self._parts(queue.popitem(last=False)[0])
        for group in groups:
            self._free.append(node.places[group])
            node.places[group] = -1
        self._lost(node)
        return True

    def _parts(self, entry: Idle) -> tuple[PrefixNode, tuple[int, ...]]:
        return (entry, self._full) if isinstance(entry, PrefixNode) else (entry[0], entry[1:])


class ReuseSources:
    """Remembers which nodes came from a peer straight to the device."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._taken_in: set[PrefixNode] = set()  # from a peer, and reused by nobody yet

    def add(self, node: PrefixNode) -> None:
        self._taken_in.add(node)

    def forget(self, node: PrefixNode) -> None:
        self._taken_in.discard(node)

    def count(
        self, seq: TokenSequence, matched: list[PrefixNode], absent: list[Idle], tail: int
    ) -> tuple[tuple[str, int], ...]:
        """Returns how many tokens of its prompt a sequence reuses from each tier; `tail` are behind those nodes."""
        loaded = {entry if isinstance(entry, PrefixNode) else entry[0] for entry in absent}
        tokens = Counter[str]()
        for node in matched:
            position = node.depth * self._block_size
            tier = node.tier if node in loaded else PEER if node in self._taken_in else DEVICE
            tokens[tier] += min(max(seq.prompt_len - position, 0), self._block_size)
        if tail:
            tokens[DEVICE] += min(max(seq.prompt_len - len(matched) * self._block_size, 0), tail)
        for node in loaded:
            node.tier = RAM
        self._taken_in.difference_update(matched)
        return tuple((tier, count) for tier, count in tokens.items() if count)

"""Keeps who holds which KV block: it is the only writer of that fact.

A block is free (in the pool), owned by the one sequence that is filling it, or published in the trie (full; held or
idle). A free block may hold a tail (tails.py). Layers that see equally far form a layer group. A sequence has a block
table for each group, all of the same length; a windowed group's blocks that no later token can see are let go as the
sequence advances.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain as chained
from itertools import islice

from penstock.core import hashing
from penstock.core.block_events import BlockWatcher, Watchers
from penstock.core.free_blocks import BlockPool, Parent, Tail, Tails
from penstock.core.host_states import HostStates
from penstock.core.in_flight import BlocksInFlight
from penstock.core.prefix import BlockTrie, Idle, PrefixNode
from penstock.core.prefix_lookup import PrefixLookup
from penstock.core.sequence import Sequence
from penstock.core.state_saving import NoSaving, StateSaving
from penstock.core.states import NoStates, SavedStates
from penstock.core.tiers import CopyCosts, HostTier, ReuseSources
from penstock.types import BlockCopy, Limits, Row, TableUpdate, blocks_for


class LayerGroups:
    """Knows how many blocks sequences take in each layer group."""

    def __init__(self, limits: Limits) -> None:
        self._block_size = size = limits.block_size
        self.windowed = tuple(
            (group, blocks_for(limits.max_len, (window,), size, limits.step_tokens))
            for group, window in enumerate(limits.windows)
            if window
        )  # groups, with the most blocks that a sequence holds at once
        self.window_blocks = max(-(-(window - 1) // size) for window in limits.windows)  # blocks that a prefix needs
        self._full = len(limits.windows) - len(self.windowed)

    def left_to_take(self, end: int, entries: int, starts: list[int]) -> int:
        """Returns how many more blocks reach `end` positions, with `entries` in each block table. Blocks behind a
        window are freed meanwhile."""
        missing = max(-(-end // self._block_size) - entries, 0)  # a draft may have reached beyond the end
        taken = missing * self._full
        for group, most in self.windowed:
            taken += max(min(missing, most - entries + starts[group]), 0)
        return taken


class KvCache:
    """Gives blocks to sequences, publishes the full ones and takes them back. `chain` computes chain hashes; `watchers`
    follow the prefix cache, and `costs` decide whether copying blocks to and from host memory pays."""

    def __init__(
        self,
        limits: Limits,
        chain: hashing.Chain = hashing.chain,
        watchers: Iterable[BlockWatcher] = (),
        costs: CopyCosts | None = None,
    ) -> None:
        size = self.block_size = limits.block_size
        self.groups = len(limits.windows)
        self.watchers = Watchers(watchers)
        self.pool = BlockPool(limits.num_blocks)
        self.host = HostTier(limits.host_places, limits.windows, lambda node: self.trie.prune(node))
        self.states, self.saving = NoStates(), NoSaving()
        if limits.states:
            host = HostStates(limits.host_states, self._state_pays)
            self.states = states = SavedStates(limits.states, host, self.watchers)
            self.saving = StateSaving(states, size, self.blocks_for(limits.step_tokens) * size)
        self.trie = BlockTrie(size, limits.windows, self.host, self._forget, self.watchers.changed, self.states.forget)
        self.tails = Tails()
        self.in_flight = BlocksInFlight(size, chain, self.saving)
        self.sources = ReuseSources(size)
        self._costs = costs or CopyCosts()
        self.prefixes = PrefixLookup(size, self.trie, self.states, self.host, self._costs)
        self._layers = LayerGroups(limits)

    @property
    def available(self) -> int:
        return len(self.pool) + self.trie.idle_blocks

    def blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_size)

    # -- blocks of a sequence -----------------------------------------------------------------------------------

    def needed(self, seq: Sequence, matched: list[PrefixNode]) -> tuple[int, int]:
        """Returns how many blocks a sequence that begins with these nodes needs for its tokens, and how many idle ones
        it takes with the nodes."""
        starts = self.trie.window_starts(len(matched) * self.block_size)
        taken = self._layers.left_to_take(seq.end, len(matched), starts) + self.host.blocks_of(
            self.prefixes.absent(matched)
        )
        return taken, self.trie.idle_among(matched, starts)

    def reserved(self, seq: Sequence) -> int:
        return self._layers.left_to_take(seq.end, seq.blocks.capacity // self.block_size, seq.blocks.window_starts)

    def open(self, seq: Sequence, matched: list[PrefixNode], known: list[PrefixNode]) -> tuple[int, list[TableUpdate]]:
        """Starts a sequence on its matched prefix and puts the rest of its prompt in flight for those who come after.
        More blocks may be `known`, which it cannot begin with or which do not pay to be copied. Returns how many
        positions are computed already, and the entries of its block tables."""
        blocks = seq.blocks
        positions = len(matched) * self.block_size
        if self.host.total and len(known) > len(matched):
            self._costs.decline(self.prefixes.reusable(known) * self.block_size - positions, positions)
        starts = blocks.window_starts = self.trie.window_starts(positions)
        absent = self.trie.absent(matched, starts)
        self.trie.hold(matched, starts)
        self._load(absent)
        blocks.nodes = list(matched)
        blocks.tables = [
            [-1] * start + [node.blocks[group] for node in matched[start:]] for group, start in enumerate(starts)
        ]
        blocks.capacity, blocks.next_full = positions, positions + self.block_size
        computed = positions + self._continue_tail(seq)
        if seq.times.cached < 0:
            seq.times.reused = self.sources.count(seq, matched, absent, computed - positions)
        blocks.prefix_ends = (len(known), (seq.prompt_len - 1) // self.block_size)
        self.in_flight.start(seq, len(matched))
        tables = zip(starts, blocks.tables, strict=True)
        grown = [
            TableUpdate(seq.id, at, tuple(table[at:]), group) for group, (at, table) in enumerate(tables) if table[at:]
        ]
        return computed, grown

    def grow(self, seq: Sequence, positions: int) -> list[TableUpdate]:
        """Takes the blocks that `positions` positions need; the caller has made sure they are available."""
        blocks = seq.blocks
        missing = self.blocks_for(positions - blocks.capacity)
        grown = []
        for group, table in enumerate(blocks.tables):
            taken = tuple([self.take() for _ in range(missing)])
            grown.append(TableUpdate(seq.id, len(table), taken, group))
            table.extend(taken)
        blocks.capacity += missing * self.block_size
        return grown

    def advance(self, seq: Sequence, row: Row) -> list[TableUpdate]:
        """Publishes every block that a committed row has filled and lets go of what lies behind the windows. Where
        another sequence had computed the same block, its block replaces ours: returns those entries."""
        self.watchers.announce_arrivals()
        replaced = self._publish(seq) if seq.blocks.prefix_cache else []
        if self._layers.windowed:
            self._let_go_behind(seq)
        self.saving.keep(seq, row)
        seq.blocks.next_full = (seq.computed // self.block_size + 1) * self.block_size
        return replaced

    def release(self, seq: Sequence) -> None:
        """Takes all blocks from a sequence; published blocks stay in the trie until evicted."""
        blocks = seq.blocks
        self.trie.drop(blocks.nodes, blocks.window_starts)
        for table, start in zip(blocks.tables, blocks.window_starts, strict=True):
            for block in table[max(len(blocks.nodes), start) :]:
                self.give(block)
        self.in_flight.withdraw(seq)
        self.saving.leave(seq)
        blocks.nodes, blocks.tables, blocks.window_starts, blocks.capacity = [], [], [], 0

    def isolate(self, seq: Sequence) -> None:
        self.in_flight.withdraw(seq)
        self.saving.leave(seq)
        seq.blocks.prefix_cache = False

    def flush(self) -> None:
        for block in self.tails.blocks:
            self._forget_tail(block)
        self.watchers.drop_arrivals()
        self.states.clear()
        self.host.clear()
        while self.trie.idle_blocks:
            for block in self.trie.evict(lambda node, blocks: False):
                self.pool.give(block)

    def take(self) -> int:
        if len(self.pool) <= len(self.tails) and self.trie.idle_blocks:
            for block in self.trie.evict(self._pays):
                self.pool.give(block)
        block = self.pool.take()
        if self.tails:
            self._forget_tail(block)
        return block

    def give(self, block: int) -> None:
        self.pool.give(block)
        self.watchers.freed(block)

    def _publish(self, seq: Sequence) -> list[TableUpdate]:
        blocks = seq.blocks
        replaced = []
        for index in range(len(blocks.nodes), seq.computed // self.block_size):
            mine = [table[index] for table in blocks.tables]
            node = self.trie.publish(blocks.nodes, blocks.salt, seq.tokens, mine)
            if self._layers.windowed:
                node.kept = node.kept or any(
                    end - self._layers.window_blocks <= index < end for end in blocks.prefix_ends
                )
            blocks.nodes.append(node)
            if index < len(blocks.hashes):
                node.hash = blocks.hashes[index]
                self.in_flight.publish(seq, node.hash)
            if not node.stored:
                self.watchers.stored(node)
            if node.blocks is not mine:
                replaced += self._replace(seq, index, mine, node)
        return replaced

    def _replace(self, seq: Sequence, index: int, mine: list[int], node: PrefixNode) -> list[TableUpdate]:
        replaced = []
        for group, (own, shared) in enumerate(zip(mine, node.blocks, strict=True)):
            if own != shared:
                self.give(own)
                seq.blocks.tables[group][index] = shared
                replaced.append(TableUpdate(seq.id, index, (shared,), group))
        return replaced

    def _let_go_behind(self, seq: Sequence) -> None:
        """Frees blocks that no later row reads: rows in flight begin where the committed row ended."""
        blocks = seq.blocks
        starts = self.trie.window_starts(seq.computed)
        for group, _ in self._layers.windowed:
            table = blocks.tables[group]
            for index in range(blocks.window_starts[group], starts[group]):
                if index < len(blocks.nodes):
                    self.trie.drop_window(blocks.nodes[index], group)
                else:
                    self.give(table[index])
                table[index] = -1
        blocks.window_starts = starts

    # -- tails --------------------------------------------------------------------------------------------------

    def keep_tails(self, tails: Iterable[Tail]) -> None:
        """Keeps tails for sequences that continue them. Their blocks are free, and are taken last."""
        for tail in tails:
            self.tails.add(tail)
        self.pool.defer(self.tails.blocks)

    def _continue_tail(self, seq: Sequence) -> int:
        """Gives a sequence that starts the blocks of a tail that it can continue; returns how many positions that tail
        has computed of it. The last token is always left to compute."""
        blocks = seq.blocks
        if not self.tails or not seq.reuses_prefix:
            return 0
        parent: Parent = blocks.nodes[-1] if blocks.nodes else hashing.root(blocks.salt)
        shared, tail = self.tails.longest(
            parent, seq.tokens[blocks.capacity : min(blocks.next_full, len(seq.tokens)) - 1]
        )
        if tail is not None:
            self.tails.remove(tail)
            self.pool.take_these(tail.blocks)
            blocks.capacity += self.block_size
            for table, block in zip(blocks.tables, tail.blocks, strict=True):
                table.append(block)
        return shared

    def _forget_tail(self, block: int) -> None:
        if (tail := self.tails.holding(block)) is not None:
            self.tails.remove(tail)
            for each in tail.blocks:
                self.watchers.freed(each)

    # -- the host -----------------------------------------------------------------------------------------------

    def open_step(self) -> None:
        self.states.open_step()
        self.watchers.announce_arrivals()

    def take_copies(self) -> tuple[BlockCopy, ...]:
        if self.host.total and self._costs.trial_due():
            idle = (entry for entry in self.trie.idle if isinstance(entry, PrefixNode))
            unused = chained((block for node in idle for block in node.blocks), self.pool.upcoming(CopyCosts.TRIED))
            self.host.try_copies([*islice((block for block in unused if block >= 0), CopyCosts.TRIED)])
            self.states.try_copies()
        copies, self.host.copies = tuple(self.host.copies), []
        return copies

    def _pays(self, node: PrefixNode, blocks: int) -> bool:
        context = node.depth * self.block_size
        if not self.states.needs_block(node):
            return False
        pays = self._costs.may_pay_to_keep(self.block_size, context, blocks)
        if not pays:
            self._costs.decline(self.block_size, context)
        return pays

    def _state_pays(self, node: PrefixNode) -> bool:
        """Returns whether a node's state may be worth its copies: without it, all tokens up to it are computed."""
        return self._costs.may_pay_to_keep((node.depth + 1) * self.block_size, 0, 0, states=1)

    def _load(self, absent: list[Idle]) -> None:
        """Copies blocks in. All are pinned first, so that making room for one does not take another's places."""
        for entry in absent:
            self.host.pin(entry)
        for entry in absent:
            self.host.load(entry, self.take)
            self.watchers.arrives(entry if isinstance(entry, PrefixNode) else entry[0])

    def _forget(self, node: PrefixNode) -> None:
        self.sources.forget(node)
        self.watchers.removed(node)

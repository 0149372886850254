"""Keeps who holds which KV block: it is the only writer of that fact.

A block is free (in the pool), owned by the one sequence that is filling it, or published in the trie (full; held or
idle). A free block may hold a tail (tails.py). Layers that see equally far form a layer group. A sequence has a block
table for each group, all of the same length; a windowed group's blocks that no later token can see are let go as the
sequence advances.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Line
from itertools import chain as chained
from itertools import islice

from penstock.core import hashing
from penstock.core.block_events import BlockWatcher
from penstock.core.blocks import BlockPool
from penstock.core.host_states import HostStates
from penstock.core.prefix import BlockTrie, Idle, PrefixNode
from penstock.core.sequence import Sequence
from penstock.core.states import NoStates, SavedStates
from penstock.core.tails import Parent, Tail, Tails
from penstock.core.tiers import DEVICE, DISK, PEER, RAM, CopyCosts, HostTier
from penstock.types import BlockCopy, Grown, Limits, Row, blocks_for


class KvCache:
    """Gives blocks to sequences, publishes the full ones and takes them back. `chain` computes chain hashes;
    `watchers` are told what enters and leaves the prefix cache, and `costs` say whether copying blocks to and from host
    memory pays."""

    def __init__(
        self,
        limits: Limits,
        chain: hashing.Chain = hashing.chain,
        watchers: Iterable[BlockWatcher] = (),
        costs: CopyCosts | None = None,
    ) -> None:
        size = self.block_size = limits.block_size
        self.groups = len(limits.windows)
        self._watchers = tuple(watchers)
        self.pool = BlockPool(limits.num_blocks)
        self.host = HostTier(limits.host_places, limits.windows, lambda node: self.trie.prune(node))
        self.states = NoStates()
        if limits.states:
            host = HostStates(limits.host_states, self._state_pays)
            spacing = self.blocks_for(limits.step_tokens) * size
            self.states = SavedStates(limits.states, size, spacing, host, self._watchers)
        self.trie = BlockTrie(size, limits.windows, self.host, self._forget, self._changed, self.states.forget)
        self.tails = Tails()
        self.in_flight: dict[bytes, int] = {}  # chain hash of a block being computed -> sequence id
        self._costs = costs or CopyCosts()
        self._arriving: list[PrefixNode] = []  # what was or is to be copied in since watchers were told
        self._taken_in: set[PrefixNode] = set()  # from a peer to the device, and reused by nobody yet
        self._chain = chain
        self._windowed = tuple(
            (group, blocks_for(limits.max_len, (window,), size, limits.step_tokens))
            for group, window in enumerate(limits.windows)
            if window
        )  # with the most blocks that a sequence holds at once
        self._window_blocks = max(self.blocks_for(window - 1) for window in limits.windows)  # that a prefix needs
        self._full = self.groups - len(self._windowed)

    @property
    def available(self) -> int:
        """Returns how many blocks could be had now."""
        return len(self.pool) + self.trie.idle_blocks

    def blocks_for(self, positions: int) -> int:
        """Returns how many blocks of one layer group cover this many positions."""
        return -(-positions // self.block_size)

    # -- reuse ---------------------------------------------------------------------------------------------------

    def match(self, seq: Sequence) -> list[PrefixNode]:
        """Returns what is known of its tokens. At least the last one is always left to compute, since its logits are
        wanted. Changes nothing."""
        if not seq.reuses_prefix:
            return []
        return self.trie.match(seq.salt, seq.tokens, (len(seq.tokens) - 1) // self.block_size)

    def held(self, seq: Sequence) -> int:
        """Returns how many tokens a sequence would begin with if it started now. Changes nothing."""
        return len(self.usable(self.match(seq))) * self.block_size

    def usable(self, known: list[PrefixNode]) -> list[PrefixNode]:
        """Returns what of a match a sequence should begin with: up to where all windows are there and, for models with
        recurrent layers, a state was saved. What is on the host counts if copying it in is no slower than computing
        it."""
        matched = known[: self.reusable(known)]
        absent, states = self._absent(matched), self.states.absent(matched)
        if not absent and not states:
            return matched
        here = self.reusable(known, host=False)
        missing, context = (len(matched) - here) * self.block_size, here * self.block_size
        pays = self._costs.pays_to_load(missing, context, self.host.blocks_of(absent), states)
        return matched if pays else known[:here]

    def reusable(self, known: list[PrefixNode], *, host: bool = True) -> int:
        """Returns how many blocks of a match a sequence can begin with. Without `host`, only what is on the device
        counts."""
        count, usable = len(known), -1
        while count != usable:
            count = self.trie.reusable(known, count, host)
            usable, count = count, self.states.deepest(known, count, host)
        return count

    def _absent(self, matched: list[PrefixNode]) -> list[Idle]:
        """Returns what must be copied in for a sequence that begins with these nodes."""
        return self.trie.absent(matched, self.trie.window_starts(len(matched) * self.block_size))

    def attach(
        self, salt: str, tokens: Line[int], first: int, places: Line[Line[int]], tier: str = DISK, state: int = -1
    ) -> int:
        """Puts blocks of a prompt into the prefix cache that someone has written to reserved places (HostTier.reserve):
        its block `first` and those after it, of each a place for every layer group (-1: none, of windowed groups).
        Blocks before the first must be known. The last one may come with the place of the `state` at its end. Places
        that are not used are given back; returns how many blocks are used."""
        chain, end = self.trie.match(salt, tokens, first), first + len(places)
        if len(chain) < first or not places:
            self.host.give_back(place for each in places for place in each if place >= 0)
            self.states.unreserve(state)
            return 0
        count = self.trie.attach(chain, salt, tokens, places, tier)
        whole = len(self.trie.match(salt, tokens, end)) == end  # nothing of it was pruned
        self.states.attach(chain[-1] if whole else None, state)
        return count

    def take_in(
        self, salt: str, tokens: Line[int], first: int, wanted: Line[Line[bool]], fill: Callable[[list[list[int]]], int]
    ) -> int:
        """Puts blocks of a prompt into the prefix cache that someone writes to blocks of the device: its block `first`
        and those after it, of each one for every layer group that is `wanted`. `fill` is given them (-1: not wanted)
        and returns how many of the prompt's blocks, from the first on, are right now. Returns how many are used: none
        if those before are not on the device, if one has come meanwhile, or if there is no room."""
        chain = self.trie.match(salt, tokens, first + len(wanted))
        if len(chain) != first or not all(map(self.trie.on_device, chain)):
            return 0
        self.trie.hold(chain, [first] * self.groups)  # what makes room must not take these
        blocks: list[list[int]] = []
        if sum(map(sum, wanted)) <= self.available:
            blocks = [[self._take() if want else -1 for want in groups] for groups in wanted]
        right = fill(blocks) if blocks else 0
        for each in blocks[right:]:
            for block in each:
                if block >= 0:
                    self._give(block)
        for index, each in enumerate(blocks[:right], first):
            node = self.trie.insert(chain[-1] if chain else None, self.trie.key_of(salt, tokens, index), each)
            chain.append(node)
            self._taken_in.add(node)
            if self._watchers:
                self.tell_stored(node)
        groups = zip(*wanted, strict=True)
        self.trie.drop(chain, [first + (*group, True).index(True) for group in groups])
        return right

    def awaited(self, seq: Sequence, matched: int, sequences: Mapping[int, Sequence]) -> bytes | None:
        """Returns the hash of a block that another sequence is just computing and that is worth waiting for."""
        if not seq.reuses_prefix:
            return None
        self._hash_prompt(seq)
        ahead = seq.block_hashes[matched : (len(seq.tokens) - 1) // self.block_size]
        if not ahead or ahead[0] not in self.in_flight:
            return None
        return self.states.awaited(ahead, matched, sequences[self.in_flight[ahead[0]]], self.in_flight)

    def must_wait(self, seq: Sequence) -> bool:
        """Returns whether a token of a waiting sequence, or a block that it can reuse, is still in flight."""
        return seq.end > len(seq.tokens) or seq.awaited_hash in self.in_flight

    def divergence(self, seq: Sequence, others: Iterable[Sequence]) -> int:
        """Returns the position, at the end of a block, up to which most of these others share its prompt; 0: none."""
        counts = Counter(self._shared(seq, other) for other in others)
        del counts[0]
        return max(counts, key=lambda at: (counts[at], at), default=0)

    # -- blocks of a sequence ------------------------------------------------------------------------------------

    def needed(self, seq: Sequence, matched: list[PrefixNode]) -> tuple[int, int]:
        """Returns how many blocks a sequence that begins with these nodes needs for its tokens, and how many idle ones
        it takes with the nodes."""
        starts = self.trie.window_starts(len(matched) * self.block_size)
        taken = self._left_to_take(seq.end, len(matched), starts) + self.host.blocks_of(self._absent(matched))
        return taken, self.trie.idle_among(matched, starts)

    def reserved(self, seq: Sequence) -> int:
        """Returns how many blocks a running sequence will still take for the tokens that it already has."""
        return self._left_to_take(seq.end, seq.capacity // self.block_size, seq.window_starts)

    def open(self, seq: Sequence, matched: list[PrefixNode], known: list[PrefixNode]) -> tuple[int, list[Grown]]:
        """Starts a sequence on its matched prefix and puts the rest of its prompt in flight for those who come after.
        More blocks may be `known`, which it cannot begin with or which do not pay to be copied. Returns how many
        positions are computed already, and the entries of its block tables."""
        positions = len(matched) * self.block_size
        if self.host.total and len(known) > len(matched):
            self._costs.decline(self.reusable(known) * self.block_size - positions, positions)
        starts = seq.window_starts = self.trie.window_starts(positions)
        absent = self.trie.absent(matched, starts)
        self.trie.hold(matched, starts)
        self._load(absent)
        seq.nodes = list(matched)
        seq.tables = [
            [-1] * start + [node.blocks[group] for node in matched[start:]] for group, start in enumerate(starts)
        ]
        seq.capacity, seq.next_full = positions, positions + self.block_size
        computed = positions + self._continue_tail(seq)
        if seq.cached < 0:
            seq.times.reused = self._tiers(seq, matched, absent, computed - positions)
        seq.prefix_ends = (len(known), (seq.prompt_len - 1) // self.block_size)
        self._hash_prompt(seq)
        for hash in seq.block_hashes[len(matched) :]:
            self.in_flight.setdefault(hash, seq.id)
        tables = zip(starts, seq.tables, strict=True)
        grown = [Grown(seq.id, at, tuple(table[at:]), group) for group, (at, table) in enumerate(tables) if table[at:]]
        return computed, grown

    def grow(self, seq: Sequence, positions: int) -> list[Grown]:
        """Takes the blocks that `positions` positions need; the caller has made sure they are available."""
        missing = self.blocks_for(positions - seq.capacity)
        grown = []
        for group, table in enumerate(seq.tables):
            taken = tuple([self._take() for _ in range(missing)])
            grown.append(Grown(seq.id, len(table), taken, group))
            table.extend(taken)
        seq.capacity += missing * self.block_size
        return grown

    def advance(self, seq: Sequence, row: Row) -> list[Grown]:
        """Publishes every block that a committed row has filled and lets go of what lies behind the windows. Where
        another sequence had computed the same block, its block replaces ours: returns those entries."""
        self._tell_arrivals()
        replaced = self._publish(seq) if seq.prefix_cache else []
        if self._windowed:
            self._let_go_behind(seq)
        self.states.keep(seq, row)
        seq.next_full = (seq.computed // self.block_size + 1) * self.block_size
        return replaced

    def release(self, seq: Sequence) -> None:
        """Takes everything back from a sequence; what it published stays in the trie until evicted."""
        self.trie.drop(seq.nodes, seq.window_starts)
        for table, start in zip(seq.tables, seq.window_starts, strict=True):
            for block in table[max(len(seq.nodes), start) :]:
                self._give(block)
        for hash in seq.block_hashes[len(seq.nodes) :]:
            self._withdraw(seq, hash)
        self.states.leave(seq)
        seq.nodes, seq.tables, seq.window_starts, seq.capacity = [], [], [], 0

    def isolate(self, seq: Sequence) -> None:
        """Lets a running sequence keep its blocks and share none that it computes from now on."""
        for hash in seq.block_hashes[len(seq.nodes) :]:
            self._withdraw(seq, hash)
        self.states.leave(seq)
        seq.prefix_cache = False

    def flush(self) -> None:
        """Empties the prefix cache: gives back every block that no sequence holds."""
        for block in self.tails.blocks:
            self._forget_tail(block)
        self._arriving = [node for node in self._arriving if node.holders]
        self.states.clear()
        self.host.clear()
        while self.trie.idle_blocks:
            for block in self.trie.evict(lambda node, blocks: False):
                self.pool.give(block)

    def _left_to_take(self, end: int, entries: int, starts: list[int]) -> int:
        """Returns how many blocks it takes to reach `end` positions with so many entries in each block table. Within a
        window, blocks behind it are let go meanwhile."""
        missing = max(self.blocks_for(end) - entries, 0)  # a draft may have reached beyond the end
        taken = missing * self._full
        for group, most in self._windowed:
            taken += max(min(missing, most - entries + starts[group]), 0)
        return taken

    def _publish(self, seq: Sequence) -> list[Grown]:
        replaced = []
        for index in range(len(seq.nodes), seq.computed // self.block_size):
            mine = [table[index] for table in seq.tables]
            node = self.trie.publish(seq.nodes, seq.salt, seq.tokens, mine)
            if self._windowed:
                node.kept = node.kept or any(end - self._window_blocks <= index < end for end in seq.prefix_ends)
            seq.nodes.append(node)
            if index < len(seq.block_hashes):
                self._withdraw(seq, seq.block_hashes[index])
            if not node.stored:
                self._record(seq, node)
            if node.blocks is not mine:
                replaced += self._replace(seq, index, mine, node)
        return replaced

    def _replace(self, seq: Sequence, index: int, mine: list[int], node: PrefixNode) -> list[Grown]:
        """Frees a sequence's own blocks that a node already had."""
        replaced = []
        for group, (own, shared) in enumerate(zip(mine, node.blocks, strict=True)):
            if own != shared:
                self._give(own)
                seq.tables[group][index] = shared
                replaced.append(Grown(seq.id, index, (shared,), group))
        return replaced

    def _let_go_behind(self, seq: Sequence) -> None:
        """Lets go of blocks that no later row reads: rows in flight begin where the committed one ended."""
        starts = self.trie.window_starts(seq.computed)
        for group, _ in self._windowed:
            table = seq.tables[group]
            for index in range(seq.window_starts[group], starts[group]):
                if index < len(seq.nodes):
                    self.trie.drop_window(seq.nodes[index], group)
                else:
                    self._give(table[index])
                table[index] = -1
        seq.window_starts = starts

    def _take(self) -> int:
        if len(self.pool) <= len(self.tails) and self.trie.idle_blocks:
            for block in self.trie.evict(self._pays):
                self.pool.give(block)
        block = self.pool.take()
        if self.tails:
            self._forget_tail(block)
        return block

    def _give(self, block: int) -> None:
        """Takes a block back that a sequence had for itself."""
        self.pool.give(block)
        self._tell_freed(block)

    # -- tails ---------------------------------------------------------------------------------------------------

    def keep_tails(self, tails: Iterable[Tail]) -> None:
        """Lets sequences that have such tokens next begin with them. The blocks are free, and are taken last."""
        for tail in tails:
            self.tails.add(tail)
        self.pool.defer(self.tails.blocks)

    def _continue_tail(self, seq: Sequence) -> int:
        """Gives a sequence that starts the blocks of a tail that it can continue; returns how many positions that tail
        has computed of it. The last token is always left to compute."""
        if not self.tails or not seq.reuses_prefix:
            return 0
        parent: Parent = seq.nodes[-1] if seq.nodes else hashing.root(seq.salt)
        shared, tail = self.tails.longest(parent, seq.tokens[seq.capacity : min(seq.next_full, len(seq.tokens)) - 1])
        if tail is not None:
            self.tails.remove(tail)
            self.pool.take_these(tail.blocks)
            seq.capacity += self.block_size
            for table, block in zip(seq.tables, tail.blocks, strict=True):
                table.append(block)
        return shared

    def _forget_tail(self, block: int) -> None:
        """Forgets the tail that a block holds, if any."""
        if (tail := self.tails.holding(block)) is not None:
            self.tails.remove(tail)
            for each in tail.blocks:
                self._tell_freed(each)

    # -- the host ------------------------------------------------------------------------------------------------

    def open_step(self) -> None:
        """Begins to plan a step."""
        self.states.open_step()
        self._tell_arrivals()

    def _tell_arrivals(self) -> None:
        """Tells watchers what was copied in: plans are carried out before the next is made and before any is
        committed."""
        for node in self._arriving:
            if node.stored:
                self._changed(node)
            else:
                self.tell_stored(node)
        self._arriving.clear()

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Returns the copies that the plan being made is to carry out, in order."""
        if self.host.total and self._costs.trial_due():
            idle = (entry for entry in self.trie.idle() if isinstance(entry, PrefixNode))
            unused = chained((block for node in idle for block in node.blocks), self.pool.upcoming(CopyCosts.TRIED))
            self.host.try_copies([*islice((block for block in unused if block >= 0), CopyCosts.TRIED)])
            self.states.try_copies()
        copies, self.host.copies = tuple(self.host.copies), []
        return copies

    def _pays(self, node: PrefixNode, blocks: int) -> bool:
        """Returns whether so many blocks of a node that leaves the device may be worth their copies."""
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
        """Has blocks copied in. All are pinned first: what makes room for one must not take another's places."""
        for entry in absent:
            self.host.pin(entry)
        for entry in absent:
            self.host.load(entry, self._take)
            if self._watchers:
                self._arriving.append(entry if isinstance(entry, PrefixNode) else entry[0])

    def _tiers(
        self, seq: Sequence, matched: list[PrefixNode], absent: list[Idle], tail: int
    ) -> tuple[tuple[str, int], ...]:
        """Returns how many tokens of its prompt a sequence reuses from each tier; `tail` are behind those nodes."""
        loaded = {entry if isinstance(entry, PrefixNode) else entry[0] for entry in absent}
        tokens = Counter[str]()
        for node in matched:
            position = node.depth * self.block_size
            tier = node.tier if node in loaded else PEER if node in self._taken_in else DEVICE
            tokens[tier] += min(max(seq.prompt_len - position, 0), self.block_size)
        if tail:
            tokens[DEVICE] += min(max(seq.prompt_len - len(matched) * self.block_size, 0), tail)
        for node in loaded:
            node.tier = RAM
        self._taken_in.difference_update(matched)
        return tuple((tier, count) for tier, count in tokens.items() if count)

    # -- chain hashes --------------------------------------------------------------------------------------------

    def _shared(self, seq: Sequence, other: Sequence) -> int:
        """Returns how many positions of its prompt another shares. A chain hash covers all blocks before its own, so
        the last that is the same is found by bisection."""
        if not other.reuses_prefix:
            return 0
        self._hash_prompt(other)
        usable = min(len(seq.block_hashes), (len(other.tokens) - 1) // self.block_size, len(other.block_hashes))
        differ = bisect_left(range(usable), True, key=lambda at: seq.block_hashes[at] != other.block_hashes[at])
        return differ * self.block_size

    def _hash_prompt(self, seq: Sequence) -> None:
        if seq.prefix_cache and not seq.block_hashes and seq.prompt_len >= self.block_size:
            seq.block_hashes = self._chain(seq.salt, seq.tokens[: seq.prompt_len], self.block_size)

    def _withdraw(self, seq: Sequence, hash: bytes) -> None:
        if self.in_flight.get(hash) == seq.id:
            del self.in_flight[hash]

    # -- watchers ------------------------------------------------------------------------------------------------

    def _record(self, seq: Sequence, node: PrefixNode) -> None:
        if not self._watchers:
            return
        if node.depth < len(seq.block_hashes):
            node.hash = seq.block_hashes[node.depth]
        self.tell_stored(node)

    def tell_stored(self, node: PrefixNode) -> None:
        """Tells watchers that a node has entered the prefix cache."""
        assert node.parent is not None
        parent = node.parent.hash if node.depth else node.salt_hash
        node.hash = node.hash or hashing.extend(parent, node.tokens)
        node.stored = True
        for watcher in self._watchers:
            watcher.stored(node, parent)

    def _tell_freed(self, block: int) -> None:
        for watcher in self._watchers:
            watcher.freed(block)

    def _changed(self, node: PrefixNode) -> None:
        """Takes note that a node has lost blocks of windowed layer groups, or has them again."""
        for watcher in self._watchers:
            watcher.changed(node)

    def _forget(self, node: PrefixNode) -> None:
        """Takes note that a node leaves the device or, without full layer groups, the trie."""
        self._taken_in.discard(node)
        if node.stored:
            node.stored = False
            for watcher in self._watchers:
                watcher.removed(node)

"""What must be true between any two steps. Slow: for tests and for idle moments."""

from __future__ import annotations

from collections import Counter

from penstock.core import policy
from penstock.core.prefix import Node
from penstock.core.scheduler import Scheduler
from penstock.core.sequence import Sequence


def check(scheduler: Scheduler) -> None:
    """Raises AssertionError, with the numbers, if a block is lost or shared wrongly or a sequence is misplaced."""
    _check_blocks(scheduler)
    _check_trie(scheduler)
    _check_states(scheduler)
    _check_lines(scheduler)
    for seq in scheduler.sequences.values():
        _check_sequence(scheduler, seq)


def _check_blocks(scheduler: Scheduler) -> None:
    cache = scheduler.cache
    private = [block for seq in scheduler.running for block in seq.blocks[len(seq.nodes) :]]
    owners = Counter([*cache.pool.snapshot(), *private, *(node.block for node in cache.trie.nodes())])
    twice = [block for block, count in owners.items() if count > 1]
    assert not twice, f"blocks with two owners: {twice}"
    assert len(owners) == cache.pool.total, f"{cache.pool.total - len(owners)} blocks of {cache.pool.total} are lost"


def _check_trie(scheduler: Scheduler) -> None:
    trie = scheduler.cache.trie
    holders = Counter(node for seq in scheduler.running for node in seq.nodes)
    for node in trie.nodes():
        assert node.holders == holders[node], f"block {node.block}: {node.holders} holders, {holders[node]} found"
    idle = trie.idle_nodes()
    assert set(idle) == {node for node in trie.nodes() if node.holders == 0}, "idle nodes are not those without holders"
    place = {node: index for index, node in enumerate(idle)}
    for node in idle:
        _check_children_go_first(node, place)


def _check_children_go_first(node: Node, place: dict[Node, int]) -> None:
    for child in node.children.values():
        assert place[child] < place[node], f"block {node.block} would be evicted before its child {child.block}"


def _check_states(scheduler: Scheduler) -> None:
    states, nodes = scheduler.cache.states, set(scheduler.cache.trie.nodes())
    assert states.saved().keys() <= nodes, "a state is saved for a block that is gone"
    places = sorted([*states.free(), *states.pending, *states.saved().values()])
    assert places == list(range(states.total)), f"places of {states.total} states are lost or have two owners: {places}"


def _check_lines(scheduler: Scheduler) -> None:
    running, waiting = scheduler.running, scheduler.waiting
    assert running == sorted(running, key=policy.order), "running sequences are out of order"
    assert waiting == sorted(waiting, key=policy.order), "waiting sequences are out of order"
    assert {seq.id for seq in running + waiting} == scheduler.sequences.keys(), "a sequence is in no line"
    assert len(running) + len(waiting) == len(scheduler.sequences), "a sequence is in two lines"
    assert all(seq.blocks for seq in running), "a running sequence has no blocks"
    assert not any(seq.blocks or seq.nodes for seq in waiting), "a waiting sequence holds blocks"
    promised = set(scheduler.cache.promised.values())
    assert promised <= {seq.id for seq in running}, "a block is promised by a sequence that is not running"


def _check_sequence(scheduler: Scheduler, seq: Sequence) -> None:
    size = scheduler.cache.block_size
    assert seq.computed <= seq.planned <= seq.end <= seq.max_len, f"sequence {seq.id} is ahead of itself"
    assert seq.planned <= len(seq.blocks) * size, f"sequence {seq.id} computes positions it has no blocks for"
    if scheduler.limits.encoder:
        assert seq.planned in (0, seq.end), f"sequence {seq.id} was cut at {seq.planned} of {seq.end} tokens"
    shared = [node.block for node in seq.nodes]
    assert shared == seq.blocks[: len(shared)], f"sequence {seq.id}: block table and trie differ"
    tokens = [token for node in seq.nodes for token in node.key if isinstance(token, int)]
    assert tokens == seq.tokens[: len(tokens)], f"sequence {seq.id} holds blocks of other tokens"
    assert all(at > seq.computed and at % size == 0 for at in seq.saving), f"sequence {seq.id} saves what is past"

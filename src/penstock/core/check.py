"""Checks what must be true between any two steps. It is slow: it is for tests and for idle moments."""

from __future__ import annotations

from collections import Counter

from penstock.core.prefix import Idle, PrefixNode
from penstock.core.scheduler import Scheduler
from penstock.core.sequence import Sequence
from penstock.core.states import SavedStates


def check(scheduler: Scheduler) -> None:
    """Raises AssertionError, with the numbers, if a block is lost or shared wrongly or a sequence is misplaced."""
    _check_blocks(scheduler)
    _check_trie(scheduler)
    _check_windows(scheduler)
    _check_host(scheduler)
    _check_states(scheduler)
    _check_queues(scheduler)
    for seq in scheduler.sequences.values():
        _check_sequence(scheduler, seq)


def _check_blocks(scheduler: Scheduler) -> None:
    cache = scheduler.cache
    own = [
        block
        for seq in scheduler.running
        for table, start in zip(seq.blocks.tables, seq.blocks.window_starts, strict=True)
        for block in table[max(len(seq.blocks.nodes), start) :]
    ]
    published = [block for node in cache.trie.nodes() for block in node.blocks if block >= 0]
    owners = Counter([*cache.pool.snapshot(), *own, *published])
    twice = [block for block, count in owners.items() if count > 1]
    assert not twice, f"blocks with two owners: {twice}"
    assert len(owners) == cache.pool.total, f"{cache.pool.total - len(owners)} blocks of {cache.pool.total} are lost"


def _check_trie(scheduler: Scheduler) -> None:
    trie, windows = scheduler.cache.trie, scheduler.limits.windows
    holders = Counter(node for seq in scheduler.running for node in seq.blocks.nodes)
    for node in trie.nodes():
        count, size = len(node.tokens), scheduler.cache.block_size
        assert count == size, f"block {node.blocks} has {count} tokens, {size} fill it"
        on_device = trie.on_device(node)
        gone = [g for g, window in enumerate(windows) if not window and (node.blocks[g] >= 0) != on_device]
        gone += [g for g, window in enumerate(windows) if not window and not on_device and node.places[g] < 0]
        assert not gone, f"block {node.blocks} has lost its blocks of full layer groups {gone}"
        assert on_device or not node.holders, f"block {node.places} is held and on the host alone"
        assert node.holders == holders[node], f"block {node.blocks}: {node.holders} holders, {holders[node]} found"
        empty = not (node.holders or node.children) and max(node.blocks + node.places) < 0
        assert not empty, "a node that nobody needs has no blocks"
    queue = list(trie.idle)
    idle = [node for node in queue if isinstance(node, PrefixNode)]
    full = windows.count(0)
    expected = {node for node in trie.nodes() if full and node.holders == 0 and trie.on_device(node)}
    assert set(idle) == expected, "idle nodes are not those without holders"
    count = full * len(idle) + len(queue) - len(idle)
    assert trie.idle_blocks == count, f"{trie.idle_blocks} blocks are counted as idle, {count} are"
    _check_children_go_first(idle)


def _check_children_go_first(queue: list[PrefixNode]) -> None:
    """Checks a queue of one tier. Children that are not in the queue are on the host only, in another queue."""
    order = {node: index for index, node in enumerate(queue)}
    for node in queue:
        for child in node.children.values():
            assert order.get(child, -1) < order[node], f"block {node.blocks} would go before its child {child.blocks}"


def _check_windows(scheduler: Scheduler) -> None:
    trie, windows = scheduler.cache.trie, scheduler.limits.windows
    for group in (group for group, window in enumerate(windows) if window):
        holders = Counter(
            node for seq in scheduler.running for node in seq.blocks.nodes[seq.blocks.window_starts[group] :]
        )
        idle = {entry[0] for entry in trie.idle if not isinstance(entry, PrefixNode) and entry[1] == group}
        for node in trie.nodes():
            found = node.window_holders[group]
            assert found == holders[node], f"block {node.blocks}, group {group}: {found} holders, not {holders[node]}"
            assert node.blocks[group] >= 0 or not found, f"block {node.blocks} is held and gone in group {group}"
            expected = node.blocks[group] >= 0 and not found
            assert (node in idle) == expected, f"block {node.blocks} is wrongly idle or not in group {group}"


def _check_host(scheduler: Scheduler) -> None:
    host, trie, windows = scheduler.cache.host, scheduler.cache.trie, scheduler.limits.windows
    kept = [place for node in trie.nodes() for place in node.places if place >= 0]
    places = sorted([*host.free(), *host.reserved, *kept])
    assert places == list(range(host.total)), f"places of {host.total} blocks are lost or have two owners: {places}"
    spare, only = set[Idle](), set[Idle]()
    for node in trie.nodes():
        entries: list[tuple[Idle, int]] = [((node, group), group) for group, window in enumerate(windows) if window]
        entries += [(node, group) for group, window in enumerate(windows) if not window]
        for entry, group in entries:
            if node.places[group] >= 0:
                (only if node.blocks[group] < 0 else spare).add(entry)
    assert set(host.only()) == only, "what is on the host alone is not what its queue has"
    assert set(host.spare()) == spare, "what is on the host and on the device is not what its queue has"
    queue = [node for node in host.only() if isinstance(node, PrefixNode)]
    _check_children_go_first(queue)
    for node in trie.nodes():
        alone = trie.on_device(node) and node.parent and node.parent.parent and not trie.on_device(node.parent)
        assert not alone, f"block {node.blocks} is on the device below one that is not"


def _check_states(scheduler: Scheduler) -> None:
    states, nodes = scheduler.cache.states, set(scheduler.cache.trie.nodes())
    assert states.saved().keys() <= nodes, "a state is saved for a block that is gone"
    places = sorted([*states.free(), *states.pending, *states.saved().values()])
    assert places == list(range(states.total)), f"places of {states.total} states are lost or have two owners: {places}"
    if isinstance(states, SavedStates):
        _check_host_states(states, nodes)


def _check_host_states(states: SavedStates, nodes: set[PrefixNode]) -> None:
    host = states.host
    assert host.kept().keys() <= nodes, "host memory has the state of a block that is gone"
    places = sorted([*host.free(), *host.reserved, *host.kept().values()])
    assert places == list(range(host.total)), (
        f"host places of {host.total} states are lost or have two owners: {places}"
    )
    assert host.only() == host.kept().keys() - states.saved().keys(), "a state is on other tiers than its queue says"


def _check_queues(scheduler: Scheduler) -> None:
    running, tenants = scheduler.running, scheduler.tenants
    waiting = [seq for tenant in tenants for seq in tenant.line]
    for name, queue in (("running", running), *((f"waiting {tenant.name!r}", tenant.line) for tenant in tenants)):
        order = [scheduler.policy.order(seq) for seq in queue]
        assert order == sorted(order), f"{name} sequences are out of order"
    _check_tenants(scheduler, waiting)
    assert {seq.id for seq in running + waiting} == scheduler.sequences.keys(), "a sequence is in no queue"
    assert len(running) + len(waiting) == len(scheduler.sequences), "a sequence is in two queues"
    assert all(seq.blocks.capacity for seq in running), "a running sequence has no blocks"
    assert not any(seq.blocks.tables or seq.blocks.nodes for seq in waiting), "a waiting sequence holds blocks"
    in_flight = set(scheduler.cache.in_flight.computing.values())
    assert in_flight <= {seq.id for seq in running}, "a block is in flight for a sequence that is not running"


def _check_tenants(scheduler: Scheduler, waiting: list[Sequence]) -> None:
    tenants = scheduler.tenants
    assert tenants.waiting == len(waiting), f"{tenants.waiting} sequences are counted as waiting, {len(waiting)} do"
    running = Counter(seq.standing.tenant.name for seq in scheduler.running)
    for tenant in tenants:
        found = running[tenant.name]
        assert tenant.running == found, f"tenant {tenant.name!r}: {tenant.running} running, {found} found"
        assert found or tenant.line, f"tenant {tenant.name!r} has no sequences"
    foreground = sum(not seq.params.background for seq in scheduler.sequences.values())
    assert tenants.foreground == foreground, f"{tenants.foreground} foreground sequences, {foreground} found"
    begun = {seq.id for seq in scheduler.running if seq.times.answered is None}
    assert tenants.prefilling.keys() == begun, f"{set(tenants.prefilling)} have no token yet, {begun} found"


def _check_sequence(scheduler: Scheduler, seq: Sequence) -> None:
    size = scheduler.cache.block_size
    assert seq.computed <= seq.planned <= seq.end <= seq.max_len, f"sequence {seq.id} is ahead of itself"
    known = len(seq.tokens)
    assert seq.computed <= known, f"sequence {seq.id} has {known} tokens and {seq.computed} computed positions"
    assert seq.planned <= seq.blocks.capacity, f"sequence {seq.id} computes positions it has no blocks for"
    if scheduler.limits.encoder:
        assert seq.planned in (0, seq.end), f"sequence {seq.id} was cut at {seq.planned} of {seq.end} tokens"
    for group, (table, start) in enumerate(zip(seq.blocks.tables, seq.blocks.window_starts, strict=True)):
        assert len(table) * size == seq.blocks.capacity, f"sequence {seq.id}: its block tables differ in length"
        shared = [node.blocks[group] for node in seq.blocks.nodes[start:]]
        assert shared == table[start : start + len(shared)], f"sequence {seq.id}: block table and trie differ"
        if window := scheduler.limits.windows[group]:
            seen = max(seq.computed - window + 1, 0) // size
            assert start <= seen, f"sequence {seq.id} let go of blocks that it still sees in group {group}"
            seen = max(seq.computed // size * size - window + 1, 0) // size
            assert start >= seen, f"sequence {seq.id} keeps blocks behind its window in group {group}"
    tokens = [token for node in seq.blocks.nodes for token in node.tokens]
    assert tokens == seq.tokens[: len(tokens)], f"sequence {seq.id} holds blocks of other tokens"
    assert all(at > seq.computed and at % size == 0 for at in seq.states.saving), (
        f"sequence {seq.id} saves what is past"
    )

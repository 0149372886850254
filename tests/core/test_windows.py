"""Tests KV by layer groups: windowed groups hold only what they see, and prefixes are reused where windows are left."""

from __future__ import annotations

import pytest

from penstock.core import Scheduler, Sequence
from penstock.core.check import check
from penstock.core.prefix import PrefixNode
from penstock.errors import ConfigError
from penstock.types import Limits, Tokens, blocks_for
from tests.core.world import answer, counts, limits, run, step


def prompt(length: int, first: int = 0) -> tuple[int, ...]:
    return (first, *range(1, length))


def cached(scheduler: Scheduler, seq: Sequence) -> int:
    return next(event.cached for event in run(scheduler, seq) if isinstance(event, Tokens))


def held(seq: Sequence) -> list[int]:
    """Returns how many blocks a running sequence holds in each layer group."""
    return [sum(block >= 0 for block in table) for table in seq.blocks.tables]


def evict(scheduler: Scheduler, idle: PrefixNode | tuple[PrefixNode, int]) -> list[int]:
    """Takes idle blocks from the trie, as if they had been the least recently used."""
    trie = scheduler.cache.trie
    for queue in (trie.idle._blocks, trie.idle._early):
        queue.pop(idle, None)
    trie.idle._early[idle] = None
    trie.idle._early.move_to_end(idle, last=False)
    freed = trie.evict(lambda node, blocks: False)
    for block in freed:
        scheduler.cache.pool.give(block)
    check(scheduler)
    return freed


def test_a_long_sequence_holds_all_of_full_groups_and_only_the_window_of_others() -> None:
    """Gemma 3 270M has 3 full layers and 15 with a window of 512: six groups of three layers."""
    windows = (0, 512, 512, 512, 512, 512)
    gemma = Limits(8192, 4, 512, 16, 4096, vocab=9000, windows=windows)
    scheduler = Scheduler(gemma)
    scheduler.add(Sequence(1, tuple(range(8180)), 12))
    most = 0
    while scheduler.sequences:
        step(scheduler)
        most = max(most, scheduler.stats().blocks_used)
    assert most <= blocks_for(8192, windows, 16, chunk=512)
    assert blocks_for(8192, windows, 16) * 4 < 8192 // 16 * len(windows)


def test_windows_are_let_go_as_a_sequence_advances() -> None:
    scheduler = Scheduler(limits(windows=(0, 5), num_blocks=64, step_tokens=8))
    scheduler.add(Sequence(1, prompt(20), 9))
    tables = []
    for _ in range(6):
        step(scheduler)
        tables.append(held(scheduler.running[0]))
    assert tables == [[2, 1], [4, 1], [5, 1], [6, 2], [6, 2], [6, 2]]


def test_rows_in_flight_keep_the_blocks_that_they_read() -> None:
    scheduler = Scheduler(limits(windows=(5,), num_blocks=64, step_tokens=8))
    scheduler.add(Sequence(1, prompt(30), 1))
    plans = [scheduler.plan() for _ in range(3)]
    assert held(scheduler.running[0]) == [6]
    answer(scheduler, plans[0])
    assert held(scheduler.running[0]) == [5]  # positions 4 to 7 are read by the second row
    answer(scheduler, plans[1])
    assert held(scheduler.running[0]) == [3]


def test_a_prefix_is_reused_up_to_where_its_window_is_still_there() -> None:
    scheduler = Scheduler(limits(windows=(0, 6), num_blocks=64, step_tokens=64))
    run(scheduler, Sequence(1, prompt(24), 1))
    assert cached(scheduler, Sequence(2, (*prompt(16), 99), 1)) == 16  # in the middle: behind the first one's window
    scheduler.add(seq := Sequence(3, (*prompt(16), 98), 9))
    step(scheduler)
    assert held(seq) == [5, 3]  # of the prefix it holds what it sees
    scheduler.abort(3)
    whole = Sequence(9, prompt(24), 1)
    nodes = scheduler.cache.prefixes.match(whole)
    assert len(scheduler.cache.prefixes.usable(nodes)) == 5
    for hole, usable in ((2, 5), (3, 2), (0, 0)):
        assert len(evict(scheduler, (nodes[hole], 1))) == 1
        assert len(scheduler.cache.prefixes.usable(nodes)) == usable
    assert cached(scheduler, whole) == 0


def test_what_was_evicted_from_a_window_is_filled_in_by_the_next_who_computes_it() -> None:
    scheduler = Scheduler(limits(windows=(0, 6), num_blocks=64, step_tokens=64))
    run(scheduler, Sequence(1, prompt(24), 1))
    for node in scheduler.cache.prefixes.match(Sequence(9, prompt(25), 1)):
        evict(scheduler, (node, 1))
    assert cached(scheduler, Sequence(2, prompt(24), 1)) == 0
    assert cached(scheduler, Sequence(3, prompt(24), 1)) == 20
    assert scheduler.stats().blocks_cached == 12  # nobody's copy was kept twice


def test_a_window_is_evicted_in_all_groups_that_see_no_further() -> None:
    scheduler = Scheduler(limits(windows=(0, 6, 6, 9), num_blocks=64, step_tokens=64))
    run(scheduler, Sequence(1, prompt(9), 1))
    first, second = scheduler.cache.prefixes.match(Sequence(9, prompt(9), 1))
    assert len(evict(scheduler, (first, 1))) == 2
    assert [block >= 0 for block in first.blocks] == [True, False, False, True]
    assert len(evict(scheduler, (second, 3))) == 3
    assert [block >= 0 for block in second.blocks] == [True, False, False, False]


def test_a_node_is_gone_with_its_blocks_of_full_groups() -> None:
    scheduler = Scheduler(limits(windows=(0, 6), num_blocks=64, step_tokens=64))
    run(scheduler, Sequence(1, prompt(12), 1))
    trie = scheduler.cache.trie
    last = next(idle for idle in trie.idle if isinstance(idle, PrefixNode))
    blocks = sorted(last.blocks)
    assert sorted(evict(scheduler, last)) == blocks
    assert len(list(trie.nodes())) == 2


def test_a_model_of_windowed_layers_alone_holds_its_window_and_forgets_empty_nodes() -> None:
    scheduler = Scheduler(limits(windows=(6,), num_blocks=4, max_len=64, step_tokens=8, max_rows=2))
    run(scheduler, Sequence(1, prompt(50), 9))
    assert scheduler.stats().blocks_cached == 3
    run(scheduler, Sequence(2, prompt(50, first=9), 9))
    assert scheduler.cache.prefixes.match(Sequence(3, prompt(51), 1)) == []
    assert all(node.children or max(node.blocks) >= 0 for node in scheduler.cache.trie.nodes())


def test_a_sequence_without_prefix_cache_returns_what_lies_behind_its_window() -> None:
    scheduler = Scheduler(limits(windows=(0, 5), num_blocks=64, step_tokens=8))
    scheduler.add(Sequence(1, prompt(40), 0, prefix_cache=False))
    for _ in range(4):
        step(scheduler)
    assert held(scheduler.running[0]) == [8, 1]
    assert scheduler.stats().blocks_free == 64 - 9
    run(scheduler)
    assert scheduler.stats().blocks_free == 64


@pytest.mark.parametrize("windows", [(0, 5), (5,), (0, 4, 1), (9, 5)])
def test_the_least_pool_for_one_sequence_is_enough_for_it(windows: tuple[int, ...]) -> None:
    least = blocks_for(64, windows, 4)
    with pytest.raises(ConfigError, match="cannot hold one sequence of 64 tokens"):
        Scheduler(limits(windows=windows, num_blocks=least - 1))
    scheduler = Scheduler(limits(windows=windows, num_blocks=least))
    run(scheduler, *(Sequence(id, prompt(40, first=id), 24) for id in range(3)))
    assert not scheduler.sequences


def test_an_encoder_needs_all_blocks_of_its_one_step() -> None:
    with pytest.raises(ConfigError, match="cannot hold one sequence of 16 tokens"):
        Scheduler(limits(windows=(2,), max_len=16, num_blocks=3, encoder=True))
    scheduler = Scheduler(limits(windows=(2,), max_len=16, num_blocks=4, encoder=True))
    scheduler.add(Sequence(1, prompt(16), 0, prefix_cache=False))
    assert counts(step(scheduler)[0]) == {1: 16}


def test_windows_let_more_sequences_run_at_once() -> None:
    """Each takes twelve blocks of the full group and two of the other: two groups of everything would be 24."""
    scheduler = Scheduler(limits(windows=(0, 4), num_blocks=64, step_tokens=12))
    for id in range(4):
        scheduler.add(Sequence(id, prompt(38, first=id), 10))
    most = 0
    while scheduler.sequences:
        step(scheduler)
        most = max(most, len(scheduler.running))
    assert most == 4
    assert scheduler.stats().preemptions == 0


@pytest.mark.usefixtures("overcommitted")
def test_block_tables_of_all_groups_follow_from_plans_alone() -> None:
    scheduler = Scheduler(limits(windows=(0, 6, 9), num_blocks=24, max_len=32))
    for id in range(4):
        scheduler.add(Sequence(id, prompt(5 + 4 * (id % 2)), 20))
    tables: dict[tuple[int, int], dict[int, int]] = {}
    while scheduler.sequences:
        plan = scheduler.plan()
        for id in plan.dropped:
            for group in range(3):
                tables.pop((id, group), None)
        for grown in plan.grown:
            tables.setdefault((grown.seq, grown.group), {}).update(enumerate(grown.blocks, grown.at))
        for row in plan.rows:
            for group, table in enumerate(scheduler.sequences[row.seq].blocks.tables):
                entries = tables[row.seq, group]
                assert all(entries[at] == block for at, block in enumerate(table) if block >= 0)
        answer(scheduler, plan)
    assert scheduler.stats().preemptions > 0


# -- eviction ----------------------------------------------------------------------------------------------------


def conversation(id: int, first: int) -> Sequence:
    return Sequence(id, prompt(40, first=first), 4)


def test_the_middle_of_a_stream_is_evicted_before_the_ends_of_older_ones() -> None:
    """A stream of 44 tokens leaves 10 blocks in each group; 2 windowed ones are needed to continue it."""
    scheduler = Scheduler(limits(windows=(0, 6), num_blocks=64, step_tokens=16))
    for id in range(4):
        run(scheduler, conversation(id, first=50 + id))
    continued = [Sequence(9, (*prompt(40, first=50 + id), *[50] * 4, 7), 1) for id in range(4)]
    assert [len(scheduler.cache.prefixes.usable(scheduler.cache.prefixes.match(seq))) for seq in continued] == [10] * 4


def test_where_streams_diverge_is_kept_once_it_was_seen() -> None:
    scheduler = Scheduler(limits(windows=(0, 6), num_blocks=34, step_tokens=16))
    system = prompt(20, first=90)
    reused = []
    for id in range(6):
        reused.append(cached(scheduler, Sequence(id, (*system, *prompt(20, first=40 + id)), 1)))
        run(scheduler, conversation(100 + id, first=id))
    assert reused == [0, 0, 20, 20, 20, 20]


def test_a_flushed_cache_has_nothing_but_what_sequences_hold() -> None:
    """Blocks of a finished answer go; those of a running one stay, and it goes on to its end."""
    scheduler = Scheduler(limits(windows=(0, 6), num_blocks=64, step_tokens=64))
    run(scheduler, Sequence(1, prompt(24), 1))
    scheduler.add(Sequence(2, prompt(20, first=7), 9))
    step(scheduler)
    scheduler.cache.flush()
    check(scheduler)
    assert scheduler.stats().blocks_cached == 0
    assert scheduler.stats().blocks_used == sum(held(scheduler.running[0]))
    assert cached(scheduler, Sequence(3, prompt(24), 1)) == 0
    assert not scheduler.sequences

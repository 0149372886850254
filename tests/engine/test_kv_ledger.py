"""An engine is killed at any moment, in the middle of a step or of an entry: what the next one finds in the KV cache
and in its ledger never changes an answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.backend.base import Batch, Bitmasks, BlockMemory
from penstock.backend.blocks.host_room import PlainRoom
from penstock.backend.fake import FakeBackend, pooled
from penstock.core import Policy, check
from penstock.core.incoming import take_in
from penstock.engine.assemble import assemble
from penstock.engine.control.weight_updates import WeightUpdates
from penstock.engine.engine import Engine
from penstock.engine.kv_handover.kept_kv import KeptKv
from penstock.engine.kv_handover.ledger import KvLedger, ledger_bytes
from penstock.planning.memory_plan import all_states
from penstock.types import Finished, Limits, Request, SamplingParams, StepResult, Tokens
from penstock.types.messages import UpdateWeights
from tests.core.test_properties import VOCAB, Answer, Arrival, Shuffles, World, alone, note, worlds
from tests.engine.guesses import RandomDrafting
from tests.examples import examples

LIMITS = Limits(max_len=64, max_rows=4, step_tokens=16, block_size=4, num_blocks=16, vocab=VOCAB)
PROMPT = tuple(range(13))


class Remains(NamedTuple):
    """Is what outlives an engine that is killed."""

    ledger: bytes
    kv: Any
    states: Any = None

    @classmethod
    def none(cls, limits: Limits) -> Remains:
        kv = np.full((limits.num_blocks, limits.block_size), -1, np.int64)
        return cls(bytes(ledger_bytes(limits)), kv, np.full(all_states(limits), -1, np.int64))


class Deaths:
    """Keeps what would remain if the engine were killed at one of many moments, any of them as likely as another."""

    def __init__(self, random: Random, ledger: bytearray) -> None:
        self.random = Random(random.randrange(2**32))
        self._ledger = ledger
        self.kv: Any = None
        self.states: Any = np.zeros(0, np.int64)
        self._moments = 0
        self.remains: Remains | None = None

    def may_die(self, kv: Any = None, states: Any = None) -> None:
        self._moments += 1
        if self.random.randrange(self._moments) == 0:
            kv, states = self.kv if kv is None else kv, self.states if states is None else states
            self.remains = Remains(bytes(self._ledger), kv.copy(), states.copy())

    def mix(self, before: Any, after: Any) -> Any:
        """Returns KV or states of which a step has written a part."""
        written = np.random.default_rng(self.random.randrange(2**32)).random(before.shape) < 0.5
        return np.where(written, after, before)


class MortalBackend(FakeBackend):
    """Can be killed before, in and after every step."""

    deaths: Deaths

    def _compute(self, batch: Batch, masks: Bitmasks | None) -> StepResult:
        deaths = self.deaths
        kv, states = deaths.kv.copy(), deaths.states.copy()
        deaths.may_die()
        result = super()._compute(batch, masks)
        deaths.may_die(deaths.mix(kv, deaths.kv), deaths.mix(states, deaths.states))
        deaths.may_die()
        return result


class QueuedBackend(MortalBackend):
    """Queues steps and copies, as a GPU does, and does nothing before it must."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._queue: list[Callable[[], object]] = []
        self.kv, self.states = QueuedBlocks(self.kv, self), QueuedBlocks(self.states, self)
        self.keeper: Any = self

    def queue(self, work: Callable[[], object]) -> None:
        self._queue.append(work)

    def launch(self, batch: Batch) -> int:
        self.queue(partial(super().launch, batch))
        return batch.step

    def wait(self, ticket: int) -> StepResult:
        while ticket not in self._results:
            self._queue.pop(0)()
        return super().wait(ticket)

    def synchronize(self) -> None:
        while self._queue:
            self._queue.pop(0)()


class QueuedBlocks:
    """Implements BlockMemory of a backend that queues."""

    def __init__(self, memory: BlockMemory, backend: QueuedBackend) -> None:
        self._memory, self._backend = memory, backend
        self.fingerprint = memory.fingerprint

    def copy_blocks(self, pairs: Any) -> None:
        self._backend.queue(partial(self._memory.copy_blocks, list(pairs)))

    def import_blocks(self, blocks: Any, data: Any) -> None:
        self._backend.queue(partial(self._memory.import_blocks, list(blocks), bytes(data)))

    def touch_blocks(self, blocks: Any) -> None:
        self._backend.queue(partial(self._memory.touch_blocks, list(blocks)))

    def export_blocks(self, blocks: Any) -> bytes:
        self._backend.synchronize()
        return self._memory.export_blocks(blocks)

    def host_room(self, places: int) -> Any:
        return QueuedRoom(PlainRoom(self._memory, places), self._backend)


class QueuedRoom:
    """Implements HostRoom of a backend that queues."""

    def __init__(self, room: PlainRoom, backend: QueuedBackend) -> None:
        self._room, self._backend = room, backend
        self.array, self.finish = room.array, backend.synchronize
        self.timings, self.close = room.timings, room.close

    def copy_out(self, blocks: Any, places: Any) -> None:
        self._backend.queue(partial(self._room.copy_out, list(blocks), list(places)))

    def copy_in(self, blocks: Any, places: Any) -> None:
        self._backend.queue(partial(self._room.copy_in, list(blocks), list(places)))


class MortalWords:
    """Can be killed after every word that is written to it."""

    def __init__(self, words: memoryview[int], deaths: Deaths) -> None:
        self._words, self._deaths = words, deaths

    def __setitem__(self, at: int, value: int) -> None:
        self._words[at] = value
        self._deaths.may_die()


class MortalEntry:
    """Can be killed after any byte of an entry."""

    def __init__(self, entry: Any, deaths: Deaths) -> None:
        self._entry, self._deaths = entry, deaths
        self.unpack_from = entry.unpack_from

    def pack_into(self, memory: bytearray, at: int, *values: Any) -> None:
        data = self._entry.pack(*values)
        cut = self._deaths.random.randrange(len(data))
        memory[at : at + cut] = data[:cut]
        self._deaths.may_die()
        memory[at + cut : at + len(data)] = data[cut:]


def opened(limits: Limits, found: Remains, random: Random, **options: Any) -> tuple[Engine, Deaths]:
    """Returns an engine that adopts what remains of another, and can be killed itself."""
    memory = bytearray(found.ledger)
    deaths = Deaths(random, memory)
    kind = QueuedBackend if options.get("depth") else MortalBackend
    backend = kind(limits.vocab, limits.max_rows, limits.windows)
    backend.reserve_kv(limits.num_blocks, limits.block_size, all_states(limits))
    backend._programs[0].kv = deaths.kv = found.kv.copy()
    if found.states is not None:
        backend._programs[0].states = deaths.states = found.states.copy()
    backend.deaths = deaths
    ledger: Any = KvLedger(memory, limits)
    ledger._words, ledger._entry = MortalWords(ledger._words, deaths), MortalEntry(ledger._entry, deaths)
    ledger._state_entry = MortalEntry(ledger._state_entry, deaths)
    return assemble(backend, limits, ledger=ledger, **options), deaths


def ask(engine: Engine, requests: list[Arrival]) -> None:
    """Has all requests answered, each as if it were alone."""
    answers = [Answer() for _ in requests]
    for id, request in enumerate(requests):
        sampling = SamplingParams(temperature=0, prompt_logprobs=0 if request.score else None)
        engine.add(
            Request(id, request.prompt, sampling, request.max_tokens, request.stop_ids, request.priority, request.salt,
                    request.pooling)
        )  # fmt: skip
    while not engine.idle:
        for event in engine.step():
            note(answers[event.seq], event)
        check(engine.scheduler)
    for request, answer in zip(requests, answers, strict=True):
        tokens, reason = alone(request, engine.limits)
        assert isinstance(answer.end, Finished)
        assert (answer.tokens, answer.end.reason) == (tokens, reason)
        assert answer.end.pooled == (pooled(request.prompt, request.pooling, VOCAB) if request.pooling else b"")


# A sequence fills in a windowed block that a node has lost: what was noted of it as a tail is over.
FILLED_IN = Arrival(0, (1, 2, 3, *range(20, 40)), 34, frozenset(), 1, "tenant", False, 0.0, "", False, None)
SMALL_WINDOWS = LIMITS._replace(max_len=100, step_tokens=37, block_size=16, num_blocks=3, windows=(6, 1), host_places=1)


@settings(max_examples=examples(90))
@example((SMALL_WINDOWS, 1, [FILLED_IN, FILLED_IN]), Random(0))
@given(worlds(), st.randoms(use_true_random=False))
def test_whenever_engines_are_killed_answers_are_those_of_engines_that_live(world: World, random: Random) -> None:
    limits, depth, requests = world
    remains = Remains.none(limits)
    for life in range(4):
        policy: Policy | None = Shuffles(limits, random) if life % 2 else None
        drafting = RandomDrafting(lambda request: [5] * 30, VOCAB, random) if life == 1 else None
        engine, deaths = opened(limits, remains, random, depth=depth, policy=policy, drafting=drafting)
        check(engine.scheduler)
        ask(engine, requests[life % len(requests) :] + requests[: life % len(requests)])
        assert deaths.remains is not None
        remains = deaths.remains


def served(remains: Remains | None = None) -> tuple[Engine, Deaths]:
    return opened(LIMITS, remains or Remains.none(LIMITS), Random(1))


def finish(engine: Engine, deaths: Deaths, *prompts: tuple[int, ...]) -> Remains:
    """Returns what remains of an engine that has answered these and is killed while it does nothing."""
    for id, prompt in enumerate(prompts):
        engine.add(Request(id, prompt, SamplingParams(temperature=0), 4))
    while not engine.idle:
        engine.step()
    return Remains(bytes(deaths._ledger), deaths.kv, deaths.states)


def arrival(prompt: tuple[int, ...]) -> Arrival:
    """Returns a request for a few tokens."""
    return Arrival(0, prompt, 4, frozenset(), 0, "", False, 0.0, "", False, None)


def numbers(remains: Remains) -> list[int]:
    """Returns the numbers of all entries."""
    stride = ledger_bytes(LIMITS) // LIMITS.num_blocks
    return [int.from_bytes(remains.ledger[at : at + 8], "little") for at in range(0, len(remains.ledger), stride)]


def test_an_engine_adopts_all_full_blocks_and_reuses_them() -> None:
    first, deaths = served()
    remains = finish(first, deaths, PROMPT)
    second, deaths = served(remains)
    stats = second.stats()
    assert (stats.adopted_blocks, stats.blocks_cached, stats.blocks_free) == (4, 4, 12)
    again = finish(second, deaths, PROMPT)
    assert (second.stats().cached_tokens, second.stats().computed_tokens) == (12, 1 + 3)
    assert numbers(again) == numbers(remains)
    assert served(again)[0].stats().adopted_blocks == 4


@pytest.mark.parametrize("host", [0, 4])
def test_states_are_adopted_with_the_blocks_at_whose_ends_they_were_saved(host: int) -> None:
    limits = LIMITS._replace(states=8, host_states=host, host_places=host, num_blocks=40)
    first, deaths = opened(limits, Remains.none(limits), Random(1))
    remains = finish(first, deaths, PROMPT, (*PROMPT, 7, 8, 9, 5))
    second, deaths = opened(limits, remains, Random(1))
    check(second.scheduler)
    assert len(second.scheduler.cache.states.saved()) == len(first.scheduler.cache.states.saved()) > 1
    ask(second, [arrival(PROMPT), arrival((*PROMPT, 7, 8, 9, 5))])
    assert second.stats().cached_tokens == 12 + 16
    third, _ = opened(limits, finish(second, deaths), Random(1))
    assert len(third.scheduler.cache.states.saved()) == len(second.scheduler.cache.states.saved())


def test_a_state_whose_block_is_not_adopted_is_not_adopted_either() -> None:
    limits = LIMITS._replace(states=2, num_blocks=40)
    first, deaths = opened(limits, Remains.none(limits), Random(1))
    remains = finish(first, deaths, PROMPT)
    ledger = bytearray(remains.ledger)
    ledger[: ledger_bytes(LIMITS._replace(num_blocks=1))] = bytes(ledger_bytes(LIMITS._replace(num_blocks=1)))
    second, deaths = opened(limits, remains._replace(ledger=bytes(ledger)), Random(1))
    assert second.stats().adopted_blocks == 0
    assert not second.scheduler.cache.states.saved()
    assert not second.find(KeptKv)._ledger._state_numbers().any()
    ask(second, [arrival(PROMPT)])


def test_evicted_blocks_are_not_adopted() -> None:
    first, deaths = served()
    finish(first, deaths, PROMPT)
    remains = finish(first, deaths, *((seed, *range(20, 50)) for seed in range(3)))
    second, deaths = served(remains)
    assert second.stats().adopted_blocks == first.stats().blocks_cached
    finish(second, deaths, PROMPT)
    assert second.stats().cached_tokens == 0


def test_a_flushed_cache_leaves_nothing() -> None:
    first, deaths = served()
    finish(first, deaths, PROMPT)
    first.flush_cache()
    assert not any(deaths._ledger[:: ledger_bytes(LIMITS) // LIMITS.num_blocks])
    assert served(finish(first, deaths))[0].stats().adopted_blocks == 0


def test_entries_that_contradict_each_other_are_not_adopted() -> None:
    first, deaths = served()
    remains = finish(first, deaths, PROMPT)
    stride = ledger_bytes(LIMITS) // LIMITS.num_blocks
    ledger = bytearray(remains.ledger)
    ledger[8 * stride : 9 * stride] = ledger[:stride]  # two blocks are the first
    second, deaths = served(remains._replace(ledger=bytes(ledger)))
    assert second.stats().adopted_blocks == 4
    again = finish(second, deaths)
    assert again.ledger[8 * stride : 8 * stride + 8] == bytes(8)
    ledger[stride + 8] ^= 1  # the second block's hash
    second, _ = served(remains._replace(ledger=bytes(ledger)))
    assert second.stats().adopted_blocks == 1


def test_nothing_of_updated_weights_is_noted() -> None:
    first, deaths = served()
    finish(first, deaths, PROMPT)
    first.find(WeightUpdates)._change_version(UpdateWeights("new", id=99))
    remains = finish(first, deaths, PROMPT)
    assert first.stats().blocks_cached == 4
    assert served(remains)[0].stats().adopted_blocks == 0


def killed_while_answering(limits: Limits, prompt: tuple[int, ...], steps: int) -> tuple[Remains, tuple[int, ...]]:
    """Returns what remains of an engine that is killed after so many steps, and what it had answered."""
    engine, deaths = opened(limits, Remains.none(limits), Random(1))
    engine.add(Request(1, prompt, SamplingParams(temperature=0), 40))
    tokens = [token for _ in range(steps) for event in engine.step() for token in getattr(event, "tokens", ())]
    return Remains(bytes(deaths._ledger), deaths.kv), tuple(tokens)


@pytest.mark.parametrize("windows", [(0,), (0, 8), (8, 5)])
@pytest.mark.parametrize("steps", range(1, 7))
def test_an_answer_goes_on_with_one_token_wherever_its_engine_was_killed(windows: tuple[int, ...], steps: int) -> None:
    limits = LIMITS._replace(windows=windows, num_blocks=40)
    remains, tokens = killed_while_answering(limits, PROMPT, steps)
    second, _ = opened(limits, remains, Random(1))
    second.add(Request(1, PROMPT, SamplingParams(temperature=0), 40, generated=tokens))
    second.step()
    assert second.stats().computed_tokens == 1
    check(second.scheduler)


def test_a_step_that_nobody_heard_of_is_computed_again_in_its_block() -> None:
    remains, tokens = killed_while_answering(LIMITS, PROMPT, 3)
    second, _ = served(remains)
    second.add(Request(1, PROMPT, SamplingParams(temperature=0), 40, generated=tokens[:-1]))
    assert [event.tokens for event in second.step() if isinstance(event, Tokens)] == [tokens[-1:]]
    assert second.stats().computed_tokens == 1


def test_tails_survive_several_deaths_until_their_blocks_are_used() -> None:
    remains, _ = killed_while_answering(LIMITS, PROMPT, 3)
    for _ in range(2):
        engine, deaths = served(remains)
        remains = Remains(bytes(deaths._ledger), deaths.kv)
        assert len(engine.scheduler.cache.tails) == 1
    engine, deaths = served(remains)
    engine.add(Request(1, tuple(range(40, 60)), SamplingParams(temperature=0), 44))  # it takes all blocks
    while not engine.idle:
        engine.step()
    assert not engine.scheduler.cache.tails
    assert not served(Remains(bytes(deaths._ledger), deaths.kv))[0].scheduler.cache.tails


def test_an_answer_that_has_ended_leaves_no_tail() -> None:
    first, deaths = served()
    assert not served(finish(first, deaths, PROMPT))[0].scheduler.cache.tails


def test_what_keeps_nothing_in_the_prefix_cache_leaves_no_tail() -> None:
    first, deaths = served()
    first.add(Request(1, PROMPT, SamplingParams(temperature=0), 9, pooling="mean"))
    first.scheduler.sequences[1].max_len += 9
    first.step()
    assert not any(numbers(Remains(bytes(deaths._ledger), deaths.kv)))


def test_of_a_tail_that_is_noted_of_one_layer_group_only_what_both_have_is_used() -> None:
    limits = LIMITS._replace(windows=(0, 8), num_blocks=40)
    remains, tokens = killed_while_answering(limits, PROMPT, 3)
    stride = ledger_bytes(limits) // limits.num_blocks
    ledger = bytearray(remains.ledger)
    lengths = {at: ledger[at + 8] for at in range(0, len(ledger), stride) if any(ledger[at : at + 8])}
    last = max(at for at, length in lengths.items() if length == 3)
    ledger[last + 8] = 1
    second, _ = opened(limits, remains._replace(ledger=bytes(ledger)), Random(1))
    second.add(Request(1, PROMPT, SamplingParams(temperature=0), 40, generated=tokens))
    second.step()
    assert second.stats().computed_tokens == 3


@pytest.mark.parametrize("busy", [False, True])
def test_blocks_whose_copies_a_device_has_only_queued_are_not_adopted(busy: bool) -> None:
    """They come from a peer or a disk, while the device has a step in flight or nothing to do."""
    source, _ = served()
    finish(source, served()[1], PROMPT)
    chain = source.scheduler.cache.trie.match("", PROMPT, 3)
    data = source.backend.kv.export_blocks([node.blocks[0] for node in chain])
    engine, deaths = opened(LIMITS, Remains.none(LIMITS), Random(1), depth=1)
    engine.add(Request(1, (50, 51, 52), SamplingParams(temperature=0), 20))
    found = []

    def fill(blocks: list[list[int]]) -> int:
        engine.backend.kv.import_blocks([block for (block,) in blocks], data)
        return len(blocks)

    for step in range(30):
        if step == (4 if busy else 28):
            assert take_in(engine.scheduler.cache, "", PROMPT, 0, [[True]] * 3, fill) == 3
        engine.step()
        found.append(Remains(bytes(deaths._ledger), deaths.kv.copy()))
    assert engine.idle
    for remains in found:
        second, _ = opened(LIMITS, remains, Random(1))
        ask(second, [arrival(PROMPT)])
    assert second.stats().cached_tokens == 12

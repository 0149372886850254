"""An engine is killed at any moment, in the middle of a step or of an entry: what the next one finds in the KV cache
and in its ledger never changes an answer."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backend.base import Batch, Bitmasks
from penstock.backend.fake import FakeBackend, pooled
from penstock.core import Policy, check
from penstock.engine.engine import Engine
from penstock.engine.kv_ledger import KvLedger, ledger_bytes
from penstock.engine.weight_messages import UpdateWeights
from penstock.types import Finished, Limits, Request, SamplingParams, StepResult
from tests.core.test_properties import VOCAB, Answer, Arrival, Shuffles, World, alone, note, worlds
from tests.engine.guesses import RandomDrafting

LIMITS = Limits(max_len=64, max_rows=4, step_tokens=16, block_size=4, num_blocks=16, vocab=VOCAB)
PROMPT = tuple(range(13))


class Remains(NamedTuple):
    """Is what outlives an engine that is killed."""

    ledger: bytes
    kv: Any

    @classmethod
    def none(cls, limits: Limits) -> Remains:
        return cls(bytes(ledger_bytes(limits)), np.full((limits.num_blocks, limits.block_size), -1, np.int64))


class Deaths:
    """Keeps what would remain if the engine were killed at one of many moments, any of them as likely as another."""

    def __init__(self, random: Random, ledger: bytearray) -> None:
        self.random = Random(random.randrange(2**32))
        self._ledger = ledger
        self.kv: Any = None
        self._moments = 0
        self.remains: Remains | None = None

    def may_die(self, kv: Any = None) -> None:
        self._moments += 1
        if self.random.randrange(self._moments) == 0:
            self.remains = Remains(bytes(self._ledger), (self.kv if kv is None else kv).copy())

    def mix(self, before: Any) -> Any:
        """Returns KV of which a step has written a part."""
        written = np.random.default_rng(self.random.randrange(2**32)).random(before.shape) < 0.5
        return np.where(written, self.kv, before)


class MortalBackend(FakeBackend):
    """Can be killed before, in and after every step."""

    deaths: Deaths

    def _compute(self, batch: Batch, masks: Bitmasks | None) -> StepResult:
        before = self.deaths.kv.copy()
        self.deaths.may_die()
        result = super()._compute(batch, masks)
        self.deaths.may_die(self.deaths.mix(before))
        self.deaths.may_die()
        return result


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
    backend = MortalBackend(limits.vocab, limits.max_rows, limits.windows)
    backend.reserve_kv(limits.num_blocks, limits.block_size)
    backend._programs[0].kv = deaths.kv = found.kv.copy()
    backend.deaths = deaths
    ledger: Any = KvLedger(memory, limits)
    ledger._words, ledger._entry = MortalWords(ledger._words, deaths), MortalEntry(ledger._entry, deaths)
    return Engine(backend, limits, ledger=ledger, **options), deaths


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
        check(engine._scheduler)
    for request, answer in zip(requests, answers, strict=True):
        tokens, reason = alone(request, engine.limits)
        assert isinstance(answer.end, Finished)
        assert (answer.tokens, answer.end.reason) == (tokens, reason)
        assert answer.end.pooled == (pooled(request.prompt, request.pooling, VOCAB) if request.pooling else b"")


def stateless(world: World) -> World:
    limits, depth, requests = world
    return limits._replace(states=0), depth, requests


@settings(max_examples=60, deadline=None)
@given(worlds().map(stateless), st.randoms(use_true_random=False))
def test_whenever_engines_are_killed_answers_are_those_of_engines_that_live(world: World, random: Random) -> None:
    limits, depth, requests = world
    remains = Remains.none(limits)
    for life in range(4):
        policy: Policy | None = Shuffles(limits, random) if life % 2 else None
        drafting = RandomDrafting(lambda request: [5] * 30, VOCAB, random) if life == 1 else None
        engine, deaths = opened(limits, remains, random, depth=depth, policy=policy, drafting=drafting)
        check(engine._scheduler)
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
    return Remains(bytes(deaths._ledger), deaths.kv)


def test_an_engine_adopts_all_full_blocks_and_reuses_them() -> None:
    first, deaths = served()
    remains = finish(first, deaths, PROMPT)
    second, deaths = served(remains)
    stats = second.stats()
    assert (stats.adopted_blocks, stats.blocks_cached, stats.blocks_free) == (4, 4, 12)
    again = finish(second, deaths, PROMPT)
    assert (second.stats().cached_tokens, second.stats().computed_tokens) == (12, 1 + 3)
    assert again.ledger == remains.ledger
    assert served(again)[0].stats().adopted_blocks == 4


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
    first._change_version(UpdateWeights(99, "new"))
    remains = finish(first, deaths, PROMPT)
    assert first.stats().blocks_cached == 4
    assert served(remains)[0].stats().adopted_blocks == 0

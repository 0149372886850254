"""Blocks move between engines: what is read is verified, and whatever goes wrong, an answer is as if computed alone."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.backend.blocks.array_blocks import ArrayBlocks
from penstock.backend.fake import FakeBackend, continuation
from penstock.config import Config
from penstock.core import check
from penstock.core.kvcache import KvCache
from penstock.core.step_cost import PromptCost
from penstock.engine.assemble import assemble
from penstock.engine.build import open_engine
from penstock.engine.kv_disk import loading
from penstock.engine.kv_transfer import leases as leasing
from penstock.engine.kv_transfer import nixl, server, tcp
from penstock.engine.kv_transfer.leases import Leases
from penstock.engine.kv_transfer.offers import BlockOffers
from penstock.engine.kv_transfer.peers import PeerBlocks, TransferOptions
from penstock.engine.kv_transfer.staging import StagedBlocks
from penstock.engine.kv_transfer.wire import REPLY, REQUEST, BlockPart, TransferRefused
from penstock.engine.loop import advance
from penstock.errors import ConfigError
from penstock.planning.memory_plan import all_states
from penstock.server.telemetry.peer_metrics import peer_metrics
from penstock.types import (
    Aborted,
    BlockOffer,
    Event,
    Finished,
    Limits,
    Offered,
    PeerCounts,
    Report,
    Request,
    SamplingParams,
    Tokens,
)
from penstock.types.messages import Abort, Add, Offer, Prefill, Release

LIMITS = Limits(max_len=128, max_rows=4, step_tokens=16, block_size=4, num_blocks=64, vocab=100, host_places=64)
GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
PROMPT = tuple(range(1, 42))  # 10 full blocks
SHM, TCP = ("shm",), ("tcp:127.0.0.1:0",)
NEEDS_NIXL = pytest.mark.skipif(not nixl.installed(), reason="needs NIXL: pip install --no-deps nixl nixl-cu12")
NIXL = pytest.param(("nixl:127.0.0.1:0",), marks=NEEDS_NIXL, id="nixl")


class Replica:
    """Is an engine with the fake backend, whose answers show what its KV holds."""

    def __init__(self, listen: tuple[str, ...] = SHM, identity: bytes = b"same", **limits: object) -> None:
        self.limits = LIMITS._replace(**limits)
        backend = FakeBackend(LIMITS.vocab, windows=self.limits.windows)
        backend.reserve_kv(self.limits.num_blocks, LIMITS.block_size, all_states(self.limits))
        self.engine = assemble(backend, self.limits, transfer=TransferOptions(identity, listen))
        self._id = 0

    def offer(self, *prompt: int, **options: object) -> BlockOffer | None:
        self._id += 1
        [offered] = advance(self.engine, [Offer(prompt, id=self._id, **options)])
        assert isinstance(offered, Offered)
        assert offered.seq == self._id
        return offered.offer

    def add(self, *prompt: int, max_tokens: int = 6, **options: object) -> int:
        self._id += 1
        request = Request(self._id, prompt, SamplingParams(temperature=0), max_tokens)._replace(**options)
        assert not [event for event in advance(self.engine, [Add(request)]) if isinstance(event, Finished)]
        return self._id

    def drain(self) -> list[Event]:
        events: list[Event] = []
        while not self.engine.idle:
            events += self.engine.step()
            check(self.engine.scheduler)
        return events

    def answer(self, *prompt: int, **options: object) -> Report:
        """Answers a prompt, sees that the answer is right, and returns its report."""
        self._id += 1
        self.engine.add(Request(self._id, prompt, SamplingParams(temperature=0), 6)._replace(**options))
        events = self.drain()
        mine = [event for event in events if event.seq == self._id]
        tokens = [token for event in mine if isinstance(event, Tokens) for token in event.tokens]
        assert tokens == continuation(prompt, 6, LIMITS.vocab, self.limits.states > 0, self.limits.windows)
        [report] = [event.report for event in mine if isinstance(event, Finished)]
        assert report is not None
        return report

    @property
    def counts(self) -> PeerCounts:
        return self.engine.stats().peers


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes computing to be slower than copying, and waits for slow machines: the fake's time means nothing."""
    monkeypatch.setattr(loading, "LEAST", 5.0)
    monkeypatch.setattr(PromptCost, "FEW", 1 << 30)


Start = Callable[..., Replica]


@pytest.fixture
def start() -> Iterator[Start]:
    replicas: list[Replica] = []

    def begin(*args: object, **options: object) -> Replica:
        replicas.append(Replica(*args, **options))
        return replicas[-1]

    yield begin
    for replica in replicas:
        replica.engine.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.001)


@pytest.mark.parametrize("listen", [SHM, TCP, NIXL])
@pytest.mark.parametrize("windows", [(0,), (6,), (0, 6), (0, 9, 23)])
def test_a_prompt_is_read_instead_of_computed(start: Start, listen: tuple[str, ...], windows: tuple[int, ...]) -> None:
    first, second = start(listen, windows=windows), start(windows=windows)
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    assert offer is not None
    assert len(offer.hashes) == 10
    report = second.answer(*PROMPT, pull=offer)
    assert report.cached == 40
    assert dict(report.reused)["peer"] > 0
    assert "peer" in dict(report.waited)
    assert second.answer(*PROMPT).reused == (("device", 40),)
    counts = second.counts
    assert (counts.pulls, counts.pulled_blocks, counts.pulled_tokens, counts.failures) == (1, 10, 40, ())
    assert counts.carriers == ((listen[0].partition(":")[0], 1),)
    assert counts.pull_seconds > 0
    until(lambda: first.counts.leased_blocks == 0)
    assert (first.counts.offers, first.counts.offered_blocks, first.counts.read_blocks) == (1, 10, 10)


@pytest.mark.parametrize("listen", [SHM, TCP, NIXL])
@pytest.mark.parametrize("windows", [(0,), (6,), (0, 6)])
def test_a_state_is_read_with_the_blocks_before_it(
    start: Start, listen: tuple[str, ...], windows: tuple[int, ...]
) -> None:
    sizes = {"windows": windows, "states": 4, "host_states": 2}
    first, second, third = start(listen, **sizes), start(**sizes), start(**sizes)
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    assert offer is not None
    assert offer.present[-1] >> len(windows) == 1
    assert second.answer(*PROMPT, pull=offer).cached == 40
    assert second.answer(*PROMPT).reused == (("device", 40),)
    counts = second.counts
    assert (counts.pulls, counts.pulled_blocks, counts.failures) == (1, 10, ())
    until(lambda: first.counts.leased_blocks == 0)
    assert (first.counts.offered_blocks, first.counts.read_blocks) == (10, 10)
    third.answer(*PROMPT[:22], 5)
    assert third.answer(*PROMPT, pull=first.offer(*PROMPT)).cached == 40
    assert third.counts.failures == ()


def test_without_a_state_nothing_is_offered(start: Start) -> None:
    first = start(states=4, host_states=2)
    first.answer(*PROMPT)
    assert first.offer(*PROMPT[:30]) is None  # its state was saved after 40 tokens alone, and after each step
    first.engine.scheduler.cache.states.clear()
    assert first.offer(*PROMPT) is None


def test_states_that_do_not_move_are_not_offered_and_not_read(start: Start) -> None:
    first, second = start(states=4, host_states=2), start(states=4)
    first.answer(*PROMPT)
    second.answer(*PROMPT)
    assert second.offer(*PROMPT) is None
    third = start(states=4)
    assert third.answer(*PROMPT, pull=first.offer(*PROMPT)).cached == 0
    assert third.counts.failures == (("no_room", 1),)


def test_a_state_that_changes_on_the_way_is_not_used(start: Start) -> None:
    first, second = start(states=4, host_states=2), start(states=4, host_states=2)
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    staging = first.engine.find(PeerBlocks)._offers._desk.leases.staging
    [lease] = first.engine.find(PeerBlocks)._offers._desk.leases._granted.values()
    part = lease.blocks[-1]
    assert part.of_state
    staging.write(part.places[0], bytes(staging.block_bytes))
    assert second.answer(*PROMPT, pull=offer).cached == 0
    assert second.counts.failures == (("stale", 1),)
    assert second.engine.scheduler.cache.states.host.reserved == set()


@pytest.mark.parametrize("name", ["qwen3next", "bamba", "lfm2", "kimi_linear"])
@pytest.mark.parametrize("listen", [SHM, TCP])
def test_hybrid_models_answer_the_same_from_a_peer(name: str, listen: tuple[str, ...]) -> None:
    prompt = tuple((7 * at * at + 3 * at) % 29 + 2 for at in range(45))
    config = Config(
        model=str(GOLDENS / name), device="cpu", threads=1, block_size=4, kv_memory=1 << 20, max_rows=2, offers=listen
    )
    first, second = (open_engine(replace(config, speculation="off")) for _ in range(2))
    said = []
    for engine in (first, second):
        if engine is second:
            [offered] = advance(first, [Offer(prompt, id=1)])
            assert isinstance(offered, Offered)
            assert offered.offer is not None
        pull = offered.offer if engine is second else None
        events = advance(engine, [Add(Request(2, prompt, SamplingParams(temperature=0, logprobs=2), 9, pull=pull))])
        while not engine.idle:
            events += engine.step()
        said.append([each for event in events if isinstance(event, Tokens) for each in event.logprobs])
        cached = [event.report.cached for event in events if isinstance(event, Finished) and event.report]
    assert cached == [44]
    assert said[0] == said[1]
    assert dict(second.stats().reused)["peer"] > 0
    for engine in (first, second):
        engine.close()


def test_only_what_is_missing_is_read(start: Start) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    second.answer(*PROMPT[:20], 7, 7, 7)
    offer = first.offer(*PROMPT)
    assert second.answer(*PROMPT, pull=offer).reused == (("device", 20), ("peer", 20))
    offer = first.offer(*PROMPT, first=5)
    assert offer is not None
    assert len(offer.hashes) == 5
    third = start()
    third.answer(*PROMPT[:25])
    assert third.answer(*PROMPT, pull=offer).cached == 40


def test_host_memory_is_offered_too_and_answers_are(start: Start) -> None:
    first, second = start(num_blocks=16, max_len=64), start()
    first.answer(*PROMPT)
    first.answer(*range(50, 95))
    answer = continuation(PROMPT, 6, LIMITS.vocab)
    prompt = (*PROMPT, *answer, 9)
    assert second.answer(*prompt, pull=first.offer(*prompt)).reused == (("peer", 44),)


def test_nothing_is_offered_where_there_is_nothing(start: Start) -> None:
    first, silent = start(), start(())
    assert first.offer(*PROMPT) is None
    first.answer(*PROMPT)
    assert first.offer(*PROMPT, salt="other") is None
    assert first.offer(*PROMPT, first=10) is None
    silent.answer(*PROMPT)
    assert silent.offer(*PROMPT) is None


def test_offers_are_bounded(start: Start) -> None:
    first = start(num_blocks=16, max_len=64)
    first.answer(*PROMPT)
    offers = [first.offer(*PROMPT) for _ in range(3)]
    assert [len(offer.hashes) if offer else 0 for offer in offers] == [10, 6, 0]
    assert first.counts.leased_blocks == 16
    first.answer(*range(40, 90))  # leases keep nothing from the KV cache
    advance(first.engine, [Release(offers[0].id)])
    again = first.offer(*PROMPT[:20])
    assert again is None or first.counts.leased_blocks <= 16


def test_unknown_ids_are_refused(start: Start) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)._replace(id=bytes(16))
    assert second.answer(*PROMPT, pull=offer).cached == 0
    assert second.counts.failures == first.counts.refusals == (("unknown", 1),)


def test_ranges_are_checked(start: Start) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT[:21])
    wider = first.offer(*PROMPT)._replace(id=offer.id)
    assert second.answer(*PROMPT, pull=wider).cached == 0
    assert second.counts.failures == first.counts.refusals == (("out_of_range", 1),)
    assert second.answer(*PROMPT[:21], pull=offer).cached == 20


def test_an_offer_is_used_once(start: Start) -> None:
    first, second, third = start(), start(), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    assert second.answer(*PROMPT, pull=offer).cached == 40
    assert third.answer(*PROMPT, pull=offer).cached == 0
    assert third.counts.failures == first.counts.refusals == (("used", 1),)


def last_place(replica: Replica) -> int:
    """Returns where the last block of the only offer is staged."""
    [lease] = replica.engine.find(PeerBlocks)._offers._desk.leases._granted.values()
    return lease.blocks[-1].places[0]


@pytest.mark.parametrize("listen", [SHM, TCP, NIXL])
def test_what_was_written_again_before_it_was_read_is_not_used(
    start: Start, listen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(listen), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    staged, place = first.engine.find(PeerBlocks)._offers._desk.leases.staging, last_place(first)
    staged.write(place, bytes(staged.block_bytes))
    assert second.answer(*PROMPT, pull=offer).cached == 36
    assert second.counts.failures == (("stale", 1),)


def test_what_is_written_again_while_it_is_read_is_not_used(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = start(TCP), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    staged, place, read = (
        first.engine.find(PeerBlocks)._offers._desk.leases.staging,
        last_place(first),
        StagedBlocks.read,
    )

    def rewritten(self: StagedBlocks, asked: int) -> memoryview:
        if asked == place:
            staged.write(place, bytes(read(self, asked)))  # the CRC is still right
        return read(self, asked)

    monkeypatch.setattr(StagedBlocks, "read", rewritten)
    assert second.answer(*PROMPT, pull=offer).cached == 36
    assert second.counts.failures == (("stale", 1),)


@pytest.mark.parametrize("at", [0, 4, 9])
def test_what_is_written_again_while_it_is_copied_is_not_used(
    start: Start, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    leases, copy_in = first.engine.find(PeerBlocks)._offers._desk.leases, ArrayBlocks.copy_in
    place = leases._granted[offer.id].blocks[at].places[0]

    def rewritten(*args: Any) -> list[int]:
        crcs = copy_in(*args)
        leases.staging.write(place, bytes(leases.staging.read(place)))
        return crcs

    monkeypatch.setattr(ArrayBlocks, "copy_in", rewritten)
    assert second.answer(*PROMPT, pull=offer).cached == 4 * at
    assert second.counts.failures == (("stale", 1),)


def test_leases_end_with_their_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    offers = [first.offer(*PROMPT, seconds=0.0), first.offer(*PROMPT, seconds=0.0)]
    assert second.answer(*PROMPT, pull=offers[0]).cached == 0
    assert first.offer(*PROMPT) is not None  # ends those that are over
    assert first.counts.leased_blocks == 10
    second.engine.flush_cache()
    assert second.answer(*PROMPT, pull=offers[1]).cached == 0
    assert second.counts.failures == first.counts.refusals == (("expired", 2),)


def test_a_released_offer_cannot_be_read(start: Start) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    assert advance(first.engine, [Release(offer.id), Release(bytes(16))]) == []
    assert first.counts.leased_blocks == 0
    assert second.answer(*PROMPT, pull=offer).cached == 0
    assert second.counts.failures == (("used", 1),)


def test_a_flushed_cache_offers_nothing_any_more(start: Start) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    first.engine.flush_cache()
    assert second.answer(*PROMPT, pull=offer).cached == 0
    assert second.counts.failures == (("expired", 1),)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"epoch": 7}, "other_epoch"),
        ({"identity": b"another"}, "other_model"),
        ({"hashes": (bytes(16),) * 10}, "other_prompt"),
        ({"first": 1}, "other_prompt"),
        ({"addresses": ("shm:penstock-nobody",)}, "unreachable"),
        ({"addresses": ("carrier pigeon", "tcp:127.0.0.1:1", "tcp:127.0.0.1:x")}, "unreachable"),
        ({"addresses": ()}, "unreachable"),
    ],
    ids=str,
)
def test_an_offer_that_does_not_fit_is_computed(start: Start, changed: dict[str, object], reason: str) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    assert second.answer(*PROMPT, pull=offer._replace(**changed)).cached == 0
    assert second.counts.failures == ((reason, 1),)
    assert second.counts.pulls == 0


def test_blocks_after_a_gap_are_computed(start: Start) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    assert second.answer(*PROMPT, pull=first.offer(*PROMPT, first=3)).cached == 0
    assert second.counts.failures == (("gap", 1),)


def test_an_engine_without_room_computes(start: Start) -> None:
    first = start(TCP)
    first.answer(*PROMPT)
    for places in (0, 5):
        second = start(host_places=places)
        assert second.answer(*PROMPT, pull=first.offer(*PROMPT)).cached == 0
        assert second.counts.failures == (("no_room", 1),)


def test_blocks_of_this_machine_need_no_host_memory(start: Start) -> None:
    first, second = start(), start(host_places=0)
    first.answer(*PROMPT)
    assert second.answer(*PROMPT, pull=first.offer(*PROMPT)).reused == (("peer", 40),)
    assert second.counts.carriers == (("shm", 1),)


def test_blocks_go_to_host_memory_while_the_device_has_no_room(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(KvCache, "available", 9)
        second.add(*PROMPT, pull=first.offer(*PROMPT))
    second.drain()
    assert second.counts.pulled_blocks == 10
    assert second.engine.stats().copied_in == 10


def test_what_makes_room_for_copied_blocks_goes_to_host_memory_first(start: Start) -> None:
    first, second = start(), start(num_blocks=32)
    first.answer(*PROMPT)
    others = [tuple(range(at, at + 61)) for at in (2, 30)]
    for prompt in others:
        second.answer(*prompt)
    assert second.answer(*PROMPT, pull=first.offer(*PROMPT)).cached == 40
    assert dict(second.answer(*others[0]).reused)["ram"] > 0


def test_blocks_that_come_twice_are_copied_once(start: Start) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    for id in (1, 2):
        second.engine.add(Request(id, PROMPT, SamplingParams(temperature=0), 6, pull=first.offer(*PROMPT)))
    second.drain()
    assert second.counts.failures == ()
    until(lambda: first.counts.leased_blocks == 0)


def test_scored_prompts_are_computed(start: Start) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    sampling = SamplingParams(temperature=0, prompt_logprobs=0)
    assert second.answer(*PROMPT, pull=first.offer(*PROMPT), sampling=sampling).cached == 0
    assert second.counts.failures == ()


@pytest.mark.parametrize("listen", [SHM, TCP, NIXL])
def test_damaged_blocks_are_computed(start: Start, listen: tuple[str, ...]) -> None:
    first, second = start(listen), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    leases = first.engine.find(PeerBlocks)._offers._desk.leases
    leases.staging.read(leases._granted[offer.id].blocks[4].places[0])[3] ^= 1
    assert second.answer(*PROMPT, pull=offer).cached == 16
    assert second.counts.failures == (("damaged", 1),)


def test_another_block_under_the_same_place_is_computed(start: Start) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    leases = first.engine.find(PeerBlocks)._offers._desk.leases
    lease = leases._granted[offer.id]
    swapped = [*lease.blocks[:2], lease.blocks[3], lease.blocks[2], *lease.blocks[4:]]
    leases._granted[offer.id] = lease._replace(blocks=swapped)
    assert second.answer(*PROMPT, pull=offer).cached == 8
    assert second.counts.failures == (("other_block", 1),)


def test_nonsense_is_refused_and_the_rest_goes_on(start: Start) -> None:
    first, second = start(TCP), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    host, port = offer.addresses[0].split(":")[1:]
    for sent in (b"", b"GET / HTTP/1.1\r\n", b"x" * REQUEST.size):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert len(connection.recv(100)) in (0, REPLY.size)
    assert second.answer(*PROMPT, pull=offer).cached == 40
    assert first.counts.refusals == (("foreign", 1),)


def test_too_many_readers_are_turned_away(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "READERS", 0)
    first, second = start(), start()
    first.answer(*PROMPT)
    assert second.answer(*PROMPT, pull=first.offer(*PROMPT)).cached == 0
    assert second.counts.failures == first.counts.refusals == (("busy", 1),)


def test_an_engine_that_dies_meanwhile_is_computed_for(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = start(TCP), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    send = tcp.TcpListener.send

    def die(self: tcp.TcpListener, connection: socket.socket, staged: StagedBlocks, part: BlockPart) -> None:
        if part.place == last_block:
            connection.shutdown(socket.SHUT_RDWR)
        send(self, connection, staged, part)

    last_block = last_place(first)
    monkeypatch.setattr(tcp.TcpListener, "send", die)
    assert second.answer(*PROMPT, pull=offer).cached == 36
    assert second.counts.failures == (("lost", 1),)
    until(lambda: first.counts.leased_blocks == 0)


def test_a_slow_engine_is_given_up_and_others_run_meanwhile(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LEAST", 0.1)
    go_on = threading.Event()
    monkeypatch.setattr(tcp.TcpListener, "welcome", lambda *_: go_on.wait(10))
    first, second = start(TCP), start()
    first.answer(*PROMPT)
    slow = second.add(*PROMPT, pull=first.offer(*PROMPT))
    second.add(5, 6, 7, 8, 9, 10)
    events: list[Event] = []
    while not any(isinstance(event, Finished) for event in events):
        events += second.engine.step()
    assert events[-1].seq != slow
    [report] = [event.report for event in second.drain() if isinstance(event, Finished) and event.seq == slow]
    assert report.cached == 0
    assert second.counts.failures == (("slow", 1),)
    go_on.set()
    until(lambda: first.counts.leased_blocks == 0)
    chains, host = second.engine.find(PeerBlocks)._pulls._chains, second.engine.scheduler.cache.host
    until(lambda: chains.collect() or not host.reserved)


def test_a_request_may_be_aborted_while_it_waits(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(tcp.TcpListener, "welcome", lambda *_: go_on.wait(10))
    first, second = start(TCP), start()
    first.answer(*PROMPT)
    id = second.add(*PROMPT, pull=first.offer(*PROMPT))
    second.engine.abort(id)
    assert second.drain() == [Aborted(id)]
    go_on.set()
    assert second.answer(*PROMPT).cached == 0


def test_updated_weights_have_other_blocks(start: Start) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    second.engine.weights = second.engine.weights._replace(updates=1)
    assert second.answer(*PROMPT, pull=offer).cached == 0
    assert second.counts.failures == (("new_weights", 1),)


def test_addresses_that_cannot_be_listened_on() -> None:
    with pytest.raises(ConfigError, match="cannot offer KV blocks at tcp:nowhere"):
        Replica(("tcp:nowhere:x",))
    with pytest.raises(ConfigError, match="shm, tcp:HOST:PORT or nixl:HOST:PORT; got 'pigeon'"):
        Replica(("pigeon",))


def test_leases_forget_the_oldest_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "REMEMBERED", 1)
    leases = Leases(StagedBlocks(1, 8), 1, now=lambda: 0.0)
    ids = [leases.grant([], 1.0) for _ in range(2)]
    for id in ids:
        leases.end(id)
    assert [refused(leases, id) for id in ids] == ["unknown", "used"]


def refused(leases: Leases, id: bytes) -> str:
    with pytest.raises(TransferRefused) as caught:
        leases.open(id, 1, 0, 1)
    return caught.value.reason


def test_a_prompt_is_computed_to_be_offered(start: Start) -> None:
    first, second = start(), start()
    request = Request(1, PROMPT, SamplingParams(temperature=0), 6, generated=(3, 4, 5, 6))
    events = advance(first.engine, [Prefill(request, 2, id=77)])
    while not first.engine.idle:
        events += advance(first.engine, [])
    [offered] = events
    assert isinstance(offered, Offered)
    assert (offered.seq, offered.offer.first, len(offered.offer.hashes)) == (77, 2, 9)
    second.answer(*PROMPT[:9])
    id = second.add(*PROMPT, generated=(3, 4, 5, 6), pull=offered.offer)
    [report] = [event.report for event in second.drain() if isinstance(event, Finished) and event.seq == id]
    assert sum(tokens for _, tokens in report.reused) == 41  # of the prompt
    assert second.counts.pulled_blocks == 9


def test_a_prompt_that_cannot_be_computed_is_not_offered(start: Start) -> None:
    first = start()
    request = Request(1, PROMPT, SamplingParams(temperature=0), 6)
    too_long = request._replace(prompt=tuple(range(90)) * 2)
    assert advance(first.engine, [Prefill(too_long, id=5)]) == [Offered(5)]
    events = advance(first.engine, [Prefill(request, id=6)])
    events += advance(first.engine, [Abort(6)])
    assert events == [Offered(6)]
    assert start(()).engine.find(PeerBlocks).translate([Finished(9, "stop")]) == [Finished(9, "stop")]


@pytest.mark.parametrize("silent", [{"listen": ()}, {"encoder": True, "max_len": 16}])
def test_an_engine_that_offers_nothing_computes_no_prompt_to_be_offered(
    start: Start, silent: dict[str, object]
) -> None:
    replica = start(**silent)
    request = Request(1, PROMPT[:9], SamplingParams(), 6)
    assert advance(replica.engine, [Prefill(request, id=5)]) == [Offered(5)]
    assert replica.engine.idle
    assert replica.engine.stats().computed_tokens == 0


@pytest.mark.parametrize("seed", range(8))
def test_each_request_answers_as_if_alone(start: Start, seed: int) -> None:
    """Draws pulls between three small replicas, with evictions, flushes, restarts, and offers that are kept too long,
    used twice or changed on the way."""
    draw = random.Random(seed)
    windows = draw.choice([(0,), (0, 6), (6,)])
    sizes = {"num_blocks": 40 * len(windows), "host_places": 24 * len(windows), "windows": windows}
    sizes |= {"states": draw.choice([0, 16]), "host_states": 8}
    begin = lambda: start(draw.choice([SHM, TCP]), **sizes)  # noqa: E731
    replicas = [begin() for _ in range(3)]
    texts = [tuple(draw.randrange(100) for _ in range(60)) for _ in range(4)]
    offers: list[BlockOffer] = []
    read = 0
    for _ in range(60):
        text = draw.choice(texts)
        prompt = (*text[: draw.randrange(5, 60)], *(draw.randrange(100) for _ in range(draw.randrange(3))))
        giver, taker = draw.sample(replicas, 2)
        if (offer := giver.offer(*prompt, seconds=draw.choice([0.0, 5.0]), first=draw.choice([0, 0, 2]))) is not None:
            offers.append(offer)
        pull = draw.choice([offer, offer, *offers[-4:]])
        taker.answer(*prompt, pull=pull)
        if draw.random() < 0.1:
            draw.choice(replicas).engine.flush_cache()
        if draw.random() < 0.05:
            at = draw.randrange(3)
            read += replicas[at].counts.pulled_blocks
            replicas[at].engine.close()
            replicas[at] = begin()
    assert read + sum(replica.counts.pulled_blocks for replica in replicas) > 0


def test_counts_add_up_and_are_exported() -> None:
    one = PeerCounts(1, 2, 8, 0.5, (("slow", 1),), 3, 4, 5, (("used", 2),), 6, (("tcp", 1),), (("nixl", 1),))
    both = one.plus(PeerCounts(failures=(("gap", 1), ("slow", 2)), pulls=4, carriers=(("shm", 4),)))
    carried = (("shm", 4), ("tcp", 1)), (("nixl", 1),)
    assert both == PeerCounts(5, 2, 8, 0.5, (("gap", 1), ("slow", 3)), 3, 4, 5, (("used", 2),), 6, *carried)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in peer_metrics(both)
        for sample in metric.samples
    }
    assert samples["penstock_peer_pulls_total",] == 5
    assert samples["penstock_peer_pull_failures_total", "slow"] == 3
    assert samples["penstock_peer_offer_refusals_total", "used"] == 2
    assert samples["penstock_peer_leased_blocks",] == 6
    assert samples["penstock_peer_carried_total", "shm"] == 4
    assert samples["penstock_peer_carrier_fallbacks_total", "nixl"] == 1


@pytest.mark.timeout(20)
@pytest.mark.parametrize("free", range(12))
def test_a_state_that_finds_no_room_leaves_nothing_to_offer(free: int) -> None:
    """Its parts may take more places than all blocks of the chain: the search for a shorter chain never ended."""
    offers = BlockOffers.__new__(BlockOffers)
    offers._cache = SimpleNamespace(reusable=len, groups=1)  # type: ignore[assignment]
    offers._desk = SimpleNamespace(state_parts=9)  # type: ignore[assignment]
    offers._wanted = lambda nodes, first, count: count  # type: ignore[method-assign]
    assert offers._that_fit([None] * 5, 0, free) == max(min(free - 9, 5), 0)  # type: ignore[list-item]

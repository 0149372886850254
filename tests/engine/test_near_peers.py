"""Engines on one device read blocks from each other without host memory. The device is a stand-in; all else is real."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest

from penstock.backend.fake import FakeBackend
from penstock.config import Config
from penstock.core import check
from penstock.core.incoming import take_in
from penstock.engine.assemble import assemble
from penstock.engine.kv_disk import loading
from penstock.engine.kv_transfer.cuda_ipc import CudaIpcListener
from penstock.engine.kv_transfer.peers import PeerBlocks, TransferOptions, offer_addresses
from penstock.engine.loop import advance
from penstock.errors import ConfigError, StepFailed
from penstock.planning.memory_plan import all_states
from penstock.types import Aborted, BlockOffer, Offered, Request, SamplingParams
from penstock.types.messages import Prefill, Release
from tests.engine import test_peers
from tests.engine.device_stand_in import StandInRoom, StandInSharing
from tests.engine.test_peers import LIMITS, PROMPT, Start, unmeasured, until

__all__ = ["unmeasured"]
NEAR = ("cuda_ipc", "shm")
GPU = "GPU-0"


class Replica(test_peers.Replica):
    """Is an engine on the stand-in, without host memory for blocks unless it is told otherwise."""

    def __init__(
        self, listen: tuple[str, ...] = NEAR, device: str = GPU, room: int = 1 << 20, **limits: object
    ) -> None:
        self.limits = LIMITS._replace(**{"host_places": 0, **limits})
        backend = FakeBackend(LIMITS.vocab, windows=self.limits.windows)
        backend.reserve_kv(self.limits.num_blocks, LIMITS.block_size, all_states(self.limits))
        self.sharing = backend.sharing = StandInSharing(backend.kv, device, room)
        self.engine = assemble(backend, self.limits, transfer=TransferOptions(b"same", listen))
        self._id = 0

    def offer(self, *prompt: int, **options: object) -> BlockOffer | None:
        return super().offer(*prompt, **{"device": GPU, **options})

    @property
    def near(self) -> StandInRoom:
        return self.sharing.rooms[0]

    @property
    def staged(self) -> list[int]:
        """Returns where the blocks of the only offer are."""
        [lease] = self.engine.find(PeerBlocks)._offers._near.leases._granted.values()
        return [block.places[-1] for block in lease.blocks]


@pytest.fixture
def start() -> Start:
    replicas: list[Replica] = []

    def begin(*args: object, **options: object) -> Replica:
        replicas.append(Replica(*args, **options))
        return replicas[-1]

    yield begin
    for replica in replicas:
        replica.engine.close()


@pytest.mark.parametrize("windows", [(0,), (6,), (0, 6), (0, 9, 23)])
def test_a_prompt_is_copied_on_the_device(start: Start, windows: tuple[int, ...]) -> None:
    first, second = start(windows=windows), start(windows=windows)
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    assert [address.partition("/")[0] for address in offer.addresses] == ["cuda_ipc:GPU-0"]
    report = second.answer(*PROMPT, pull=offer)
    assert report.cached == 40
    assert report.reused == (("peer", 40),)
    assert second.answer(*PROMPT).reused == (("device", 40),)
    counts = second.counts
    assert (counts.pulls, counts.pulled_blocks, counts.failures) == (1, 10, ())
    assert counts.carriers == (("cuda_ipc", 1),)
    until(lambda: first.counts.leased_blocks == 0)
    assert (first.counts.offers, first.counts.offered_blocks, first.counts.read_blocks) == (1, 10, 10)
    assert [room.closed for room in second.sharing.rooms] == [True]


def test_only_what_is_missing_is_copied(start: Start) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    second.answer(*PROMPT[:20], 7, 7, 7)
    assert second.answer(*PROMPT, pull=first.offer(*PROMPT)).reused == (("device", 20), ("peer", 20))
    second.engine.flush_cache()
    assert second.answer(*PROMPT, pull=first.offer(*PROMPT, first=5)).cached == 0
    assert second.counts.failures == (("gap", 1),)


def test_engines_on_other_devices_get_blocks_through_host_memory(start: Start) -> None:
    first, other = start(), start(device="GPU-1", host_places=64)
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT, device="GPU-1")
    assert offer.addresses[0].startswith("shm:")
    assert other.answer(*PROMPT, pull=offer).cached == 40
    assert other.counts.carriers == (("shm", 1),)
    assert first.sharing.rooms == []  # it takes memory once it is needed
    assert other.answer(*range(50, 90), pull=first.offer(*PROMPT)).cached == 0
    other.engine.flush_cache()
    assert other.answer(*PROMPT, pull=first.offer(*PROMPT)).cached == 0
    assert other.counts.failures == (("other_prompt", 1), ("unreachable", 1))


def test_blocks_that_have_left_the_device_travel_through_host_memory(start: Start) -> None:
    first, second = start(num_blocks=16, max_len=64, host_places=64), start(host_places=64)
    first.answer(*PROMPT)
    first.answer(*range(50, 95))
    offer = first.offer(*PROMPT)
    assert offer.addresses[0].startswith("shm:")
    assert second.answer(*PROMPT, pull=offer).reused == (("peer", 40),)


def test_a_device_without_memory_offers_through_host_memory(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    first, second = start(room=0), start(host_places=64)
    first.answer(*PROMPT)
    for _ in range(2):
        assert first.offer(*PROMPT).addresses[0].startswith("shm:")
    assert caplog.text.count("there is no memory") == 1
    small = start(room=4)
    small.answer(*PROMPT)
    assert len(small.offer(*PROMPT).hashes) == 4
    assert second.answer(*PROMPT, pull=first.offer(*PROMPT)).cached == 40


def test_states_travel_through_host_memory(start: Start) -> None:
    sizes = {"states": 4, "host_states": 2, "host_places": 64}
    first, second = start(**sizes), start(**sizes)
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    assert [address.partition(":")[0] for address in offer.addresses] == ["shm"]
    assert second.answer(*PROMPT, pull=offer).reused == (("peer", 40),)
    assert second.counts.carriers == (("shm", 1),)
    assert first.sharing.rooms == second.sharing.rooms == []
    other = start(states=4, host_states=2)
    assert other.answer(*PROMPT, pull=first.offer(*PROMPT)).cached == 0
    assert other.counts.failures == (("no_room", 1),)


def test_abuses_are_refused_and_counted(start: Start) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    offer, short, late = first.offer(*PROMPT), first.offer(*PROMPT[:21]), first.offer(*PROMPT, seconds=0.0)

    def pulled(offer: BlockOffer) -> int:
        second.engine.flush_cache()
        return second.answer(*PROMPT[: 4 * len(offer.hashes) + 1], pull=offer).cached

    assert pulled(offer._replace(id=bytes(16))) == 0
    assert pulled(offer._replace(id=short.id)) == 0  # more blocks than it has
    assert pulled(late) == 0
    assert pulled(offer._replace(epoch=3)) == 0
    assert pulled(short) == 20
    assert pulled(short) == 0
    advance(first.engine, [Release(offer.id)])
    assert pulled(offer) == 0
    wanted = {"expired": 1, "other_epoch": 1, "out_of_range": 1, "unknown": 1, "used": 2}
    assert dict(second.counts.failures) == dict(first.counts.refusals) == wanted


def test_what_was_written_again_before_it_was_read_is_not_used(start: Start) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    staging, place = first.engine.find(PeerBlocks)._offers._near.leases.staging, first.staged[-1]
    staging.write(place, bytes(staging.read(place)))
    assert second.answer(*PROMPT, pull=offer).cached == 36
    assert second.counts.failures == (("stale", 1),)


@pytest.mark.parametrize("place", [0, 4, 9])
def test_what_is_written_again_while_it_is_copied_is_not_used(
    start: Start, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    offer, read = first.offer(*PROMPT), StandInRoom.read
    staging, staged = first.engine.find(PeerBlocks)._offers._near.leases.staging, first.staged

    def rewritten(self: StandInRoom, places: Sequence[int], blocks: Sequence[int]) -> list[int]:
        sums = read(self, places, blocks)
        staging.write(staged[place], bytes(staging.read(staged[place])))
        return sums

    monkeypatch.setattr(StandInRoom, "read", rewritten)
    assert second.answer(*PROMPT, pull=offer).cached == 4 * place
    assert second.counts.failures == (("stale", 1),)


def test_damaged_blocks_are_computed(start: Start) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    first.near.array[first.staged[4], 3] ^= 1
    assert second.answer(*PROMPT, pull=offer).cached == 16
    assert second.counts.failures == (("damaged", 1),)


def test_checksums_are_of_the_block_that_was_wanted(start: Start) -> None:
    """Two blocks change places on the device: both are whole, and neither is the one that was asked for."""
    first, second = start(), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    one, other = first.staged[2:4]
    first.near.array[[one, other]] = first.near.array[[other, one]]
    assert second.answer(*PROMPT, pull=offer).cached == 8
    assert second.counts.failures == (("damaged", 1),)


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("CUDA error"), IndexError("place 9")], ids=repr)
def test_a_copy_that_fails_is_computed(start: Start, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: StandInRoom, places: Sequence[int], blocks: Sequence[int]) -> list[int]:
        raise error

    monkeypatch.setattr(StandInRoom, "read", fails)
    first, second = start(), start()
    first.answer(*PROMPT)
    assert second.answer(*PROMPT, pull=first.offer(*PROMPT)).cached == 0
    assert second.counts.failures == (("lost", 1),)


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("out of memory")], ids=repr)
def test_memory_that_cannot_be_opened_is_computed(
    start: Start, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)

    def fails(handle: bytes) -> StandInRoom:
        raise error

    monkeypatch.setattr(second.sharing, "open", fails)
    assert second.answer(*PROMPT, pull=offer).cached == 0
    assert second.counts.failures == (("unreachable", 1),)


def test_nothing_is_copied_where_there_is_no_room(start: Start) -> None:
    first, second = start(), start(num_blocks=32)
    first.answer(*PROMPT)
    second.add(*range(60, 86), max_tokens=60)
    second.engine.step()
    second.engine.step()
    offer = first.offer(*PROMPT)
    cache = second.engine.scheduler.cache
    assert take_in(cache, "", PROMPT, 0, [[True]] * 40, lambda blocks: 40) == 0
    second.drain()
    assert second.answer(*PROMPT, pull=offer).cached == 40


def test_what_makes_room_for_copied_blocks_goes_to_host_memory_first(start: Start) -> None:
    first, second = start(), start(num_blocks=32, host_places=64)
    first.answer(*PROMPT)
    others = [tuple(range(at, at + 61)) for at in (2, 30)]
    for prompt in others:
        second.answer(*prompt)
    assert second.answer(*PROMPT, pull=first.offer(*PROMPT)).cached == 40
    assert dict(second.answer(*others[0]).reused)["ram"] > 0


def test_a_pull_whose_room_cannot_be_made_is_computed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = start(), start(num_blocks=32, host_places=64)
    first.answer(*PROMPT)
    others = [tuple(range(at, at + 61)) for at in (2, 30)]
    for prompt in others:
        second.answer(*prompt)
    blocks = second.engine.pipeline.host.blocks

    def fail(copies: Sequence[object]) -> None:
        monkeypatch.undo()
        raise StepFailed("the copy failed")

    monkeypatch.setattr(blocks, "carry_out", fail)
    assert second.answer(*PROMPT, pull=first.offer(*PROMPT)).cached == 0
    assert second.counts.failures == (("failed_copy", 1),)
    check(second.engine.scheduler)
    assert second.answer(*others[0]).cached == 0  # nobody knows which blocks were copied


def test_a_slow_engine_is_given_up_and_its_offer_ends(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LEAST", 0.1)
    go_on, welcome = threading.Event(), CudaIpcListener.welcome

    def wait(*arguments: object) -> None:
        go_on.wait(10)
        welcome(*arguments)

    monkeypatch.setattr(CudaIpcListener, "welcome", wait)
    first, second = start(), start()
    first.answer(*PROMPT)
    assert second.answer(*PROMPT, pull=first.offer(*PROMPT)).cached == 0
    assert second.counts.failures == (("slow", 1),)
    go_on.set()
    until(lambda: first.counts.leased_blocks == 0)
    until(lambda: all(room.closed for room in second.sharing.rooms))


def test_a_request_may_be_aborted_while_it_waits(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(CudaIpcListener, "welcome", lambda *_: go_on.wait(10))
    first, second = start(), start()
    first.answer(*PROMPT)
    id = second.add(*PROMPT, pull=first.offer(*PROMPT))
    second.engine.abort(id)
    assert second.drain() == [Aborted(id)]
    go_on.set()
    assert second.answer(*PROMPT).cached == 0


def test_a_prompt_is_computed_to_be_offered_on_the_device(start: Start) -> None:
    first, second = start(), start()
    events = advance(first.engine, [Prefill(Request(1, PROMPT, SamplingParams(temperature=0), 6), device=GPU, id=77)])
    while not first.engine.idle:
        events += advance(first.engine, [])
    [offered] = events
    assert isinstance(offered, Offered)
    assert second.answer(*PROMPT, pull=offered.offer).reused == (("peer", 40),)
    assert second.counts.carriers == (("cuda_ipc", 1),)


def test_sleep_gives_the_memory_of_offers_back(start: Start) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    first.engine.find(PeerBlocks).release_device()
    assert first.near.closed
    assert second.answer(*PROMPT, pull=offer).cached == 0
    assert second.counts.failures == (("unreachable", 1),)
    second.engine.flush_cache()
    assert second.answer(*PROMPT, pull=first.offer(*PROMPT)).cached == 40


def test_a_flushed_cache_offers_nothing_any_more(start: Start) -> None:
    first, second = start(), start()
    first.answer(*PROMPT)
    offer = first.offer(*PROMPT)
    first.engine.flush_cache()
    assert second.answer(*PROMPT, pull=offer).cached == 0
    assert second.counts.failures == (("expired", 1),)


@pytest.mark.parametrize("seed", range(8))
def test_each_request_answers_as_if_alone(start: Start, seed: int) -> None:
    """Draws pulls between replicas on two devices, with evictions, flushes, offers that are kept too long or used
    twice, and places that are written again."""
    draw = random.Random(seed)
    windows = draw.choice([(0,), (0, 6), (6,)])
    places = draw.choice([0, 24]) * len(windows)
    sizes = {"num_blocks": 40 * len(windows), "host_places": places, "windows": windows}
    replicas = [start(device=device, room=30, **sizes) for device in (GPU, GPU, GPU, "GPU-1")]
    texts = [tuple(draw.randrange(100) for _ in range(60)) for _ in range(4)]
    offers: list[BlockOffer] = []
    for _ in range(100):
        text = draw.choice(texts)
        prompt = (*text[: draw.randrange(5, 60)], *(draw.randrange(100) for _ in range(draw.randrange(3))))
        giver, taker = draw.sample(replicas, 2)
        message = {"seconds": draw.choice([0.0, 5.0]), "first": draw.choice([0, 0, 2]), "device": taker.sharing.name}
        if (offer := giver.offer(*prompt, **message)) is not None:
            offers.append(offer)
        taker.answer(*prompt, pull=offer if draw.random() < 0.7 else draw.choice([None, *offers[-3:]]))
        if draw.random() < 0.1 and (near := giver.engine.find(PeerBlocks)._offers._near) is not None:
            near.leases.staging.begin(range(draw.randrange(5)))
        if draw.random() < 0.3:
            draw.choice(replicas).engine.flush_cache()
    assert sum(dict(replica.counts.carriers).get("cuda_ipc", 0) for replica in replicas) > 0


def test_where_it_is_offered() -> None:
    sharing = StandInSharing(FakeBackend().kv)
    assert offer_addresses(Config(model="m", listen="ipc://x"), sharing) == NEAR
    assert offer_addresses(Config(model="m", listen="tcp://h:1"), sharing) == (*NEAR, "tcp:h:0")
    assert offer_addresses(Config(model="m"), sharing) == ()
    with pytest.raises(ConfigError, match="by engines on a GPU alone"):
        test_peers.Replica(NEAR)

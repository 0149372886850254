"""Blocks are read by another process, with every carrier that is installed; what is abused is refused and counted."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.engine.kv_transfer import nixl
from penstock.engine.kv_transfer.leases import LeasedBlock, Leases
from penstock.engine.kv_transfer.offers import _listener
from penstock.engine.kv_transfer.peers import offer_addresses
from penstock.engine.kv_transfer.reader import OfferReader, WantedBlock
from penstock.engine.kv_transfer.server import OfferServer
from penstock.engine.kv_transfer.staging import StagedBlocks, StagedCopy
from penstock.errors import ConfigError
from penstock.types import BlockOffer

NEEDS_NIXL = pytest.mark.skipif(not nixl.installed(), reason="needs NIXL: pip install --no-deps nixl nixl-cu12")
NIXL = pytest.param("nixl:127.0.0.1:0", marks=NEEDS_NIXL, id="nixl")
CARRIERS = ["shm", "tcp:127.0.0.1:0", NIXL]
Ask = Callable[..., Any]
BYTES, COUNT = 100_000, 6
EPOCH = 77
WANTED = [WantedBlock(bytes([at + 1]) * 16, bytes([at]) * 16, bytes([at]) * 8) for at in range(COUNT)]


def contents(at: int) -> bytes:
    return bytes([at + 1]) * BYTES


class Offerer:
    """Offers blocks without an engine."""

    def __init__(self, listen: str) -> None:
        self.staging = StagedBlocks(2 * COUNT, BYTES)
        self.leases = Leases(self.staging, EPOCH)
        self.server = OfferServer(self.leases, [_listener(listen, self.staging)])

    def offer(self, seconds: float = 60.0) -> tuple[bytes, list[int], tuple[str, ...]]:
        places = self.staging.take(COUNT)
        blocks = [
            LeasedBlock(*wanted, (StagedCopy(place, self.staging.write(place, contents(at))),))
            for at, (wanted, place) in enumerate(zip(WANTED, places, strict=True))
        ]
        return self.leases.grant(blocks, seconds), places, self.server.addresses

    def rewrite(self, place: int) -> None:
        self.staging.write(place, self.staging.read(place).tobytes())  # the CRC is still right

    def expire(self) -> None:
        self.leases.expire()

    def counts(self) -> tuple[dict[str, int], int, int]:
        return dict(self.leases.refused), self.leases.read, self.staging.free


def host(connection: Connection) -> None:
    """Does what tests ask for, in another process."""
    offerer = None
    while (asked := connection.recv()) is not None:
        if asked[0] == "listen":
            offerer = Offerer(asked[1])
        connection.send(None if asked[0] == "listen" else getattr(offerer, asked[0])(*asked[1:]))


class Peer:
    """Is a process that offers blocks."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=host, args=[theirs], daemon=True)
        self._process.start()

    def ask(self, *words: Any) -> Any:
        self._connection.send(words)
        assert self._connection.poll(60), "the other process does not answer"
        return self._connection.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    started = Peer()
    yield started
    started.kill()


@pytest.fixture(params=CARRIERS)
def ask(peer: Peer, request: pytest.FixtureRequest) -> Ask:
    peer.ask("listen", request.param)
    return peer.ask


def reader_of(id: bytes, addresses: tuple[str, ...], first: int = 0, count: int = COUNT) -> OfferReader:
    hashes = tuple(wanted.hash for wanted in WANTED)
    offer = BlockOffer(id, EPOCH, b"same", addresses, 0, hashes, (1,) * COUNT, 5.0)
    return OfferReader(offer, first, count, 1, BYTES)


def read(reader: OfferReader, at: int) -> bool:
    target = bytearray(BYTES)
    right = reader.read(WANTED[at], [memoryview(target)])
    assert not right or target == contents(at)
    return right


def until_free(ask: Ask, free: int) -> tuple[dict[str, int], int]:
    end = time.monotonic() + 20
    while (counts := ask("counts"))[2] != free:
        assert time.monotonic() < end, "the lease does not end"
        time.sleep(0.01)
    return counts[:2]


def test_all_blocks_arrive_and_the_lease_ends(ask: Ask) -> None:
    for turn in range(2):  # the second time agents are connected and memory is mapped
        id, _, addresses = ask("offer")
        reader = reader_of(id, addresses)
        assert [read(reader, at) for at in range(COUNT)] == [True] * COUNT
        reader.close()
        assert (reader.reason, reader.carrier, reader.passed_over) == ("", addresses[0].partition(":")[0], [])
        assert until_free(ask, 2 * COUNT) == ({}, (turn + 1) * COUNT)


def test_an_unknown_id_is_refused(ask: Ask) -> None:
    _, _, addresses = ask("offer")
    reader = reader_of(os.urandom(16), addresses)
    assert not read(reader, 0)
    assert reader.reason == "unknown"
    assert ask("counts")[0] == {"unknown": 1}


def test_blocks_beyond_those_offered_are_refused(ask: Ask) -> None:
    id, _, addresses = ask("offer")
    reader = reader_of(id, addresses, 1, COUNT)
    assert not read(reader, 1)
    assert reader.reason == "out_of_range"
    assert ask("counts")[0] == {"out_of_range": 1}


def test_an_offer_is_read_once(ask: Ask) -> None:
    id, _, addresses = ask("offer")
    first, second = reader_of(id, addresses), reader_of(id, addresses)
    assert read(first, 0)
    assert not read(second, 0)
    assert second.reason == "used"
    assert ask("counts")[0] == {"used": 1}
    assert read(first, 1)


def test_a_place_that_was_written_again_is_not_used(ask: Ask) -> None:
    id, places, addresses = ask("offer")
    ask("rewrite", places[2])
    reader = reader_of(id, addresses)
    assert [read(reader, at) for at in range(3)] == [True, True, False]
    assert reader.reason == "stale"


def test_a_place_that_is_written_again_while_others_are_read_is_not_used(ask: Ask) -> None:
    id, places, addresses = ask("offer")
    if addresses[0].startswith("tcp"):
        pytest.skip("over TCP blocks are on their way when the first is read")
    reader = reader_of(id, addresses)
    assert read(reader, 0)
    ask("rewrite", places[1])
    assert not read(reader, 1)
    assert reader.reason == "stale"


def test_a_lease_whose_time_is_over_is_refused(ask: Ask) -> None:
    id, _, addresses = ask("offer", 0.0)
    late = reader_of(id, addresses)
    assert not read(late, 0)
    ask("expire")
    later = reader_of(id, addresses)
    assert not read(later, 0)
    assert late.reason == later.reason == "expired"
    assert ask("counts")[0] == {"expired": 2}


@pytest.mark.parametrize("listen", CARRIERS)
def test_an_engine_that_dies_is_noticed(listen: str) -> None:
    peer = Peer()
    peer.ask("listen", listen)
    id, _, addresses = peer.ask("offer")
    reader = reader_of(id, addresses)
    assert read(reader, 0)
    peer.kill()
    again = reader_of(id, addresses)
    assert not read(again, 0)
    assert (again.reason, again.passed_over) == ("unreachable", [listen.partition(":")[0]])
    if listen.startswith("nixl"):
        assert not read(reader, 1)
        assert reader.reason == "lost"
    reader.close()


def test_the_next_carrier_is_used_where_one_cannot_be() -> None:
    offerer = Offerer("tcp:127.0.0.1:0")
    id, _, addresses = offerer.offer()
    tcp = addresses[0].partition(":")[2]
    reader = reader_of(id, ("shm:penstock-nobody", f"nixl:127.0.0.1:{1}", f"tcp:{tcp}"))
    assert [read(reader, at) for at in range(COUNT)] == [True] * COUNT
    assert (reader.carrier, reader.passed_over) == ("tcp", ["shm", "nixl"])
    reader.close()
    offerer.server.close()


def test_nixl_is_offered_where_it_is_installed_and_the_network_has_rdma(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(model="m", listen="tcp://10.0.0.1:7000")
    plain = ("shm", "tcp:10.0.0.1:0")
    monkeypatch.setattr(nixl, "RDMA_DEVICES", tmp_path)
    monkeypatch.setattr(nixl, "installed", lambda: True)
    monkeypatch.setattr(nixl, "new_agent", lambda: None)
    assert offer_addresses(config) == plain
    (tmp_path / "mlx5_0").touch()
    assert offer_addresses(config) == ("shm", "nixl:10.0.0.1:0", "tcp:10.0.0.1:0")
    assert offer_addresses(Config(model="m", listen="ipc://x")) == ("shm",)
    monkeypatch.setattr(nixl, "installed", lambda: False)
    assert offer_addresses(config) == plain

    def fails() -> None:
        raise OSError("no device")

    monkeypatch.setattr(nixl, "installed", lambda: True)
    monkeypatch.setattr(nixl, "new_agent", fails)
    assert offer_addresses(config) == plain
    assert "without NIXL" in caplog.text


@pytest.mark.skipif(nixl.installed(), reason="NIXL is installed")
def test_nixl_that_is_asked_for_and_missing_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot offer KV blocks at nixl:127\.0\.0\.1:0: .*nixl"):
        _listener("nixl:127.0.0.1:0", StagedBlocks(1, 8))

"""KV blocks are copied from one process's memory to another's. Without a GPU, files in shared memory stand for its
memory; the last tests want a real one."""

from __future__ import annotations

import mmap
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from multiprocessing.connection import Connection
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.blocks.checksum import block_checksums, word_weights
from penstock.backend.cuda import CudaBackend
from penstock.backend.cuda.sharing import CudaSharing, KvRows, device_name
from penstock.engine.assemble import assemble
from penstock.engine.kv_disk import loading
from penstock.engine.kv_transfer.cuda_ipc import DeviceStagingArea
from penstock.engine.kv_transfer.peers import PeerBlocks, TransferOptions
from penstock.engine.loop import advance
from penstock.types import BlockOffer, Finished, Limits, Offered, Report, Request, SamplingParams, Tokens
from penstock.types.messages import Offer
from tests.cuda.device import DEVICE
from tests.cuda.small import load_small

LIMITS = Limits(64, 4, 64, 16, 12, 40)
TABLE = [4, 1, 2]
PROMPT = tuple(range(1, 34))  # two full blocks
Ask = Callable[..., Any]
ON_GPU = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")


class FileMemory:
    """Stands for the memory of a device: see IpcMemory."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.files: dict[int, Any] = {}
        self._room = room

    def free(self) -> int:
        return self._room

    def take(self, size: int) -> tuple[Any, bytes]:
        file = NamedTemporaryFile(dir="/dev/shm")  # noqa: SIM115
        os.ftruncate(file.fileno(), size)
        return self._mapped(file, size), os.fsencode(file.name)

    def give_back(self, memory: Any) -> None:
        self.files.pop(memory.data_ptr()).close()

    def open(self, handle: bytes, size: int) -> Any:
        return self._mapped(open(handle, "r+b"), size)

    close = give_back

    def _mapped(self, file: Any, size: int) -> Any:
        memory = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        self.files[memory.data_ptr()] = file
        return memory


def loaded(kv: str = "auto") -> CudaBackend:
    backend = load_small(CudaBackend(64, 4, device=DEVICE, dtype=torch.float32, kv=kv), "F32")
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    return backend


def on_stand_in(backend: CudaBackend, memory: FileMemory | None = None) -> CudaSharing:
    """Lets a backend share blocks through host memory, whatever it computes on."""
    return CudaSharing("stand-in", backend._programs.blocks.rows, lambda: memory or FileMemory())


# -- the rooms, on a stand-in ------------------------------------------------------------------------------------


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[CudaBackend]:
    made = loaded(getattr(request, "param", "auto"))
    made.logits(greedy_batch([Chunk(list(range(40)), 0, TABLE, 0)]))
    yield made
    made.close()


@pytest.mark.skipif(DEVICE == "cuda", reason="the stand-in's memory is the host's")
@pytest.mark.parametrize("backend", ["auto", "int8"], indirect=True)
def test_blocks_come_from_a_room_as_they_were(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    for bytes_at_once in (32 << 20, 1):
        monkeypatch.setattr("penstock.backend.cuda.sharing.AT_ONCE", bytes_at_once)
        sharing, other = on_stand_in(backend), loaded("auto" if backend.kv.fingerprint().find("int8") < 0 else "int8")
        wanted = backend.kv.export_blocks(TABLE)
        room = sharing.share(9)
        sums = room.write(TABLE, [5, 0, 8])
        assert sums == block_checksums(np.frombuffer(wanted, np.uint8).reshape(3, -1))
        opened = on_stand_in(other).open(room.handle)
        assert opened.read([8, 5], [3, 7]) == [sums[2], sums[0]]
        size = len(wanted) // 3
        assert other.kv.export_blocks([7, 3]) == wanted[:size] + wanted[2 * size :]
        with pytest.raises(IndexError, match="not among 9"):
            opened.read([9], [1])
        opened.close()
        room.close()
        other.close()


@pytest.mark.skipif(DEVICE == "cuda", reason="the stand-in's memory is the host's")
def test_a_room_takes_a_part_of_what_is_free(backend: CudaBackend) -> None:
    size = len(backend.kv.export_blocks([0]))
    assert on_stand_in(backend, FileMemory(room=8 * 5 * size + 7)).share(100).places == 5
    with pytest.raises(OSError, match="no room for KV blocks"):
        on_stand_in(backend, FileMemory(room=7 * size)).share(100)
    with pytest.raises(OSError, match="bytes here and"):
        on_stand_in(backend).open(bytes(16) + b"name")
    with pytest.raises(OSError, match="16 bytes and more"):
        on_stand_in(backend).open(b"name")


@pytest.mark.parametrize("changed", [0, 17, -1])
def test_checksums_notice_any_change(changed: int) -> None:
    rows = np.random.default_rng(1).integers(0, 256, (3, 4096), np.uint8)
    parts = [torch.from_numpy(rows[:, :1024].copy()).to(DEVICE), torch.from_numpy(rows[:, 1024:].copy()).to(DEVICE)]
    measured = KvRows(parts, torch.device(DEVICE), nullcontext)
    gathered = measured.gather([0, 1, 2])
    wanted = block_checksums(rows)
    assert [each % 2**64 for each in measured.checksums(gathered).tolist()] == wanted
    rows[1, changed] ^= 4
    assert [one == other for one, other in zip(block_checksums(rows), wanted, strict=True)] == [True, False, True]
    rows[1, changed] ^= 4
    rows[2, :8] = np.roll(rows[2, :8], 4)  # two words change places
    assert [one == other for one, other in zip(block_checksums(rows), wanted, strict=True)] == [True, True, False]
    assert len(set(word_weights(4096).tolist())) == 4096
    assert (word_weights(4096) % 2 == 1).all()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for slow machines: nothing is computed because reading takes long."""
    monkeypatch.setattr(loading, "LEAST", 60.0)


# -- two engines -------------------------------------------------------------------------------------------------


class Host:
    """Is an engine on the device."""

    def __init__(self, stand_in: bool) -> None:
        backend = loaded()
        if stand_in:
            backend.sharing = on_stand_in(backend)
        self.engine = assemble(backend, LIMITS, transfer=TransferOptions(b"same", ("cuda_ipc",)), depth=0)
        self.device = "" if backend.sharing is None else backend.sharing.name
        self._id = 0

    def answer(self, pull: BlockOffer | None = None) -> tuple[list[int], Report]:
        self._id += 1
        self.engine.add(Request(self._id, PROMPT, SamplingParams(temperature=0), 1, pull=pull))
        events = []
        while not self.engine.idle:
            events += self.engine.step()
        tokens = [token for event in events if isinstance(event, Tokens) for token in event.tokens]
        [report] = [event.report for event in events if isinstance(event, Finished)]
        assert report is not None
        return tokens, report

    def offer(self, device: str, seconds: float = 60.0) -> BlockOffer:
        self._id += 1
        [offered] = advance(self.engine, [Offer(PROMPT, seconds=seconds, device=device, id=self._id)])
        assert isinstance(offered, Offered)
        assert offered.offer is not None
        return offered.offer

    def damage(self) -> None:
        """Changes one bit of what is offered, on the device."""
        self._area._room._staged[self._places()[-1], 5] ^= 1
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    def rewrite(self) -> None:
        place, staging = self._places()[-1], self._area.leases.staging
        staging.write(place, bytes(staging.read(place)))

    def refusals(self) -> dict[str, int]:
        return dict(self.engine.stats().peers.refusals)

    @property
    def _area(self) -> DeviceStagingArea:
        return self.engine.find(PeerBlocks)._offers._near  # type: ignore[union-attr, return-value]

    def _places(self) -> list[int]:
        [lease] = self._area.leases._granted.values()
        return [block.places[0] for block in lease.blocks]


def serve(connection: Connection, stand_in: bool) -> None:
    """Does what the test asks of an engine in another process."""
    host = Host(stand_in)
    while (asked := connection.recv()) is not None:
        connection.send(getattr(host, asked[0])(*asked[1:]))
    host.engine.close()


def refused(reader: Host, ask: Ask, pulled: Callable[[BlockOffer], int], first: BlockOffer) -> None:
    """Reads offers in every wrong way, and one as it should be."""
    assert pulled(first) == 0  # used twice
    assert pulled(ask("offer", reader.device, 0.0)) == 0
    offer = ask("offer", reader.device)
    assert pulled(offer._replace(id=bytes(16))) == 0
    assert pulled(offer._replace(first=1)) == 0
    ask("rewrite")
    assert pulled(offer) == 16
    assert pulled(ask("offer", reader.device)) == 32
    failures = dict(reader.engine.stats().peers.failures)
    assert failures == {"used": 1, "expired": 1, "unknown": 1, "damaged": 1, "stale": 1, "other_prompt": 1}
    assert ask("refusals") == {"used": 1, "expired": 1, "unknown": 1}


def pulls(stand_in: bool) -> None:
    """Has blocks read from another process."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, stand_in), daemon=True)
    process.start()

    def ask(*words: Any) -> Any:
        mine.send(words)
        assert mine.poll(240), "the other process does not answer"
        return mine.recv()

    try:
        reader = Host(stand_in)
        said, _ = ask("answer")

        def pulled(offer: BlockOffer) -> int:
            reader.engine.flush_cache()
            tokens, report = reader.answer(offer)
            assert tokens == said
            return report.cached

        first = ask("offer", reader.device)
        assert first.addresses[0].startswith(f"cuda_ipc:{reader.device}/")
        assert pulled(first) == 32
        counts = reader.engine.stats().peers
        assert (counts.carriers, counts.failures) == ((("cuda_ipc", 1),), ())
        offer = ask("offer", reader.device)
        ask("damage")
        assert pulled(offer) == 16
        if not stand_in:  # the interpreter is slow, and tests/engine/test_near_peers.py has all of this
            refused(reader, ask, pulled, first)
        mine.send(None)
        reader.engine.close()
    finally:
        process.join(20)
        process.kill()


@pytest.mark.skipif(DEVICE == "cuda", reason="the stand-in's memory is the host's")
def test_another_process_reads_blocks_through_the_stand_in(patient: None) -> None:
    pulls(stand_in=True)


@ON_GPU
def test_another_process_reads_blocks_of_the_same_gpu(patient: None) -> None:
    assert device_name(torch.device(DEVICE))
    pulls(stand_in=False)


@ON_GPU
def test_memory_of_a_gpu_is_given_back() -> None:
    backend = loaded()
    assert backend.sharing is not None
    free = torch.cuda.mem_get_info()[0]
    room = backend.sharing.share(1 << 16)
    assert torch.cuda.mem_get_info()[0] < free
    room.close()
    assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)
    with pytest.raises(OSError, match="cuIpcOpenMemHandle"):
        backend.sharing.open(room.handle)
    backend.close()


def test_without_a_gpu_nothing_is_shared() -> None:
    assert device_name(torch.device("cpu")) == ""
    if DEVICE != "cuda":
        assert loaded().sharing is None

"""Weights and KV cache of a GPU outlive their engine: the next one takes them from the store of descriptors, packs
nothing, and answers the same to the bit. Without a GPU the device's memory is shared memory."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend, keeper
from penstock.backend.cuda.arena import Arena
from penstock.backend.cuda.driver import CudaDriver
from penstock.backend.cuda.keeper import KV, WEIGHTS, CudaKeeper
from penstock.backend.weight_exchange import KeepingPacker, ReplayingPacker
from penstock.model.load import load_model, open_checkpoint
from penstock.system.descriptor_store import DescriptorStore, get_descriptors
from tests.cuda.device import DEVICE, HALF
from tests.cuda.shared_driver import SharedDriver
from tests.engine.changed_weights import change_weights

MODELS = Path(__file__).parents[1] / "models"
LLAMA = MODELS / "goldens" / "llama3"
HOST = torch.device(DEVICE)
stand_in = pytest.mark.skipif(DEVICE == "cuda", reason="looks into the stand-in of a device")
BLOCKS = 12, 8, 8  # blocks, positions of each, states


class Life:
    """Is an engine's backend with a store: it loads a model and reserves a cache, as an engine does."""

    def __init__(
        self,
        store: DescriptorStore,
        path: Path,
        driver: Any = None,
        blocks: tuple[int, int, int] = BLOCKS,
        keep: bool = True,
        **options: Any,
    ) -> None:
        self.driver = driver or (CudaDriver(torch.device(DEVICE)) if DEVICE == "cuda" else SharedDriver())
        arena = Arena(torch.device(DEVICE), self.driver)
        arena.keeper = CudaKeeper(arena, store.open())
        options = {"dtype": HALF} | options
        self.backend = CudaBackend(32, 4, device=DEVICE, arena=arena, **options)
        self.keeper = arena.keeper
        self.packs = self.keeper.packer(f"{path} {options}", self.backend)
        self.packed = KeepingPacker(self.packs)
        self.backend.load(load_model(open_checkpoint(path), self.packed))
        self.backend.reserve_kv(*blocks)
        if keep:
            self.keeper.keep()

    @property
    def replays(self) -> bool:
        return isinstance(self.packs, ReplayingPacker)

    def end(self) -> None:
        """Gives back what the process of an engine does."""
        del self.backend, self.packs, self.packed
        self.keeper._ranges.clear()
        self.keeper._packed = None
        self.keeper._arena.shared = {}
        gc.collect()

    def prompt(self) -> np.ndarray:
        return self.backend.logits(greedy_batch([Chunk([3, 1, 4, 1, 5], 0, range(10), 0, 1)]))

    def step(self) -> np.ndarray:
        """Returns the logits of a token behind the prompt."""
        return self.backend.logits(greedy_batch([Chunk([9], 5, range(10))]))


@pytest.fixture
def store() -> Iterator[DescriptorStore]:
    store = DescriptorStore()
    yield store
    store.close()


CASES = [
    ("goldens/llama3", {"dtype": torch.float32}),
    ("goldens/llama3", {"quantize": "int4"}),
    ("goldens/mixtral", {}),
    ("goldens/deepseek_v3", {"dtype": torch.float32}),
    ("goldens/bamba", {"dtype": torch.float32}),
    ("goldens/gpt_oss", {}),
    ("goldens/qwen2", {"kv": "int8"}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_the_next_engine_packs_nothing_and_finds_the_prompt(
    name: str, options: dict[str, Any], store: DescriptorStore
) -> None:
    life = Life(store, MODELS / name, **options)
    assert not life.replays
    life.prompt()
    said = life.step()
    life.prompt()
    id = life.keeper.kv_id
    for _ in range(2):
        life.end()
        life = Life(store, MODELS / name, **options)
        assert life.replays
        assert life.keeper.kv_id == id
        assert np.array_equal(life.step(), said), "the prompt is still in the cache, and its state"
        life.prompt()


@stand_in
def test_what_another_engine_has_left_is_dropped_before_anything_is_loaded(store: DescriptorStore) -> None:
    first = Life(store, LLAMA)
    first.end()
    other = Life(store, LLAMA, SharedDriver(), quantize="int4")
    assert not other.replays
    assert other.keeper.kv_id != first.keeper.kv_id
    other.end()
    assert Life(store, LLAMA, quantize="int4").replays


def test_a_cache_of_another_layout_is_dropped(store: DescriptorStore) -> None:
    life = Life(store, LLAMA)
    life.end()
    life = Life(store, LLAMA, blocks=(20, 8, 8))
    assert life.replays
    id = life.keeper.kv_id
    life.end()
    life = Life(store, LLAMA, blocks=(20, 8, 8))
    assert life.keeper.kv_id == id
    assert not np.isnan(life.prompt()).any()


def test_an_engine_that_dies_while_it_loads_leaves_nothing(store: DescriptorStore) -> None:
    """Until all is written, the memory ends with its process."""
    life = Life(store, LLAMA, keep=False)
    assert [left(store, name) for name in (WEIGHTS, KV)] == [0, 0]
    life.end()
    assert not Life(store, LLAMA).replays


@stand_in
@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("problem", "end with this engine process: the driver exports no memory"),
        ("export", "end with this engine process: export failed"),
        ("map", "end with this engine process: map failed"),
    ],
)
def test_a_device_that_cannot_export_memory_works_as_before(
    call: str, line: str, store: DescriptorStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    driver = SharedDriver(exports=call != "problem")
    driver.fail = "" if call == "problem" else call
    life = Life(store, LLAMA, driver)
    assert np.isfinite(life.prompt()).all()
    assert life.keeper.kv_id == b""
    assert [line in message for message in caplog.messages] == [True], caplog.messages
    assert not left(store, WEIGHTS)


@stand_in
def test_memory_that_cannot_be_mapped_is_dropped(store: DescriptorStore, caplog: pytest.LogCaptureFixture) -> None:
    Life(store, LLAMA).end()
    driver = SharedDriver()
    driver.fail = "map_descriptor"
    life = Life(store, LLAMA, driver)
    assert not life.replays
    assert np.isfinite(life.prompt()).all()
    assert "cannot be mapped: map_descriptor failed" in caplog.text
    life.end()
    assert Life(store, LLAMA).replays


def test_an_engine_whose_server_is_gone_goes_on(store: DescriptorStore, caplog: pytest.LogCaptureFixture) -> None:
    life = Life(store, LLAMA, keep=False)
    store.close()
    life.keeper.keep()
    assert "the next engine will not find this one's weights" in caplog.text
    assert np.isfinite(life.prompt()).all()


def test_weights_that_are_replaced_are_dropped_before_their_first_byte_changes(
    store: DescriptorStore, tmp_path: Path
) -> None:
    life = Life(store, LLAMA)
    new = change_weights(LLAMA, tmp_path / "other")
    update = life.backend.begin_update(life.packed.kept)
    update.prepare(load_model(open_checkpoint(new), update.packer))
    assert left(store, WEIGHTS)
    kept: list[int] = []
    update._transfer.send = lambda data, target: kept.append(left(store, WEIGHTS))
    update.exchange()
    assert kept
    assert not any(kept)
    life.keeper.keep()
    assert not left(store, WEIGHTS), "others than the file's are never left"
    assert left(store, KV)


def test_weights_that_are_replaced_are_dropped_also_if_the_store_does_not_answer(
    store: DescriptorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*arguments: Any) -> None:
        raise TimeoutError

    life = Life(store, LLAMA)
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "put_descriptors", lost)
        life.keeper.change_weights()
    assert left(store, WEIGHTS)
    life.end()
    assert not Life(store, LLAMA).replays


@stand_in
def test_an_engine_that_sleeps_holds_no_memory(store: DescriptorStore) -> None:
    life = Life(store, LLAMA)
    life.prompt()
    said = life.step()
    assert life.backend.sleeper is not None
    life.backend.sleeper.sleep()
    assert not life.driver.mapped
    assert [left(store, name) for name in (WEIGHTS, KV)] == [0, 0]
    life.backend.sleeper.wake()
    life.prompt()
    assert np.array_equal(life.step(), said)
    life.end()
    life = Life(store, LLAMA)
    assert life.replays
    assert np.array_equal(life.step(), said)


@stand_in
def test_memory_is_given_back_with_the_store(store: DescriptorStore) -> None:
    before = device_files()
    life = Life(store, LLAMA)
    held = device_files() - before
    life.end()
    assert held & device_files()
    store.close()
    assert not held & device_files()


@stand_in
def test_free_memory_counts_what_is_kept(store: DescriptorStore) -> None:
    life = Life(store, LLAMA)
    kept = sum(sum(range.sizes) for range in life.keeper._ranges.values())
    life.end()
    arena = Arena(HOST, SharedDriver())
    arena.keeper = CudaKeeper(arena, store.open())
    assert arena.keeper.waiting_bytes == kept > 0
    assert arena.keeper.kv_room == 1 << 28


def left(store: DescriptorStore, name: str) -> int:
    """Returns how many descriptors a store has of a name."""
    descriptors = get_descriptors(store.open(), name)
    for each in descriptors:
        os.close(each)
    return len(descriptors)


def device_files() -> set[int]:
    """Returns the parts of the stand-in's memory that this process holds, by inode."""
    links = [link for link in Path("/proc/self/fd").iterdir() if "memfd:device" in str(link.resolve())]
    return {link.stat().st_ino for link in links}

"""Tensors whose addresses stay while their memory comes and goes."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from penstock.backend.cuda import arena as module
from penstock.backend.cuda.arena import ALIGNMENT, SHARED_BYTES, SMALL_BYTES, Arena
from penstock.backend.cuda.driver import AllocationProperties, MemoryAccess
from penstock.errors import OutOfMemory
from tests.cuda.fake_driver import FakeDriver

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Packed:
    values: Any
    bias: Any | None


class Pair(NamedTuple):
    first: Any
    second: Any


def made(room: int = 1 << 40) -> tuple[Arena, FakeDriver]:
    driver = FakeDriver(room)
    return Arena(HOST, driver), driver


def test_structures_are_those_of_the_driver() -> None:
    """Sizes and offsets of cuda.h on 64 bits."""
    assert ctypes.sizeof(AllocationProperties) == 32
    assert AllocationProperties.location.offset == 8
    assert AllocationProperties.win32.offset == 16
    assert AllocationProperties.flags.offset == 24
    assert ctypes.sizeof(MemoryAccess) == 12
    assert MemoryAccess.flags.offset == 8


def test_what_is_kept_comes_back_and_the_rest_is_zeros_at_the_same_addresses() -> None:
    arena, driver = made()
    sizes = (3, 700, SMALL_BYTES, SMALL_BYTES + 5)
    kept = [arena.empty((size,), torch.uint8).random_(256) for size in sizes]
    cache = arena.zeros((2, SMALL_BYTES), torch.bfloat16)
    counters = arena.zeros(7, torch.int32)
    cache += 1
    counters += 1
    before, addresses = [tensor.clone() for tensor in kept], [tensor.data_ptr() for tensor in (*kept, cache)]
    arena.sleep()
    assert not driver.mapped
    assert arena.host_bytes == sum(driver.pinned.values()) == arena.kept_bytes
    assert bool((kept[1] == 255).all()), "nothing of it is on the device"
    arena.wake()
    assert all(torch.equal(*both) for both in zip(kept, before, strict=True))
    assert not cache.any()
    assert not counters.any()
    assert [tensor.data_ptr() for tensor in (*kept, cache)] == addresses
    pinned = dict(driver.pinned)
    kept[0].fill_(9)
    arena.sleep()
    arena.wake()
    assert driver.pinned == pinned, "memory is pinned once"
    assert bool((kept[0] == 9).all()), "what changed meanwhile is kept"


def test_small_tensors_share_memory_and_large_ones_give_it_back_alone() -> None:
    arena, driver = made()
    small = [arena.empty((100,), torch.float32) for _ in range(5)]
    assert [tensor.data_ptr() - small[0].data_ptr() for tensor in small] == [i * ALIGNMENT for i in range(5)]
    assert list(driver.mapped.values()) == [SHARED_BYTES]
    large = arena.empty((SMALL_BYTES + 1,), torch.uint8)
    assert sorted(driver.mapped.values()) == [SMALL_BYTES + driver.granularity, SHARED_BYTES]
    view = large[5:]
    del large
    gc.collect()
    assert len(driver.mapped) == 2, "a view needs it"
    arena.sleep()
    del view
    gc.collect()
    arena.wake()
    assert list(driver.mapped.values()) == [SHARED_BYTES]
    filling = [arena.empty((SMALL_BYTES - 1,), torch.uint8) for _ in range(SHARED_BYTES // SMALL_BYTES + 1)]
    assert list(driver.mapped.values()) == [SHARED_BYTES] * 2
    del small, filling, arena
    gc.collect()
    assert not driver.mapped
    assert not driver.reserved
    assert not driver.pinned


def test_tensors_of_any_owner_are_adopted_and_those_of_one_storage_still_share_it() -> None:
    arena, _ = made()
    base = torch.randn(40, 8)
    part, own = base[3:20, 2:5], arena.empty((4,), torch.float32)
    weight = Packed(base, None)
    other = torch.arange(6, dtype=torch.int32).to(torch.float8_e4m3fn)
    wanted, address = base.clone(), own.data_ptr()
    arena.adopt({"weight": weight, "several": [Pair(part, own), Pair(weight, other)], "number": 3})
    assert own.data_ptr() == address
    assert all(arena._holds(tensor.data_ptr()) for tensor in (base, part, own, other))
    assert torch.equal(base, wanted)
    assert part.stride() == (8, 1)
    base[3, 2] = 77.0
    assert part[0, 0] == 77
    assert other.float().tolist() == [0, 1, 2, 3, 4, 5]
    arena.sleep()
    arena.wake()
    assert part[0, 0] == 77
    assert torch.equal(base[4:], wanted[4:])


def test_a_device_that_is_full_leaves_the_arena_asleep_or_as_it_was() -> None:
    arena, driver = made(4 * SMALL_BYTES)
    weight, cache = arena.empty((SMALL_BYTES,), torch.uint8).fill_(3), arena.zeros(2 * SMALL_BYTES, torch.uint8)
    with pytest.raises(OutOfMemory, match="the device has no memory for 2097152 bytes"):
        arena.zeros(2 * SMALL_BYTES, torch.uint8)
    assert arena.device_bytes == 3 * SMALL_BYTES
    arena.sleep()
    driver.room = SMALL_BYTES
    with pytest.raises(OutOfMemory):
        arena.wake()
    assert not driver.mapped
    driver.room = 4 * SMALL_BYTES
    arena.wake()
    assert bool((weight == 3).all())
    assert not cache.any()


def test_a_host_that_is_full_leaves_the_arena_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, driver = made()
    weight = arena.empty((SMALL_BYTES,), torch.uint8).fill_(3)
    monkeypatch.setattr(module, "available_memory", lambda: 1000)
    with pytest.raises(OutOfMemory, match="1048576 bytes of host memory and 1000 are free"):
        arena.sleep()
    assert bool((weight == 3).all())
    assert driver.mapped


def test_without_a_driver_tensors_are_torchs_own() -> None:
    arena = Arena(HOST)
    assert not arena.can_sleep
    assert arena.empty((2, 3), torch.bfloat16).shape == (2, 3)
    assert not arena.zeros(5).any()
    held = torch.ones(3)
    address = held.data_ptr()
    arena.adopt([held])
    assert held.data_ptr() == address

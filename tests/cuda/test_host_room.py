"""KV blocks and recurrent states that leave the device for host memory come back as they were."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from random import Random
from threading import Thread

import numpy as np
import pytest
import torch

from penstock.backend.base import Batch, StateMove
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend, pinned_room
from penstock.backend.cuda.pinned_room import PinnedRoom
from penstock.core.tiers import CopyCosts
from penstock.engine.host_blocks import HostBlocks, HostMemory
from penstock.model.load import load_model, open_checkpoint
from penstock.types import BlockCopy, Limits, StepPlan
from tests.cuda.device import DEVICE
from tests.cuda.lazy_streams import lazy_gpu
from tests.cuda.small import load_small
from tests.cuda.test_backend import GOLDENS

LIMITS = Limits(64, 4, 64, 16, 6, 40, host_places=5)
TABLE = [4, 1, 2]


def loaded(kv: str = "auto") -> CudaBackend:
    backend = load_small(CudaBackend(64, 4, device=DEVICE, dtype=torch.float32, kv=kv), "F32")
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    return backend


def last_token() -> Batch:
    return greedy_batch([Chunk([3], 40, TABLE, 0)])


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_blocks_come_back_from_any_place(kv: str) -> None:
    backend = loaded(kv)
    costs = CopyCosts()
    stored = HostBlocks(LIMITS, backend.kv, costs)
    backend.logits(greedy_batch([Chunk(list(range(40)), 0, TABLE, 0)]))
    wanted, exported = backend.logits(last_token()), backend.kv.export_blocks(TABLE)
    places = [3, 0, 4]
    stored.carry_out([BlockCopy(block, place, "out") for block, place in zip(TABLE, places, strict=True)])
    assert b"".join(bytes(stored.read(place)) for place in places) == exported
    backend.kv.import_blocks(TABLE, bytes(len(exported)))
    assert np.abs(backend.logits(last_token()) - wanted).max() > 1e-3
    stored.carry_out([BlockCopy(block, place, "in") for block, place in zip(TABLE, places, strict=True)])
    assert np.abs(backend.logits(last_token()) - wanted).max() < 1e-5
    assert costs.seconds("in", 1) > 0
    stored.release()
    backend.close()


def test_a_saved_state_comes_back_and_the_answer_goes_on_from_it() -> None:
    """It leaves the device and comes back to another place there."""
    backend = CudaBackend(64, 4, device=DEVICE, dtype=torch.float32)
    backend.load(load_model(open_checkpoint(GOLDENS / "lfm2"), backend))
    limits = LIMITS._replace(states=3, host_states=2)
    backend.reserve_kv(limits.num_blocks, limits.block_size, limits.max_rows + limits.states)
    costs = CopyCosts()
    stored = HostMemory.open(limits, backend, costs)
    assert stored.states is not None
    first, second, third = range(limits.max_rows, limits.max_rows + limits.states)
    prompt = Chunk(list(range(5, 9)), 0, TABLE, 0)
    backend.logits(replace(greedy_batch([prompt]), moves=(StateMove(0, -1, first, 4),)))

    def going_on(state: int) -> np.ndarray:
        """Returns the logits of the next token after a saved state."""
        return backend.logits(replace(greedy_batch([Chunk([3], 4, TABLE, 0)]), moves=(StateMove(0, state, -1, 0),)))

    wanted, exported = going_on(first), backend.states.export_blocks([first])
    assert any(exported)
    stored.carry_out(StepPlan(1, (), state_copies=(BlockCopy(0, 1, "out"),)))
    assert bytes(stored.states.read(1)) == exported
    backend.states.import_blocks([first], bytes(len(exported)))
    assert np.abs(going_on(first) - wanted).max() > 1e-3
    stored.carry_out(StepPlan(2, (), state_copies=(BlockCopy(2, 1, "in"),)))
    assert backend.states.export_blocks([third]) == exported
    assert np.abs(going_on(third) - wanted).max() < 1e-5
    backend.states.copy_blocks([(third, second)])
    assert backend.states.export_blocks([second]) == exported
    assert "states of torch.float32[" in backend.states.fingerprint()
    assert costs.seconds("in", 0, states=1) > 0
    stored.release()
    backend.close()


@pytest.mark.parametrize("staged", [0, 80, 1 << 20], ids=["one", "two", "all"])  # rows of 20 bytes in each buffer
@pytest.mark.parametrize("seed", range(8))
def test_copies_beside_steps_move_what_they_would_alone(seed: int, staged: int) -> None:
    """Steps write blocks, blocks leave and come back, the host reads and writes places; all in any order that streams
    may have."""
    random = Random(seed)
    parts = [torch.zeros((6, size), dtype=torch.uint8) for size in (12, 8)]
    blocks, places = np.zeros((6, 20), np.uint8), np.zeros((5, 20), np.uint8)  # as they should be
    with lazy_gpu(random) as gpu:
        room = PinnedRoom(parts, 5, nullcontext, staged)
        room.array[:] = 0
        for value in range(1, 60):
            count = random.randint(1, 4)
            some, chosen = random.sample(range(6), count), random.sample(range(5), count)
            match random.choice(["step", "step", "out", "in", "host"]):
                case "step":
                    for part in parts:
                        part[some[0]].fill_(value)
                    blocks[some[0]] = value
                case "out":
                    room.copy_out(some, chosen)
                    places[chosen] = blocks[some]
                case "in":
                    room.copy_in(some, chosen)
                    blocks[some] = places[chosen]
                case "host":
                    room.finish()
                    assert np.array_equal(room.array, places)
                    room.array[chosen] = places[chosen] = value
            gpu.run_some()
        room.finish()
        told = room.timings()
        assert room.timings() == []
        assert all(timing.seconds == 2e-3 and 0 < timing.blocks <= 4 for timing in told)
        assert {timing.direction for timing in told} == {"in", "out"}
        room.close()
        gpu.steps.synchronize()
    assert np.array_equal(torch.cat(parts, dim=1).numpy(), blocks)


def test_blocks_leave_beside_the_steps_that_follow() -> None:
    """The host waits for nothing, and a step waits for blocks to leave only while all buffers are on their way."""
    with lazy_gpu(Random(0)) as gpu:
        part = torch.ones((4, 8), dtype=torch.uint8)
        room = PinnedRoom([part], 4, nullcontext, staged=0)
        room.copy_out([0, 1], [0, 1])
        assert room.timings() == []
        part[0].fill_(7)
        gpu.run_alone(gpu.steps)
        assert not gpu.steps.queue
        room.copy_out([2], [2])
        gpu.run_alone(gpu.steps)
        assert gpu.steps.queue
        room.finish()
        assert room.array[:3].tolist() == [[1] * 8] * 3
        assert [timing.blocks for timing in room.timings()] == [1, 1, 1]
        room.close()


def test_copies_do_not_wait_for_memory_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """One comes while the last segment is tried, which is then refused."""
    monkeypatch.setattr(pinned_room, "SEGMENT", 16)
    monkeypatch.setattr(pinned_room, "PATIENCE", 1000.0)
    with lazy_gpu(Random(0)) as gpu:
        gpu.driver.refuses_after = 1
        room = PinnedRoom([torch.ones((4, 8), dtype=torch.uint8)], 4, nullcontext)
        waiting = Thread(target=room._wait_for, args=[3], daemon=True)
        waiting.start()
        gpu.driver.go_on.set()
        waiting.join(60)
        assert not waiting.is_alive()
        room.copy_out([3], [3])
        room.finish()
        assert room.array[3].tolist() == [1] * 8
        assert len(gpu.driver.registered) == 1
        room.close()

"""KV blocks and recurrent states that leave the device for host memory come back as they were."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from penstock.backend.base import Batch, StateMove
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend
from penstock.backend.cuda.pinned_room import PinnedRoom
from penstock.core.tiers import CopyCosts
from penstock.engine.host_blocks import HostBlocks, HostMemory
from penstock.model.load import load_model, open_checkpoint
from penstock.types import BlockCopy, Limits, StepPlan
from tests.cuda.device import DEVICE
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


class FakeEvent:
    """Stands in for an event of a GPU, which is not needed where copies are done at once."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: FakeEvent) -> float:
        return 2.0


def test_rows_pass_through_staging_memory_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = list[int]()
    library = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: registered.append(address) or 0,
        cudaHostUnregister=registered.remove,
    )
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: library)
    for staged in (0, 40, 1 << 20):  # rows of 20 bytes pass one at a time, two at a time, and all at once
        parts = [torch.randint(256, (6, size), dtype=torch.uint8) for size in (12, 8)]
        before = [part.clone() for part in parts]
        room = PinnedRoom(parts, 5, nullcontext, staged)
        assert room.copy_out([4, 0, 2], [1, 3, 0]) == 2e-3
        assert room.array[3].tolist() == torch.cat([part[0] for part in parts]).tolist()
        for part in parts:
            part.zero_()
        room.copy_in([4, 0, 2], [1, 3, 0])
        for part, was in zip(parts, before, strict=True):
            assert torch.equal(part[[4, 0, 2]], was[[4, 0, 2]])
            assert not part[[1, 3, 5]].any()
        assert len(registered) == 1
        room.close()
        assert not registered

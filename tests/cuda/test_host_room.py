"""KV blocks that leave the device for host memory come back as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.backend.base import Batch
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend
from penstock.core.tiers import CopyCosts
from penstock.engine.host_blocks import HostBlocks
from penstock.types import BlockCopy, Limits
from tests.cuda.device import DEVICE
from tests.cuda.small import load_small

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

"""Products that add the updates of adapters themselves, against float64. Only Hopper runs them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.cuda.adapter_tiles import DECODE_ROWS, adapter_tiles
from penstock.backend.cuda.kernels.fp8 import quantize_fp8
from penstock.backend.cuda.kernels.fp8_activations import Fp8Activations, fp8_view, quantize_activations
from penstock.backend.cuda.kernels.hopper_gemm import hopper_gemm
from penstock.backend.cuda.kernels.hopper_low_rank import ProductUpdates, shrink_few
from penstock.backend.cuda.kernels.low_rank import RANKS, RECORD, SPLIT, AdaptedWeight, RowTiles
from penstock.backend.cuda.kernels.split_k import SplitKScratch
from penstock.backend.cuda.pack_low_rank import UpdateSizes, pack_update
from penstock.model.low_rank import LowRankPart, LowRankUpdate
from tests.cuda.device import DEVICE, HOPPER, normal
from tests.cuda.test_adapters import step_of
from tests.cuda.test_hopper_gemm import SHAPES, difference, gated_or_not

pytestmark = pytest.mark.skipif(not HOPPER.device.has_hopper_gemm, reason="needs a Hopper GPU")
WEIGHTS, NUMBER = 3, 1  # other weights have records too


class Sized:
    """Stands for a weight of so many rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows


class Updates:
    """Holds random adapters of one weight on the device: those of odd slots change some parts only."""

    def __init__(self, rows: int, width: int, rank: int, gated: bool, slots: int) -> None:
        rng = np.random.default_rng(rows)
        third = rows // 2 if gated else rows // 384 * 128
        bounds = [0, third, rows] if gated or not third else [0, third, 2 * third, rows]
        self.memory: list[Any] = []
        self.records = torch.zeros((slots, WEIGHTS, RECORD), dtype=torch.int64, device=DEVICE)
        self.parts: list[list[LowRankPart]] = []
        self.sizes = UpdateSizes(0, 0, True, 0, True)
        self.rows = rows
        for slot in range(slots):
            parts = []
            for i in range(slot % 2, len(bounds) - 1):
                a = rng.normal(0, width**-0.5, (rank, width)).astype(np.float32)
                b = rng.normal(0, 1, (bounds[i + 1] - bounds[i], rank)).astype(np.float32)
                parts.append(LowRankPart(bounds[i], a, b))
            if parts:
                self._send(slot, LowRankUpdate(Sized(rows), tuple(parts)), gated)
            self.parts.append(parts)

    def _send(self, slot: int, update: LowRankUpdate, gated: bool) -> None:
        packed = pack_update(update, gated)
        values = torch.zeros(packed.values, dtype=torch.bfloat16)
        packed.write(values)
        self.memory += [values.to(DEVICE), torch.from_numpy(packed.blocks).to(DEVICE)]
        at, blocks = self.memory[-2].data_ptr(), self.memory[-1].data_ptr()
        words = [at, at + 2 * packed.b_at, blocks, *packed.sizes[:2]]
        self.records[slot, NUMBER, :5] = torch.tensor(words)
        assert packed.sizes.tiled
        self.sizes = UpdateSizes(*map(max, self.sizes, packed.sizes))

    def of(self, x: Any, slots: list[int]) -> ProductUpdates:
        """Returns the updates for rows with these slots, after `shrink_few`."""
        found = adapter_tiles(step_of([1] * len(slots), slots), DECODE_ROWS)
        tiles = torch.from_numpy(np.pad(found.tiles, ((0, 1), (0, 0)), constant_values=-1)[: len(slots)]).to(DEVICE)
        order = torch.from_numpy(found.order).to(DEVICE)
        h = torch.full((SPLIT * len(slots) * self.sizes.chunks * RANKS,), torch.nan, device=DEVICE)
        weight = AdaptedWeight(self.records, NUMBER, self.sizes.chunks, self.sizes.blocks, True, torch.bfloat16)
        shrink_few(x, RowTiles(tiles, order, DECODE_ROWS), weight, h)
        rows = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
        sizes = self.sizes.chunks, self.sizes.depth
        return ProductUpdates(tiles, rows, self.records[:, NUMBER:], h, WEIGHTS, *sizes)

    def added(self, x: torch.Tensor, slots: list[int]) -> torch.Tensor:
        """Returns what adapters add to products with x."""
        total = torch.zeros((len(x), self.rows), dtype=torch.float64, device=DEVICE)
        for row, slot in enumerate(slots):
            for part in self.parts[slot] if slot >= 0 else ():
                a, b = (torch.tensor(values, dtype=torch.float64, device=DEVICE) for values in part[1:])
                total[row, part.first : part.first + len(b)] += b @ (a @ x[row])
        return total


SLOTS = {"one": lambda i: 0, "some": lambda i: i % 9 - 1, "all": lambda i: i}


@pytest.mark.parametrize("who", SLOTS)
@pytest.mark.parametrize("count", [1, 3, 12, 33, 64])
@pytest.mark.parametrize(("rows", "width", "gated"), SHAPES)
@pytest.mark.parametrize("fp8", [False, True])
def test_updates_are_added(rows: int, width: int, gated: bool, count: int, who: str, fp8: bool) -> None:
    slots = [SLOTS[who](i) for i in range(count)]
    updates = Updates(rows, width, 5 if who == "all" else 20, gated, max(slots[-1], 8) + 1)
    weight, bias = normal(rows, width, dtype=torch.bfloat16) * 0.02, normal(rows, seed=1)
    x: Any = normal(count, width, dtype=torch.bfloat16, seed=2)
    exact, codes, scales = weight.double(), weight, {}
    seen, inputs = x.double(), x
    if fp8:
        packed, inputs = quantize_fp8(weight), fp8_view(torch.empty_like(x))
        quantize_activations(x, *inputs)
        scales = {"scales": packed.scales, "item_scales": inputs.scales}
        exact, codes = packed.values.double() * packed.scales[:, None], packed.values
        seen = inputs.values.double() * inputs.scales[:, None]
    plain = seen @ exact.t() + bias
    wanted = gated_or_not(plain + updates.added(seen, slots), gated)
    scratch = SplitKScratch.on(torch.device(DEVICE))
    tiling = HOPPER.hopper_gemm(count, int(wanted.shape[1]), width, 1 if fp8 else 2, gated, True)
    values = inputs.values if isinstance(inputs, Fp8Activations) else inputs
    for _ in range(2):  # the first leaves all counters as it found them
        out = torch.full(wanted.shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)
        found = updates.of(inputs, slots)
        hopper_gemm(values, codes, bias, out, tiling, scratch, gated=gated, updates=found, **scales)
        assert difference(out, wanted) < 8e-3
        assert not scratch.arrived.any()
    if any(updates.parts[slot] for slot in slots if slot >= 0):
        assert difference(gated_or_not(plain, gated), wanted) > 0.1

"""MLA's expanded form that only Hopper runs, against the reference: over pieces of contexts, and behind the backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend, inputs, launch_mla
from penstock.backend.cuda.contexts import BLOCK, PromptSizes, place_contexts
from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.kernels.hopper_attention import HopperAttentionTiling
from penstock.backend.cuda.kernels.hopper_mla import hopper_mla
from penstock.backend.cuda.kernels.mla_expanded import Carry, ExpandedKv
from penstock.backend.cuda.mla_expansion import TILE_TOKENS, MlaDims
from penstock.backend.ref import RefBackend
from penstock.backend.ref.cases import attention as attention_spec
from penstock.backend.ref.cases import difference, run
from penstock.backend.ref.mla_cases import attend_mla, mla
from penstock.backend.ref.ops import attention
from tests.cuda.device import DEVICE, HALF, HOPPER, close, ints, normal
from tests.cuda.test_mla import forms_of, steps_of

pytestmark = pytest.mark.skipif(not HOPPER.device.has_hopper_attention, reason="needs a Hopper GPU")
DIMS = MlaDims(heads=3, nope=128, rope=64, rank=0, v_dim=128)
TILING = HOPPER.hopper_mla(*DIMS[1:3], DIMS.v_dim)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
STEPS = {  # rows of (tokens, positions before them)
    "whole prompts": [(200, 0), (3, 0), (129, 0)],
    "chunks": [(70, 300), (130, 121), (2, 640)],
    "long": [(140, 760)],
}


def attended(
    chunks: list[tuple[int, int]], room: int, dtype: torch.dtype, tiling: Any, kernel: Any = hopper_mla
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends in pieces of so many positions; returns what is found, and the reference. What a piece does not hold is
    NaN, like what was not carried over."""
    batch = greedy_batch([Chunk([0] * count, start, [0]) for count, start in chunks])
    rows = np.arange(len(chunks), dtype=np.int32)
    placed = place_contexts(batch, rows, PromptSizes.of(batch, rows), 0)
    tiles = inputs.tiles_of(batch, rows.tolist(), TILE_TOKENS)
    starts = ints([*placed.starts[tiles[:, inputs.ROW]], 0, 0])
    tokens, total = len(batch.tokens), -(-len(placed.blocks) * BLOCK // room) * room
    keys, values = (normal(DIMS.heads, total, 128, dtype=dtype, seed=seed) for seed in (1, 2))
    rope = normal(total, DIMS.rope, dtype=dtype, seed=3)
    q = normal(tokens, DIMS.heads * 192, dtype=dtype, seed=4)
    out = torch.full((tokens, DIMS.heads * DIMS.v_dim), torch.nan, dtype=dtype, device=DEVICE)
    nans = {"fill_value": torch.nan, "device": DEVICE}
    carry = Carry.within(torch.full((tokens * DIMS.heads * 130,), **nans), DIMS, tokens)
    for begin in range(0, total, room):
        memory = torch.full((room * (DIMS.heads * 256 + DIMS.rope),), dtype=dtype, **nans)
        piece = ExpandedKv.within(memory, DIMS, room)
        end = min(begin + room, len(placed.blocks) * BLOCK)
        for into, source in zip(piece, (keys, values, rope), strict=True):
            into[..., : end - begin, :] = source[..., begin:end, :]
        work = ints(np.concatenate([tiles, np.full((2, 5), -1)])), starts, out, carry, begin
        kernel(q, piece, *work, 0.1, tiling=tiling)

    spec, wanted = attention_spec(DIMS.heads, DIMS.heads, 192, interleaved=False, multiplier=0.1), []
    for row, (first, last) in enumerate(zip(batch.row_start, batch.row_start[1:], strict=False)):
        positions, at = batch.positions[first:last], int(placed.starts[row])
        seen = slice(at, at + int(positions[-1]) + 1)
        of_row = torch.cat((keys[:, seen], rope[seen].expand(DIMS.heads, -1, -1)), 2), values[:, seen]
        k, v = (each.float().cpu().numpy().swapaxes(0, 1) for each in of_row)
        queries = q[first:last].float().cpu().numpy().reshape(last - first, DIMS.heads, 192)
        wanted.append(attention(queries, k, v, (positions, 0), spec, {}).reshape(last - first, -1))
    return out, torch.from_numpy(np.concatenate(wanted)).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pieces", [1, 2, 16], ids=["blocks", "pairs of blocks", "all at once"])
@pytest.mark.parametrize("name", STEPS)
def test_pieces_of_contexts(name: str, pieces: int, dtype: str) -> None:
    assert close(*attended(STEPS[name], pieces * BLOCK, DTYPES[dtype], TILING))


def test_shorter_tiles_and_more_stages() -> None:
    assert close(*attended(STEPS["chunks"], 3 * BLOCK, torch.bfloat16, HopperAttentionTiling(64, 3)))


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_prompts_behind_the_backend(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []

    def noted(*args: Any, **how: Any) -> None:
        launches.append(args[6])
        hopper_mla(*args, **how)

    monkeypatch.setattr(launch_mla, "hopper_mla", noted)
    trial = steps_of(
        attend_mla(np.random.default_rng(3), spec=mla(2, 64, 512), lengths=(230, 10), dims=(128, 128)),
        [Chunk(range(100), 0, range(15))],
        [Chunk(range(100, 230), 100, range(15)), Chunk(range(230, 240), 0, [15], 1)],
    )
    backend = CudaBackend(144, 8, device=DEVICE, dtype=HALF, kv=kv, tilings=Tilings.of(HOPPER.device))
    got, wanted = run(trial, backend), run(trial, RefBackend())
    assert forms_of(backend, trial) == [(1, 0, 1), (3, 0, 3)]
    assert launches == [0, *range(0, 3 * BLOCK, backend._programs[0].expansion.room)]
    assert max(map(difference, got, wanted)) <= 3e-2

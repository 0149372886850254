"""Prefill attention that only Hopper runs, against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from triton.experimental.gluon._runtime import GluonJITFunction

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import inputs
from penstock.backend.cuda.graphs import padded
from penstock.backend.cuda.kernels import hopper_attention
from penstock.backend.cuda.kernels.prefill_attention import prefill_attention, queries_per_tile
from penstock.model import rope
from penstock.model.spec import AttentionSpec, RopeSpec
from tests.cuda.device import DEVICE, HALF, HOPPER, TILINGS, ints, normal
from tests.cuda.test_attention import attend_with

pytestmark = pytest.mark.skipif(not HOPPER.device.has_hopper_attention, reason="needs a Hopper GPU")


def spec_of(heads: int, kv_heads: int, dims: int, window: int = 0) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, dims, RopeSpec(rope.plain(10000.0, dims), False, 1.1), window)


SPECS = {
    "llama3": spec_of(8, 2, 128),
    "smollm2": spec_of(9, 3, 64),
    "wide": spec_of(4, 2, 256),
    "wide window": spec_of(8, 4, 256, 100),
    "all heads": spec_of(16, 1, 128),
    "short window": spec_of(16, 2, 64, 5),
    "window": spec_of(8, 2, 128, 200),
    "soft cap": replace(spec_of(8, 2, 128), soft_cap=3.0),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns what `prefill_attention` has heard about launches so far: whether the kernel has all they ask for."""
    found: list[bool] = []

    def has_all_of(*about: object) -> bool:
        found.append(hopper_attention.has_all_of(*about))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr("penstock.backend.cuda.kernels.prefill_attention.has_all_of", has_all_of)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("sunk", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("name", SPECS)
def test_every_kind_of_prompt(name: str, sunk: bool, dtype: torch.dtype, asked: list[bool]) -> None:
    spec = SPECS[name]
    blocks = np.random.default_rng(0).permutation(160)
    chunks = [
        Chunk([0] * 50, 0, blocks[1:5].tolist()),
        Chunk([0] * 70, 101, blocks[24:35].tolist()),
        Chunk([0] * 2, 62, blocks[35:39].tolist()),
        Chunk([0] * 129, 1000, blocks[39:110].tolist()),
        Chunk([0] * 128, 384, blocks[110:142].tolist()),
    ]
    if dtype == HALF or DEVICE == "cuda":  # a token by itself goes to a kernel that Triton interprets
        chunks.append(Chunk([0], 299, blocks[5:24].tolist()))
    attend_with(spec, chunks, dtype, 16, sunk, hopper=HOPPER.hopper_attention(spec.head_dim))
    assert asked == [True]


@pytest.mark.parametrize("option", [{"chunk": 90}, {"temperature": 0.7, "temperature_span": 9}])
def test_what_it_lacks_goes_to_the_other_kernel(option: dict[str, float], asked: list[bool]) -> None:
    spec = replace(spec_of(8, 2, 128), **option)  # type: ignore[arg-type]
    attend_with(spec, [Chunk([0] * 40, 77, range(20))], HALF, 16, hopper=HOPPER.hopper_attention(128))
    assert asked == [False]


@pytest.mark.parametrize("window", [0, 40])
def test_positions_that_no_query_sees_may_hold_anything(window: int) -> None:
    """Blocks before a window belong to others, and so did the rest of the last block."""
    heads, kv_heads, dims = 8, 2, 128
    batch = greedy_batch([Chunk([0] * 37, 200, range(15)), Chunk([0] * 20, 0, [15, 16])])
    work = inputs.plan_attention(batch, 128 // 4, padded)
    cache = normal(17, 2, kv_heads, 16, dims, dtype=HALF)
    cache[14, :, :, 237 % 16 :] = cache[16, :, :, 20 % 16 :] = torch.nan
    if window:
        cache[: (200 - window + 1) // 16] = torch.nan
    qkv = normal(len(batch.tokens), (heads + 2 * kv_heads) * dims, dtype=HALF, seed=1)
    tiles = ints(np.concatenate([work.tiles, np.full((2, 5), -1)]))
    tables, header = ints(batch.tables.ravel()), ints([batch.tables.shape[2]])
    found = []
    for hopper in (None, HOPPER.hopper_attention(dims)):
        out = torch.full((len(qkv), heads * dims), torch.nan, dtype=HALF, device=DEVICE)
        tiling = TILINGS.prefill_attention(queries_per_tile(4), dims, 2)
        prefill_attention(qkv, cache, tiles, tables, header, out, 0.1, window, tiling=tiling, hopper=hopper)
        found.append(out)
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs all programs of a launch")
def test_tiles_that_see_most_are_attended_to_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs start in the order of their numbers: what takes longest must not be left for the end."""
    heads, kv_heads, dims = 8, 2, 64
    batch = greedy_batch([Chunk([0] * 40, 0, range(3)), Chunk([0] * 60, 100, range(3, 13))])
    work = inputs.plan_attention(batch, 128 // 4, padded)
    qkv, cache = normal(100, (heads + 2 * kv_heads) * dims, dtype=HALF), normal(13, 2, kv_heads, 16, dims, dtype=HALF)
    out = torch.full((100, heads * dims), torch.nan, dtype=HALF)
    run = GluonJITFunction.run
    monkeypatch.setattr(GluonJITFunction, "run", lambda *args, grid, **options: run(*args, grid=(kv_heads,), **options))
    tables, header = ints(batch.tables.ravel()), ints([batch.tables.shape[2]])
    about = ints(work.tiles), tables, header, out, 0.1, 0
    hopper_attention.hopper_attention(qkv, cache, *about, tiling=HOPPER.hopper_attention(dims))
    assert (~out.isnan()).any(1).nonzero().ravel().tolist() == list(range(40 + 32, 100))

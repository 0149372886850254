"""Rope, the paged cache and both attention kernels against the reference, and the plans that drive them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.backend.cuda import inputs
from penstock.backend.cuda.graphs import bucket
from penstock.backend.cuda.kernels.decode_attention import attend_parts
from penstock.backend.cuda.kernels.prefill_attention import attend_tiles
from penstock.backend.cuda.kernels.rope import rope_and_store
from penstock.backend.ref.batches import Chunk, greedy_batch
from penstock.backend.ref.ops import attention, rotate
from penstock.model import rope
from penstock.model.spec import AttentionSpec, RopeSpec
from tests.cuda.device import DEVICE, HALF, close, ints, normal

SPECS = {
    "smollm2": (9, 3, 64),
    "llama3": (8, 2, 128),
    "odd": (3, 1, 10),
    "many": (20, 1, 16),
}


def spec_of(name: str, window: int = 0, interleaved: bool = False) -> AttentionSpec:
    heads, kv_heads, dims = SPECS[name]
    return AttentionSpec(heads, kv_heads, dims, RopeSpec(rope.plain(10000.0, dims), interleaved, 1.1), window)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["f32", "half"])
def test_rope_and_store(name: str, interleaved: bool, dtype: torch.dtype) -> None:
    spec = spec_of(name, interleaved=interleaved)
    heads, kv_heads, dims = spec.heads, spec.kv_heads, spec.head_dim
    positions, places = [0, 7, 100_003], [35, 0, 17]
    qkv = normal(3, (heads + 2 * kv_heads) * dims, dtype=dtype)
    before = qkv.float().cpu().numpy().reshape(3, -1, dims).copy()
    cache = torch.zeros((3, 2, kv_heads, 16, dims), dtype=dtype, device=DEVICE)
    frequencies = torch.tensor(spec.rope.inv_freq, dtype=torch.float64, device=DEVICE)
    rope_and_store(qkv, frequencies, spec.rope.scale, interleaved, ints(positions), ints(places), cache)

    turned = torch.from_numpy(rotate(before, np.array(positions, np.int32), spec.rope)).to(DEVICE)
    after = qkv.reshape(3, -1, dims)
    assert close(after[:, :heads], turned[:, :heads])
    for token, place in enumerate(places):
        assert close(cache[place // 16, 0, :, place % 16], turned[token, heads : heads + kv_heads])
        assert torch.equal(cache[place // 16, 1, :, place % 16], after[token, heads + kv_heads :])
    assert int((cache != 0).any(-1).sum()) == 3 * 2 * kv_heads


def attend_with(spec: AttentionSpec, chunks: list[Chunk], dtype: torch.dtype, block_size: int) -> None:
    """Both kernels on a cache full of random keys and values, against the reference."""
    heads, kv_heads, dims = spec.heads, spec.kv_heads, spec.head_dim
    batch = greedy_batch(chunks)
    work = inputs.plan(batch, 128 // (heads // kv_heads), bucket)
    blocks = 1 + max(max(chunk.table) for chunk in chunks)
    cache = normal(blocks, 2, kv_heads, block_size, dims, dtype=dtype)
    qkv = normal(len(batch.tokens), (heads + 2 * kv_heads) * dims, dtype=dtype, seed=1)
    out = torch.full((len(batch.tokens), heads * dims), torch.nan, dtype=dtype, device=DEVICE)
    tables, header = ints(batch.tables.ravel()), ints([batch.tables.shape[1]])
    if len(work.joins):
        mixed = torch.full((len(work.parts) * heads * dims,), torch.nan, device=DEVICE)
        weighed = torch.full((len(work.parts) * heads * 2,), torch.nan, device=DEVICE)
        parts = ints(np.concatenate([work.parts, np.full((3, 6), -1)]))
        attend_parts(qkv, cache, parts, ints(work.joins), tables, header, out, mixed, weighed, spec.scale, spec.window)
    if len(work.tiles):
        attend_tiles(qkv, cache, ints(work.tiles), tables, header, out, spec.scale, spec.window)

    keys, values = cache.float().cpu().numpy().swapaxes(2, 3).swapaxes(0, 1)  # [blocks, block_size, kv_heads, D]
    q = qkv.float().cpu().numpy().reshape(len(qkv), -1, dims)[:, :heads]
    for row, (first, last) in enumerate(zip(batch.row_start, batch.row_start[1:], strict=False)):
        positions = batch.positions[first:last]
        context = np.arange(positions[-1] + 1)
        at = batch.tables[row, context // block_size], context % block_size
        wanted = attention(q[first:last], keys[at], values[at], positions, spec)
        assert close(out[first:last], torch.from_numpy(wanted).reshape(last - first, -1).to(DEVICE))


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["f32", "half"])
def test_rows_of_every_kind(name: str, window: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    blocks = rng.permutation(60)
    chunks = [
        Chunk([0], 0, blocks[:1].tolist()),
        Chunk([0] * 50, 0, blocks[1:5].tolist()),
        Chunk([0], 299, blocks[5:24].tolist()),
        Chunk([0] * 70, 101, blocks[24:35].tolist()),
        Chunk([0] * 2, 62, blocks[35:39].tolist()),
        Chunk([0], 64, blocks[39:44].tolist()),
    ]
    attend_with(spec_of(name, window), chunks, dtype, 16)


@pytest.mark.parametrize("block_size", [4, 16, 48])
def test_other_block_sizes(block_size: int) -> None:
    table = list(range(-(-150 // block_size)))
    attend_with(spec_of("smollm2"), [Chunk([0], 140, table), Chunk([0] * 3, 127, table)], torch.float32, block_size)


def test_a_long_context_is_cut_into_parts_and_joined() -> None:
    work = inputs.plan(greedy_batch([Chunk([0], 1999, range(125))]), 32, bucket)
    assert len(work.parts) == 32
    attend_with(spec_of("smollm2"), [Chunk([0], 1999, range(125))], torch.float32, 16)


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=300))
def test_parts_cover_every_context_once_and_fit(lengths: list[int]) -> None:
    rows = np.arange(len(lengths), dtype=np.int32)
    parts, joins = inputs.cut_contexts(rows * 3, rows, np.array(lengths, np.int32))
    assert len(parts) <= bucket(len(lengths)) + inputs.SPARE_PARTS
    for row, (token, first, count) in enumerate(joins.tolist()):
        own = parts[first : first + count]
        assert token == row * 3
        assert own[0, 2] == 0
        assert own[-1, 3] == lengths[row]
        assert np.array_equal(own[1:, 2], own[:-1, 3])
        assert (own[:, 2] < own[:, 3]).all()
        assert (own[:, [0, 1, 4, 5]] == [token, row, lengths[row], count == 1]).all()

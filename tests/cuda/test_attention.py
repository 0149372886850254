"""Rope, the paged cache and both attention kernels against the reference, and the plans that drive them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import inputs
from penstock.backend.cuda.graphs import bucket_decode_rows, padded
from penstock.backend.cuda.kernels.decode_attention import Rotation, SplitKV, decode_attention, queries_of
from penstock.backend.cuda.kernels.hopper_attention import HopperAttentionTiling
from penstock.backend.cuda.kernels.prefill_attention import prefill_attention, queries_per_tile
from penstock.backend.cuda.kernels.rope import rope_and_store
from penstock.backend.ref.ops import attention, query_scales, rotate
from penstock.model import rope
from penstock.model.spec import AttentionSpec, RopeSpec
from tests.cuda.device import DEVICE, HALF, TILINGS, close, ints, normal

SPECS = {
    "smollm2": (9, 3, 64),
    "llama3": (8, 2, 128),
    "odd": (3, 1, 10),
    "many": (20, 1, 16),
    "wide": (4, 2, 256),
}
SPARES = inputs.SPARE_SPLITS, inputs.MOST_SPARE


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
    rope_and_store(
        qkv, frequencies, spec.rope.scale, len(frequencies), interleaved, ints(positions), ints(places), cache
    )

    turned = torch.from_numpy(rotate(before, np.array(positions, np.int32), spec.rope)).to(DEVICE)
    after = qkv.reshape(3, -1, dims)
    assert close(after[:, :heads], turned[:, :heads])
    for token, place in enumerate(places):
        assert close(cache[place // 16, 0, :, place % 16], turned[token, heads : heads + kv_heads])
        assert torch.equal(cache[place // 16, 1, :, place % 16], after[token, heads + kv_heads :])
    assert int((cache != 0).any(-1).sum()) == 3 * 2 * kv_heads


def split_kv_of(spec: AttentionSpec, splits: int, run: int = 1) -> SplitKV:
    return SplitKV(
        torch.full((splits * run * spec.q_width,), torch.nan, device=DEVICE),
        torch.full((splits * run * spec.heads * 2,), torch.nan, device=DEVICE),
        ints([0] * (splits * spec.kv_heads)),
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", ["smollm2", "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["f32", "half"])
def test_rope_within_attention(name: str, interleaved: bool, dtype: torch.dtype) -> None:
    """Turning queries and storing keys is the same in a kernel of its own and as a part of attention."""
    spec = spec_of(name, interleaved=interleaved)
    chunks = [Chunk([0], 150, range(10)), Chunk([0], 0, [10]), Chunk([0], 15, [11])]
    batch = greedy_batch(chunks)
    work = inputs.plan_attention(batch, 32, padded)
    places = ints([9 * 16 + 6, 10 * 16, 11 * 16 + 15])
    frequencies = torch.tensor(spec.rope.inv_freq, dtype=torch.float64, device=DEVICE)
    tables, header = ints(batch.tables.ravel()), ints([batch.tables.shape[2]])
    found = []
    for rotation in (None, Rotation(frequencies, places, spec.rope.scale, len(frequencies), interleaved)):
        qkv = normal(3, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, dtype=dtype, seed=1)
        cache = normal(12, 2, spec.kv_heads, 16, spec.head_dim, dtype=dtype)
        out = torch.full((3, spec.q_width), torch.nan, dtype=dtype, device=DEVICE)
        if rotation is None:
            rope_and_store(
                qkv, frequencies, spec.rope.scale, len(frequencies), interleaved, ints(batch.positions), places, cache
            )
        split_kv = split_kv_of(spec, len(work.splits))
        tiling = TILINGS.decode_attention(3, spec.head_dim, qkv.element_size())
        about = split_kv, rotation, spec.scale, 0
        decode_attention(qkv, cache, ints(work.splits), tables, header, out, *about, tiling=tiling)
        found.append((out, cache))
    assert close(found[1][0], found[0][0].double())
    assert close(found[1][1], found[0][1].double())


def attend_with(
    spec: AttentionSpec,
    chunks: list[Chunk],
    dtype: torch.dtype,
    block_size: int,
    sunk: bool = False,
    run: int = 0,
    hopper: HopperAttentionTiling | None = None,
) -> None:
    """Both kernels on a cache full of random keys and values, against the reference. With `run`, the rows verify drafts
    in runs of so many tokens. With `hopper`, its kernel attends with longer rows."""
    heads, kv_heads, dims = spec.heads, spec.kv_heads, spec.head_dim
    batch = greedy_batch(chunks)
    work = inputs.plan_attention(batch, 128 // (heads // kv_heads), padded, 1000 if run else 0, (run,))
    assert work.shape.run == run
    blocks = 1 + max(max(chunk.table) for chunk in chunks)
    cache = normal(blocks, 2, kv_heads, block_size, dims, dtype=dtype)
    qkv = normal(len(batch.tokens), (heads + 2 * kv_heads) * dims, dtype=dtype, seed=1)
    out = torch.full((len(batch.tokens), heads * dims), torch.nan, dtype=dtype, device=DEVICE)
    tables, header = ints(batch.tables.ravel()), ints([batch.tables.shape[2]])
    sinks = 4 * normal(heads, seed=2) if sunk else None
    others = {name: getattr(spec, name) for name in ("chunk", "temperature", "temperature_span")}
    if len(work.splits):
        run = max(run, 1)
        split_kv = split_kv_of(spec, len(work.splits), run)
        splits = ints(np.concatenate([work.splits, np.full((3, 8), -1)]))
        about = spec.scale, spec.window, None, spec.soft_cap, sinks
        tiling = TILINGS.decode_attention(len(out), dims, qkv.element_size(), queries_of(heads // kv_heads, run))
        how = {**others, "run": run, "tiling": tiling}
        decode_attention(qkv, cache, splits, tables, header, out, split_kv, None, *about, **how)
        assert not split_kv.arrived.any()
    if len(work.tiles):
        tiling = TILINGS.prefill_attention(queries_per_tile(heads // kv_heads), dims, qkv.element_size())
        prefill_attention(
            qkv,
            cache,
            ints(work.tiles),
            tables,
            header,
            out,
            spec.scale,
            spec.window,
            None,
            spec.soft_cap,
            True,
            sinks,
            **others,
            tiling=tiling,
            hopper=hopper,
        )

    keys, values = cache.float().cpu().numpy().swapaxes(2, 3).swapaxes(0, 1)  # [blocks, block_size, kv_heads, D]
    q = qkv.float().cpu().numpy().reshape(len(qkv), -1, dims)[:, :heads]
    for row, (first, last) in enumerate(zip(batch.row_start, batch.row_start[1:], strict=False)):
        positions = batch.positions[first:last]
        context = np.arange(positions[-1] + 1)
        at = batch.tables[0, row, context // block_size], context % block_size
        vectors = {} if sinks is None else {"sinks": sinks.cpu().numpy()}
        queries = q[first:last]
        if spec.temperature:
            queries = queries * query_scales(positions, spec)[:, None, None]
        wanted = attention(queries, keys[at], values[at], (positions, 0), spec, vectors)
        assert close(out[first:last], torch.from_numpy(wanted).reshape(last - first, -1).to(DEVICE))


@pytest.mark.parametrize(
    ("name", "window"), [("smollm2", 0), ("smollm2", 30), ("llama3", 0), ("odd", 30), ("many", 0), ("wide", 0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["f32", "half"])
def test_rows_of_every_kind(name: str, window: int, dtype: torch.dtype) -> None:
    if (name, dtype) == ("wide", torch.float32):
        pytest.skip("shared memory holds heads of 256 in 16 bits alone")
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
    attend_with(spec_of(name, window), chunks, dtype, 16, sunk=name == "odd")


RUN_CASES = [("llama3", 4, 0), ("smollm2", 4, 30), ("llama3", 16, 30), ("odd", 16, 0), ("many", 3, 0), ("wide", 4, 7)]


@pytest.mark.parametrize(("name", "run", "window"), RUN_CASES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["f32", "half"])
def test_runs_of_a_row_attend_together(name: str, run: int, window: int, dtype: torch.dtype) -> None:
    """Rows of 1 to 40 tokens, in contexts of one split and of several."""
    if name == "wide" and dtype == torch.float32:
        pytest.skip("shared memory holds heads of 256 in 16 bits alone")
    table = np.random.default_rng(0).permutation(40).tolist()
    rows = [Chunk([0] * count, 3 * count + 90 * (count % 4), table) for count in (1, 2, 3, 4, 5, 7, 16, 40)]
    rows += [Chunk([0] * count, 500, table) for count in (1, 6, 15)]
    assert {split[5] for split in inputs.plan_attention(greedy_batch(rows), 1, padded, 1000, (run,)).splits} > {1}
    attend_with(spec_of(name, window), rows, dtype, 16, sunk=name in ("odd", "llama3"), run=run)


@pytest.mark.parametrize("chunk", [7, 90, 0])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_chunks_and_temperature_of_runs(chunk: int, temperature: float) -> None:
    spec = replace(spec_of("odd"), chunk=chunk, temperature=temperature, temperature_span=9)
    rows = [Chunk([0] * 9, 290, range(20)), Chunk([0] * 3, 88, range(20)), Chunk([0], 91, range(20))]
    attend_with(spec, rows, torch.float32, 16, run=4)


@pytest.mark.parametrize("chunk", [7, 90, 0])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_chunks_and_temperature(chunk: int, temperature: float) -> None:
    table = list(range(20))
    spec = replace(spec_of("odd"), chunk=chunk, temperature=temperature, temperature_span=9)
    rows = [Chunk([0], 299, table), Chunk([0] * 40, 77, table), Chunk([0], 91, table), Chunk([0] * 9, 0, table)]
    attend_with(spec, rows, torch.float32, 16)


@pytest.mark.parametrize("block_size", [4, 16, 48])
def test_other_block_sizes(block_size: int) -> None:
    table = list(range(-(-150 // block_size)))
    attend_with(spec_of("smollm2"), [Chunk([0], 140, table), Chunk([0] * 3, 127, table)], torch.float32, block_size)


def test_a_long_context_is_cut_into_parts_and_joined() -> None:
    work = inputs.plan_attention(greedy_batch([Chunk([0], 1999, range(125))]), 32, padded)
    assert len(work.splits) == 31
    attend_with(spec_of("smollm2"), [Chunk([0], 1999, range(125))], torch.float32, 16, sunk=True)


@given(st.tuples(*[st.integers(0, 5000)] * 5), st.sampled_from(SPARES))
def test_padded_shapes_hold_what_they_pad_and_stay_as_they_are(sizes: tuple[int, ...], spare: int) -> None:
    tokens, sampled, decodes, seed, tiles = sizes
    decodes, sampled = min(decodes, tokens), min(sampled, tokens)
    size = (tokens, sampled) if tiles else (decodes, min(sampled, decodes))
    run = 0 if tiles else (0, *inputs.RUNS)[seed % 4]
    shape = inputs.Shape(*size, decodes, 0, tiles, run=run)
    larger = padded(shape, spare)
    assert all(more >= least for more, least in zip(larger, shape, strict=True))
    assert padded(larger, spare) == larger
    runs = inputs.most_runs(larger.decodes, run)
    assert larger.splits >= runs + (spare if larger.decodes else 0) or larger == shape


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=300), st.sampled_from(SPARES))
def test_parts_cover_every_context_once_and_fit(lengths: list[int], spare: int) -> None:
    rows = np.arange(len(lengths), dtype=np.int32)
    splits = inputs.split_contexts(rows * 3, rows, np.array(lengths, np.int32), rows % 5 + 1, spare=spare)
    assert len(splits) <= bucket_decode_rows(len(lengths)) + spare
    assert splits[:, 5].max() <= inputs.SPARE_SPLITS + 1
    for row, length in enumerate(lengths):
        own = splits[splits[:, 1] == row]
        first, count = own[0, 6], len(own)
        assert np.array_equal(own, splits[first : first + count])
        assert own[0, 2] == 0
        assert own[-1, 3] == length
        assert np.array_equal(own[1:, 2], own[:-1, 3])
        assert (own[:, 2] < own[:, 3]).all()
        assert (own[:, [0, 1, 4, 5, 6, 7]] == [row * 3, row, length, count, first, row % 5 + 1]).all()


def test_longer_runs_are_taken_where_they_spare_much_reading() -> None:
    def run(rows: int, tokens: int, length: int) -> int:
        return inputs.run_size(np.full(rows, tokens), np.full(rows, length), inputs.run_sizes_of(4))

    assert [run(1, tokens, 2200) for tokens in (2, 16, 32, 65)] == [1, 1, 4, 16]
    assert [run(8, tokens, 2200) for tokens in (2, 4, 8)] == [1, 4, 16]
    assert [run(64, tokens, 2200) for tokens in (2, 4, 6)] == [4, 4, 16]
    assert run(100, 5, 2200) == 4, "there is room for 64 long runs"
    assert run(64, 4, 50) == 1, "short contexts are read quickly"
    assert [inputs.run_sizes_of(group) for group in (1, 8, 16, 40, 64)] == [(1, 4, 16), (1, 4, 8), (1, 4), (1,), (1,)]


@given(st.lists(st.tuples(st.integers(1, 65), st.integers(1, 3000)), min_size=1, max_size=40), st.integers(1, 32))
def test_runs_cover_every_token_once_and_fit(rows: list[tuple[int, int]], group: int) -> None:
    batch = greedy_batch([Chunk([0] * count, start, range(200)) for count, start in rows])
    sizes = inputs.run_sizes_of(group)
    work = inputs.plan_attention(batch, 32, padded, 4096, sizes)
    assert len(work.splits) <= work.shape.splits
    assert work.shape.run in ((0,) if max(rows)[0] == 1 else sizes)
    assert work.shape.splits * max(work.shape.run, 1) <= inputs.split_lines(work.shape.tokens, sizes)
    newest = work.splits[np.flatnonzero(work.splits[:, 3] == work.splits[:, 4])]  # the last split of each run
    tokens = sorted(token for first, size in newest[:, [0, 7]] for token in range(first, first + size))
    assert tokens == list(range(len(batch.tokens)))
    assert (newest[:, 7] <= max(work.shape.run, 1)).all()
    assert (newest[:, 4] == batch.positions[newest[:, 0] + newest[:, 7] - 1] + 1).all()

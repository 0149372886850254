"""Rows that have a prefix in common attend to it together: the plan, the kernels and the backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend, inputs, shared_prefixes
from penstock.backend.cuda.graphs import padded
from penstock.backend.cuda.kernels.decode_attention import SharedPlaces, decode_attention, queries_of
from penstock.backend.cuda.kernels.shared_prefix_attention import SharedTiles, shared_prefix_attention
from penstock.backend.cuda.kv_cache import LayerCache
from penstock.backend.cuda.loaded_program import sharing_of
from penstock.backend.cuda.shared_prefixes import Sharing, find_shared_prefixes, prefix_groups, tile_tokens
from penstock.backend.ref.ops import attention
from penstock.model.spec import AttentionSpec
from tests.cuda.device import DEVICE, HALF, TILINGS, close, ints, normal
from tests.cuda.small import load_small
from tests.cuda.test_attention import spec_of, split_kv_of
from tests.cuda.test_kv import filled, values_of

BLOCK = 16


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes are read once however little that spares."""
    monkeypatch.setattr(shared_prefixes, "LEAST_SPARED", 1)


def rows_with_prefixes() -> list[Chunk]:
    """Rows that share 10 blocks, 3 others that share 4, one alone, and one whose context is all of a prefix but for its
    newest token."""
    table = list(range(100))
    rows = [Chunk([0], 165 + 7 * row, [*table[:10], *table[20 + 2 * row : 22 + 2 * row]]) for row in range(3)]
    rows += [Chunk([0], 160, [*table[:10], 30])]
    rows += [Chunk([0], 70 + row, [*table[40:44], 50 + row]) for row in range(3)]
    return [*rows, Chunk([0], 99, table[60:67])]


@pytest.mark.usefixtures("always")
def test_rows_are_grouped_by_the_prefix_that_spares_most() -> None:
    batch = greedy_batch(rows_with_prefixes())
    work = inputs.plan_attention(batch, 32, padded, sharing=Sharing(BLOCK, 2))
    assert work.shared is not None
    assert work.shared.starts.tolist() == [160, 160, 160, 160, 64, 64, 64, 0]
    assert work.shared.sizes.tolist() == [2, 2, 2, 1]
    assert work.shape.shared == shared_prefixes.SPLITS
    lengths = batch.positions + 1
    for row, (start, length) in enumerate(zip(work.shared.starts, lengths, strict=True)):
        own = work.splits[work.splits[:, 1] == row]
        assert own[0, 2] == start
        assert own[-1, 3] == length
    pieces = work.shared_splits
    assert sorted(pieces[pieces[:, 3] == pieces[:, 4]][:, 4].tolist()) == [64, 64, 160, 160]


def test_nothing_is_shared_where_that_does_not_pay() -> None:
    batch = greedy_batch(rows_with_prefixes())
    work = inputs.plan_attention(batch, 32, padded, sharing=Sharing(BLOCK, 16))
    assert work.shared is None
    assert work.shape.shared == 0
    tables, lengths = np.zeros((64, 300), np.int32), np.full(64, 4200, np.int32)
    tables[:, :256] = np.arange(256)
    tables[:, 256:] = 1000 + np.arange(64 * 44).reshape(64, 44)
    tokens = np.arange(64, dtype=np.int32)
    found = find_shared_prefixes(tables, tokens, lengths, Sharing(BLOCK, 16))
    assert found is not None
    assert set(found.starts.tolist()) == {4096}
    assert find_shared_prefixes(tables[:9], tokens[:9], lengths[:9], Sharing(BLOCK, 16)) is None
    assert list(prefix_groups(tables[:, 256:], lengths // BLOCK - 256, 1)) == []


@pytest.mark.usefixtures("always")
def test_more_prefixes_than_there_is_room_for() -> None:
    """Each pair of rows has a prefix of its own: the first ones are shared."""
    rows = [Chunk([0], 40, [3 * (row // 2), 3 * (row // 2) + 1, 999 + row]) for row in range(200)]
    work = inputs.plan_attention(greedy_batch(rows), 32, padded, sharing=Sharing(BLOCK, 16))
    assert work.shared is not None
    assert len(work.shared.first) == shared_prefixes.TILES
    assert len(work.shared_splits) <= shared_prefixes.SPLITS


def attend(spec: AttentionSpec, chunks: list[Chunk], dtype: torch.dtype, cache: LayerCache, values: Any) -> None:
    """Both kernels against the reference."""
    batch, group = greedy_batch(chunks), spec.heads // spec.kv_heads
    together = tile_tokens(group)
    work = inputs.plan_attention(batch, 32, padded, sharing=Sharing(BLOCK, together))
    assert work.shared is not None
    qkv = normal(len(batch.tokens), spec.q_width + 2 * spec.kv_width, dtype=dtype, seed=1)
    out = torch.full((len(batch.tokens), spec.q_width), torch.nan, dtype=dtype, device=DEVICE)
    splits, pieces = (np.concatenate([some, np.full((2, 8), -1)]) for some in (work.splits, work.shared_splits))
    split_kv = split_kv_of(spec, len(splits) + len(pieces) * together)
    places = ints(shared_prefixes.shared_places(work.shared_splits, work.shared.tokens, len(out)))
    shared, common = (
        SharedPlaces(places, len(splits), together),
        (ints(batch.tables.ravel()), ints([batch.tables.shape[2]]), out),
    )
    tiling = TILINGS.shared_prefix(spec.head_dim, qkv.element_size(), queries_of(group, together))
    tiles = SharedTiles(ints(pieces), ints(work.shared.tokens))
    about = split_kv, shared, spec.scale, cache.scales
    shared_prefix_attention(qkv, cache.lines, tiles, *common, *about, tiling=tiling)
    tiling, sinks = TILINGS.decode_attention(len(out), spec.head_dim, qkv.element_size()), normal(spec.heads, seed=2)
    how = spec.scale, 0, cache.scales, 0.0, sinks
    decode_attention(qkv, cache.lines, ints(splits), *common, split_kv, None, *how, shared=shared, tiling=tiling)

    keys, values = values.cpu().numpy().swapaxes(2, 3).swapaxes(0, 1)  # [blocks, block_size, kv_heads, D]
    q = qkv.float().cpu().numpy().reshape(len(qkv), -1, spec.head_dim)[:, : spec.heads]
    for row, position in enumerate(batch.positions):
        context = np.arange(position + 1)
        at = batch.tables[0, row, context // BLOCK], context % BLOCK
        vectors = {"sinks": sinks.cpu().numpy()}
        wanted = attention(q[row : row + 1], keys[at], values[at], (np.array([position]), 0), spec, vectors)
        assert close(out[row : row + 1], torch.from_numpy(wanted).reshape(1, -1).to(DEVICE))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", ["llama3", "smollm2", "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["f32", "half"])
def test_shared_prefixes_are_joined_with_the_rest(name: str, dtype: torch.dtype) -> None:
    spec = spec_of(name)
    lines = normal(100, 2, spec.kv_heads, BLOCK, spec.head_dim, dtype=dtype)
    attend(spec, rows_with_prefixes(), dtype, LayerCache(lines, None, None), lines.float())


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_shared_prefixes_of_8_bits(kind: str) -> None:
    spec = spec_of("llama3")
    cache = filled(spec, kind, 100)
    attend(spec, rows_with_prefixes(), HALF, cache, values_of(cache))


def test_a_long_prefix_of_many_rows() -> None:
    """The prefix has several splits, and more rows than fit a tile."""
    prefix = list(range(220))
    rows = [Chunk([0], 3520 + row, [*prefix, 220 + row, 250 + row]) for row in range(21)]
    lines = normal(280, 2, 1, BLOCK, 10, dtype=torch.float32)
    attend(spec_of("odd"), rows, torch.float32, LayerCache(lines, None, None), lines.float())


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("prompt", [0, 20])
def test_the_backend_answers_the_same(prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs with a prompt beside the rows that share a prefix, and without."""
    rows = [Chunk([5 + row], 18, [0, 2 + row], row) for row in range(2)]
    rows += [Chunk(list(range(prompt)), 0, [4, 5], 2)] if prompt else []
    backend = load_small(CudaBackend(32, 4, device=DEVICE, dtype=torch.float32), "F32")
    backend.reserve_kv(6, BLOCK)
    backend.logits(greedy_batch([Chunk(list(range(18)), 0, [0, 2], 0)]))
    backend.logits(greedy_batch([Chunk([7, 8], 16, [0, 3], 1)]))
    assert backend._steps.plan(backend._programs[0], greedy_batch(rows)).shared is not None
    found = [backend.logits(greedy_batch(rows))]
    monkeypatch.setattr(shared_prefixes, "LEAST_SPARED", 1 << 40)
    found.append(backend.logits(greedy_batch(rows)))
    assert np.abs(found[0] - found[1]).max() < 1e-4
    assert np.abs(found[0]).max() > 0.1
    backend.close()


def test_layers_that_see_only_a_part_share_nothing() -> None:
    assert sharing_of([spec_of("llama3")] * 2, BLOCK) == Sharing(BLOCK, 16)
    assert sharing_of([spec_of("llama3"), spec_of("llama3", window=30)], BLOCK) is None
    assert sharing_of([spec_of("llama3"), spec_of("smollm2")], BLOCK) is None
    assert sharing_of([], BLOCK) is None

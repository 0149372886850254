"""Keys and values in formats of their own, 4 bits among them: written, read and moved, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.base import CacheSize
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend, inputs
from penstock.backend.cuda.arena import Arena
from penstock.backend.cuda.graphs import padded
from penstock.backend.cuda.kernels.decode_attention import decode_attention, queries_of
from penstock.backend.cuda.kernels.prefill_attention import prefill_attention, queries_per_tile
from penstock.backend.cuda.kernels.rope_sides import rope_and_store_sides
from penstock.backend.cuda.kv_cache import layout_of, reserve_caches
from penstock.backend.kv_formats import KvFormats
from penstock.backend.ref import RefBackend
from penstock.backend.ref.ops import attention, rotate
from penstock.errors import ConfigError
from penstock.model import rope
from penstock.model.load import load_model, open_checkpoint
from penstock.model.spec import AttentionSpec, RopeSpec
from tests.cuda.device import DEVICE, HALF, TILINGS, ints, normal
from tests.cuda.test_attention import split_kv_of
from tests.cuda.test_kv import GOLDENS, apart
from tests.engine.one_head import ONE_HEAD

BLOCKS, BLOCK_SIZE = 6, 8


def spec_of(heads: int, kv_heads: int, dims: int, **options: Any) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, dims, RopeSpec(rope.plain(10000.0, dims), False, 1.1), **options)


@pytest.mark.parametrize(
    ("kv", "spec", "dtype"),
    [
        ("int4", spec_of(4, 2, 32), torch.float32),
        ("int8:int4", spec_of(3, 1, 64, window=7), torch.float32),
        ("int4:auto", spec_of(2, 1, 96, q_gain=True), torch.float32),  # three runs of the Hadamard transform
        ("fp8:int4", spec_of(2, 1, 32), torch.float32),
        ("int4", spec_of(20, 1, 64), HALF),
    ],
    ids=["int4", "int8:int4", "int4:auto", "fp8:int4", "half"],
)
def test_attention_reads_what_was_stored(kv: str, spec: AttentionSpec, dtype: torch.dtype) -> None:
    """Two prompts, and one token that goes on with the second, all of them in one step."""
    table = np.random.default_rng(0).permutation(BLOCKS).tolist()
    chunks = [Chunk([0] * 19, 0, table[:3]), Chunk([0] * 9, 0, table[3:5]), Chunk([0], 9, table[3:5])]
    batch, group = greedy_batch(chunks), spec.heads // spec.kv_heads
    qkv = normal(len(batch.tokens), spec.qkv_width, dtype=dtype, seed=1)
    heads = qkv.float().clone().cpu().numpy().reshape(len(qkv), -1, spec.head_dim)
    gain = 1 + normal(spec.head_dim, seed=3) if spec.q_gain else None
    cache = layout_of(kv, dtype).reserve(spec, BLOCKS, BLOCK_SIZE, Arena(torch.device(DEVICE)))
    frequencies = torch.tensor(spec.rope.inv_freq, dtype=torch.float64, device=DEVICE)
    rows = np.repeat(np.arange(3), np.diff(batch.row_start))
    places = batch.tables[0, rows, batch.positions // BLOCK_SIZE] * BLOCK_SIZE + batch.positions % BLOCK_SIZE
    about = frequencies, 1.1, len(frequencies), False, ints(batch.positions), ints(places)
    rope_and_store_sides(qkv, *about, cache.lines, cache.scales, spec.q_width, q_gain=gain)

    work = inputs.plan_attention(batch, 128 // group, padded)
    out = torch.full((len(qkv), spec.q_width), torch.nan, dtype=dtype, device=DEVICE)
    common = ints(batch.tables.ravel()), ints([batch.tables.shape[2]]), out
    how = spec.scale, spec.window, cache.scales
    tiling = TILINGS.decode_attention(len(out), spec.head_dim, qkv.element_size(), queries_of(group, 1))
    split_kv = split_kv_of(spec, len(work.splits))
    decode_attention(qkv, cache.lines, ints(work.splits), *common, split_kv, None, *how, tiling=tiling)
    tiling = TILINGS.prefill_attention(queries_per_tile(group), spec.head_dim, qkv.element_size())
    prefill_attention(qkv, cache.lines, ints(work.tiles), *common, *how, tiling=tiling)

    q, k, v = np.split(heads, [spec.heads, spec.heads + spec.kv_heads], axis=1)
    q, k = (torch.from_numpy(rotate(x, batch.positions, spec.rope)).to(dtype).float().numpy() for x in (q, k))
    q = q if gain is None else q * gain.cpu().numpy()
    stored = KvFormats(*(side if side.startswith("int") else "f32" for side in layout_of(kv, dtype).apart or ()))
    k, v = stored.stored_keys(k), stored.stored_values(v)
    for row, (first, last) in enumerate(zip(batch.row_start, batch.row_start[1:], strict=False)):
        begin = batch.row_start[1] if row else 0
        context, positions = slice(begin, last), batch.positions[first:last]
        wanted = attention(q[first:last], k[context], v[context], (positions, 0), spec, {})
        far = 0.1 if "fp8" in kv else 0.03 if dtype == HALF else 2e-3
        assert apart(out[first:last].float().cpu().numpy(), wanted.reshape(last - first, -1)) < far


def loaded(backend: Any) -> Any:
    backend.load(load_model(open_checkpoint(GOLDENS / "untied", ONE_HEAD), backend))
    backend.reserve_kv(12, BLOCK_SIZE)
    return backend


def cuda(kv: str) -> CudaBackend:
    return CudaBackend(64, 8, device=DEVICE, dtype=torch.float32, kv=kv)


@pytest.mark.parametrize("kv", ["int4", "int8:int4"])
def test_a_model_answers_as_the_reference_and_blocks_move(kv: str) -> None:
    tokens = np.random.default_rng(0).integers(64, size=18).tolist()
    prompt = greedy_batch([Chunk(tokens, 0, range(3))])
    backend = loaded(cuda(kv))
    found, stored, exact = (each.logits(prompt) for each in (backend, loaded(RefBackend(kv)), loaded(RefBackend())))
    assert apart(found, stored) < 5e-3
    assert apart(found, exact) > 1e-2
    data = backend.kv.export_blocks([0, 1])
    assert len(data) == 2 * BLOCK_SIZE * backend.memory_needs().kv_bytes_per_token
    assert backend.kv.fingerprint() != loaded(cuda("int8")).kv.fingerprint()
    backend.kv.import_blocks([7, 9], data)
    assert apart(backend.logits(greedy_batch([Chunk(tokens[16:], 16, [7, 9, 5])])), found[16:]) < 1e-3
    model = load_model(open_checkpoint(GOLDENS / "untied", ONE_HEAD), backend)
    assert apart(backend.trial_logits(model, kv, [prompt], CacheSize(3, BLOCK_SIZE)), found) == 0


def test_what_has_no_place_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown KV type 'int8:f32' on CUDA: use auto, one of bf16, fp8, int8, int4"):
        CudaBackend(device=DEVICE, kv="int8:f32")
    layout, arena = layout_of("int4", torch.float32), Arena(torch.device(DEVICE))
    with pytest.raises(ConfigError, match="multiple of 32 dimensions, and this model's have 48"):
        layout.bytes_per_token(spec_of(2, 1, 48))
    with pytest.raises(ConfigError, match=r"attention \(MLA\)"):
        layout.bytes_per_token(spec_of(2, 1, 64, v_dim=32))
    with pytest.raises(ConfigError, match="layers have heads of different sizes"):
        reserve_caches(layout, {0: spec_of(2, 1, 32), 1: spec_of(2, 1, 64)}, (), (2, 4), arena)

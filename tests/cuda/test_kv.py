"""A KV cache of 8 bits: written and read by each kernel, and behind the backend, against the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backend import open_backend
from penstock.backend.base import CacheSize
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend, inputs
from penstock.backend.cuda.arena import Arena
from penstock.backend.cuda.graphs import padded
from penstock.backend.cuda.kernels.decode_attention import Rotation, decode_attention, queries_of
from penstock.backend.cuda.kernels.kv8 import LARGEST
from penstock.backend.cuda.kernels.prefill_attention import prefill_attention, queries_per_tile
from penstock.backend.cuda.kernels.rope import rope_and_store
from penstock.backend.cuda.kv_cache import LayerCache, copy_blocks, layout_of, reserve_caches
from penstock.backend.ref.ops import attention, rotate
from penstock.backend.ref.random_steps import blocks_for, random_steps
from penstock.config import Config
from penstock.errors import ConfigError
from penstock.model.load import load_model, open_checkpoint
from penstock.model.spec import AttentionSpec, KvGroup, RopeSpec
from tests.cuda.device import DEVICE, HALF, TILINGS, close, ints, normal
from tests.cuda.test_attention import SPECS, spec_of, split_kv_of

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
KINDS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
APART = {"fp8": 0.15, "int8": 0.04}  # of tiny models' logits: their attention is sharp
BLOCK_SIZE = 4

kinds = pytest.mark.parametrize("kind", KINDS)


def empty(spec: AttentionSpec, kind: str, blocks: int) -> LayerCache:
    return layout_of(kind, torch.float32).reserve(spec, blocks, 16, Arena(torch.device(DEVICE)))


def values_of(cache: LayerCache) -> torch.Tensor:
    return cache.lines.float() * cache.scales[..., None]


def filled(spec: AttentionSpec, kind: str, blocks: int) -> LayerCache:
    """Random lines, some of them larger than others."""
    values = normal(blocks, 2, spec.kv_heads, 16, spec.head_dim)
    values *= torch.exp(0.5 * normal(blocks, 2, spec.kv_heads, 16, 1, seed=2))
    dtype = KINDS[kind]
    scales = values.abs().amax(-1) / LARGEST[dtype]
    codes = values / scales[..., None]
    return LayerCache((codes.round() if kind == "int8" else codes).to(dtype), scales)


@kinds
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_lines_are_rounded_to_the_nearest(name: str, interleaved: bool, kind: str) -> None:
    spec = spec_of(name, interleaved=interleaved)
    heads, kv_heads, dims = spec.heads, spec.kv_heads, spec.head_dim
    positions, places = [0, 7, 100_003], [35, 0, 17]
    qkv = normal(3, (heads + 2 * kv_heads) * dims)
    qkv[0] = 0
    qkv[1] *= 1000
    turned = rotate(qkv.cpu().numpy().reshape(3, -1, dims), np.array(positions, np.int32), spec.rope)
    wanted = torch.from_numpy(turned).to(DEVICE)[:, heads : heads + kv_heads]
    values = qkv.reshape(3, -1, dims)[:, heads + kv_heads :].clone()
    cache = empty(spec, kind, 3)
    frequencies = torch.tensor(spec.rope.inv_freq, dtype=torch.float64, device=DEVICE)
    rope_and_store(
        qkv, frequencies, spec.rope.scale, len(frequencies), interleaved, ints(positions), ints(places), *cache[:2]
    )
    for token, place in enumerate(places):
        for half, exact in enumerate((wanted, values)):
            got = values_of(cache)[place // 16, half, :, place % 16]
            scale = exact[token].abs().amax(-1, keepdim=True) / LARGEST[KINDS[kind]]
            room = scale * 0.501 if kind == "int8" else exact[token].abs() * 0.0626 + scale * 2**-10
            assert ((got - exact[token]).abs() <= room + 1e-6 * exact[token].abs()).all()
    assert int((cache.scales != 0).sum()) == 3 * 2 * kv_heads


@kinds
@pytest.mark.parametrize("name", ["smollm2", "odd"])
def test_rope_within_attention_writes_the_same(name: str, kind: str) -> None:
    spec = spec_of(name)
    batch = greedy_batch([Chunk([0], 150, range(10)), Chunk([0], 0, [10]), Chunk([0], 15, [11])])
    work = inputs.plan_attention(batch, 32, padded)
    places = ints([9 * 16 + 6, 10 * 16, 11 * 16 + 15])
    frequencies = torch.tensor(spec.rope.inv_freq, dtype=torch.float64, device=DEVICE)
    tables, header = ints(batch.tables.ravel()), ints([batch.tables.shape[2]])
    found = []
    for rotation in (None, Rotation(frequencies, places, spec.rope.scale, len(frequencies), False)):
        qkv = normal(3, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, seed=1)
        cache = filled(spec, kind, 12)
        out = torch.full((3, spec.q_width), torch.nan, device=DEVICE)
        if rotation is None:
            rope_and_store(
                qkv, frequencies, spec.rope.scale, len(frequencies), False, ints(batch.positions), places, *cache[:2]
            )
        split_kv = split_kv_of(spec, len(work.splits))
        about = split_kv, rotation, spec.scale, 0, cache.scales
        tiling = TILINGS.decode_attention(3, spec.head_dim, qkv.element_size())
        decode_attention(qkv, cache.lines, ints(work.splits), tables, header, out, *about, tiling=tiling)
        found.append((out, values_of(cache)))
    assert close(found[1][0], found[0][0].double())
    different = (found[1][1] - found[0][1]).abs() > 1e-6 * found[0][1].abs()  # rounding may tip a value over
    assert different.float().mean() < 1e-3


@kinds
@pytest.mark.parametrize(("name", "window"), [("smollm2", 0), ("llama3", 0), ("odd", 30), ("many", 0)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["f32", "half"])
def test_attention_reads_what_is_stored(name: str, window: int, dtype: torch.dtype, kind: str) -> None:
    blocks = np.random.default_rng(0).permutation(40)
    chunks = [
        Chunk([0], 0, blocks[:1].tolist()),
        Chunk([0] * 50, 0, blocks[1:5].tolist()),
        Chunk([0], 299, blocks[5:24].tolist()),
        Chunk([0] * 40, 101, blocks[24:33].tolist()),
    ]
    attend_with(spec_of(name, window), chunks, dtype, kind)


@kinds
@pytest.mark.parametrize(("name", "run", "window"), [("smollm2", 4, 0), ("llama3", 4, 30), ("llama3", 16, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["f32", "half"])
def test_runs_of_a_row_read_what_is_stored(name: str, run: int, window: int, dtype: torch.dtype, kind: str) -> None:
    table = np.random.default_rng(0).permutation(40).tolist()
    chunks = [Chunk([0] * count, 40 * count % 150 + count, table) for count in (1, 2, 3, 4, 7, 16, 20)]
    attend_with(spec_of(name, window), [*chunks, Chunk([0] * 5, 500, table)], dtype, kind, run)


def attend_with(spec: AttentionSpec, chunks: list[Chunk], dtype: torch.dtype, kind: str, run: int = 0) -> None:
    """Both kernels on a cache of 8 bits, against the reference; with `run`, as drafts that are verified."""
    batch, group = greedy_batch(chunks), spec.heads // spec.kv_heads
    work = inputs.plan_attention(batch, 128 // group, padded, 1000 if run else 0, (run,))
    cache = filled(spec, kind, 40)
    qkv = normal(len(batch.tokens), spec.q_width + 2 * spec.kv_width, dtype=dtype, seed=1)
    out = torch.full((len(batch.tokens), spec.q_width), torch.nan, dtype=dtype, device=DEVICE)
    tables, header = ints(batch.tables.ravel()), ints([batch.tables.shape[2]])
    run = max(run, 1)
    split_kv = split_kv_of(spec, len(work.splits), run)
    common, sinks = (tables, header, out), 4 * normal(spec.heads, seed=2)
    about = spec.scale, spec.window, cache.scales, 0.0
    tiling = TILINGS.decode_attention(len(out), spec.head_dim, qkv.element_size(), queries_of(group, run))
    how = {"run": run, "tiling": tiling}
    decode_attention(qkv, cache.lines, ints(work.splits), *common, split_kv, None, *about, sinks, **how)
    if len(work.tiles):
        tiling = TILINGS.prefill_attention(queries_per_tile(group), spec.head_dim, qkv.element_size())
        prefill_attention(qkv, cache.lines, ints(work.tiles), *common, *about, True, sinks, tiling=tiling)

    keys, values = values_of(cache).cpu().numpy().swapaxes(2, 3).swapaxes(0, 1)  # [blocks, block_size, kv_heads, D]
    q = qkv.float().cpu().numpy().reshape(len(qkv), -1, spec.head_dim)[:, : spec.heads]
    for row, (first, last) in enumerate(zip(batch.row_start, batch.row_start[1:], strict=False)):
        positions = batch.positions[first:last]
        context = np.arange(positions[-1] + 1)
        at = batch.tables[0, row, context // 16], context % 16
        wanted = attention(q[first:last], keys[at], values[at], (positions, 0), spec, {"sinks": sinks.cpu().numpy()})
        assert close(out[first:last], torch.from_numpy(wanted).reshape(last - first, -1).to(DEVICE))


# Behind the backend


def loaded(name: str, kind: str) -> CudaBackend:
    backend = CudaBackend(256, 64, device=DEVICE, dtype=torch.float32, kv=kind)
    backend.load(load_model(open_checkpoint(GOLDENS / name), backend))
    return backend


def expected(name: str) -> tuple[list[int], np.ndarray]:
    with np.load(GOLDENS / name / "expected.npz") as file:
        return file["tokens"].tolist(), file["logits"]


def apart(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@kinds
def test_random_chunks_among_others(kind: str) -> None:
    """However a prompt is cut, it reads the same cache: the logits are those of the whole prompt, nearly those of
    32 bits."""
    tokens, logits = expected("mistral")
    prompts = [tokens[:40], tokens[:5]]
    backend = loaded("mistral", kind)
    size = blocks_for(prompts, BLOCK_SIZE)
    backend.reserve_kv(size, BLOCK_SIZE)
    whole = backend.logits(greedy_batch([Chunk(tokens, 0, range(size))]))
    assert 1e-4 < apart(whole, logits) < APART[kind]
    for chunks in random_steps(np.random.default_rng(0), prompts, BLOCK_SIZE):
        wanted = np.concatenate([whole[chunk.start : chunk.start + len(chunk.tokens)] for chunk in chunks])
        assert apart(backend.logits(greedy_batch(chunks)), wanted) < 1e-2


@kinds
def test_a_prefix_is_shared_and_moved(kind: str) -> None:
    """Blocks of one sequence go on in another, and elsewhere."""
    tokens, _ = expected("linear")
    backend = loaded("linear", kind)
    backend.reserve_kv(40, BLOCK_SIZE)
    whole = backend.logits(greedy_batch([Chunk(tokens, 0, range(12))]))
    shared = backend.logits(greedy_batch([Chunk(tokens[32:], 32, [*range(8), 20, 21, 22, 23], slot=1)]))
    assert apart(shared, whole[32:]) < 1e-2
    backend.kv.copy_blocks([(block, 39 - block) for block in range(10)])
    got = backend.logits(greedy_batch([Chunk(tokens[40:], 40, [*range(39, 29, -1), 12, 13])]))
    assert apart(got, whole[40:]) < 1e-2


@kinds
def test_another_type_is_tried_before_a_cache_is_reserved(kind: str) -> None:
    """In steps of 24 tokens, of which the first samples none. What is reserved later has the backend's own type."""
    tokens, _ = expected("tied")
    checkpoint, backend = open_checkpoint(GOLDENS / "tied"), loaded("tied", kind)
    chunks = Chunk(tokens[:24], 0, range(12), sample=0), Chunk(tokens[24:], 24, range(12))
    batches = [greedy_batch([chunk], step) for step, chunk in enumerate(chunks)]
    model = load_model(checkpoint, backend)
    tried = {each: backend.trial_logits(model, each, batches, CacheSize(12, BLOCK_SIZE)) for each in ("auto", kind)}
    for each, logits in tried.items():
        alone = loaded("tied", each)
        alone.reserve_kv(12, BLOCK_SIZE)
        assert apart(logits, np.concatenate([alone.logits(batch) for batch in batches])) == 0
    assert apart(tried["auto"], tried[kind]) > 1e-4
    backend.reserve_kv(3, BLOCK_SIZE)
    assert backend._programs[0].memory.kv.caches[0].lines.dtype == KINDS[kind]


@pytest.mark.parametrize(("kind", "line"), [("auto", 8 * 4), ("fp8", 8 + 4), ("int8", 8 + 4)])
def test_bytes_are_those_of_the_cache(kind: str, line: int) -> None:
    backend = loaded("tied", kind)
    backend.reserve_kv(3, BLOCK_SIZE)
    assert backend.memory_needs().kv_bytes_per_token == 2 * 2 * 2 * line  # layers, keys and values, heads
    splits = [part for cache in backend._programs[0].memory.kv.caches.values() for part in cache if part is not None]
    assert sum(part.nbytes for part in splits) == 4 * BLOCK_SIZE * backend.memory_needs().kv_bytes_per_token


def test_what_a_device_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown KV type 'f32' on CUDA: use auto, one of bf16, fp8, int8"):
        CudaBackend(device=DEVICE, kv="f32")
    pytest.importorskip("penstock.backend.cpu._native")
    with pytest.raises(ConfigError, match="unknown KV type 'fp8' for a CPU"):
        open_backend(Config(model="", device="cpu", kv="fp8"))


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_layers_of_two_sizes_share_planes_without_touching_each_other(kind: str) -> None:
    """Two layers of 2 x 8 values lie beside each other where one of 2 x 16 does in another group."""
    rope = RopeSpec((1.0,), interleaved=False)
    small, large = AttentionSpec(4, 1, 8, rope, window=4), AttentionSpec(4, 1, 16, rope)
    layers, device = {0: small, 1: large, 2: small, 3: large, 4: small}, torch.device(DEVICE)
    groups = KvGroup(0, (1, 3)), KvGroup(4, (0, 2, 4))
    caches, planes = reserve_caches(layout_of(kind, torch.float32), layers, groups, (6, 4), Arena(device))
    assert sum(plane.lines.numel() for plane in planes if plane.lines is not None) == 2 * 6 * 32 * 4
    for layer, cache in caches.items():
        assert cache.lines.shape == (6, 2, 1, 4, layers[layer].head_dim)
        for part in cache:
            if part is not None:
                part[[1, 4] if layers[layer].window else [0, 2]] = layer + 1
    copy_blocks(planes, torch.tensor([1, 2], device=device), torch.tensor([5, 3], device=device))
    for layer, cache in caches.items():
        for part in cache:
            if part is not None:
                assert (part[[1, 4, 5] if layers[layer].window else [0, 2, 3]] == layer + 1).all()

"""A deterministic backend computes a token alike in every batch: by the same kernels and tilings, to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from penstock.backend.base import Batch, Pool
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend, quantized_weights, segments, weights
from penstock.backend.cuda.device_properties import DeviceProperties
from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.graphs import common_shapes, in_segments, padded
from penstock.backend.cuda.inputs import Shape, runs_of
from penstock.backend.cuda.kernels.kv_tile import SplitKV
from penstock.backend.cuda.kernels.segmented_attention import segmented_attention
from penstock.backend.cuda.kernels.split_k import MAX_PARTIALS, row_blocks
from penstock.backend.cuda.pooling import PoolingSums
from penstock.backend.cuda.segments import MOST_SPLITS, SEGMENT, most_splits, plan_segments, split_at_segments
from penstock.backend.ref import RefBackend
from penstock.backend.ref.cases import difference
from penstock.backend.ref.random_steps import blocks_for, random_steps
from penstock.engine.assemble import assemble
from penstock.model.load import load_model, open_checkpoint
from penstock.planning.memory_plan import all_states
from penstock.types import Limits, Request, SamplingParams, Tokens
from tests.cuda.device import DEVICE, HALF, TILINGS, close, ints, normal
from tests.cuda.small import LARGE_HEADS, load_small
from tests.cuda.test_adapters import ALL, LARGE, SOME, Small, small
from tests.cuda.test_backend import GOLDENS, NAMES, SLOTS, expected, loaded
from tests.cuda.test_encoders import ENCODERS, pooled
from tests.engine.guesses import RandomDrafting
from tests.engine.test_device_properties import GPUS, H200, RTX_4090

BLOCK_SIZE = 4
CLASSIFIERS = ENCODERS.parent / "classifiers"
COUNTS = 1, 2, 17, 64, 300
PROMPTS = [[(7 * at + 3 * seed) % 40 for at in range(length)] for seed, length in enumerate((17, 2, 6))]


FIXED = Tilings(H200, fixed=True)


class Kind(NamedTuple):
    """Names a model and how it is computed."""

    model: str  # a golden, or a format of weights of the small one
    dtype: torch.dtype = HALF
    quantize: str = ""
    kv: str = "auto"

    def backend(self, **options: Any) -> CudaBackend:
        made = CudaBackend(512, 300, device=DEVICE, dtype=self.dtype, quantize=self.quantize, kv=self.kv, **options)
        if (GOLDENS / self.model).exists():
            return loaded(self.model, made)
        return load_small(made, self.model, spec=LARGE_HEADS if "int4" in self.kv else None)


KINDS = {
    "plain": Kind("F32", torch.float32),
    "16 bits": Kind("F32"),
    "int4": Kind("F32", quantize="int4"),
    "Q4_K": Kind("Q4_K"),
    "int8 KV": Kind("F32", torch.float32, kv="int8"),
    "fp8": Kind("F32", quantize="fp8"),
    "keys and values apart": Kind("F32", torch.float32, kv="int8:int4"),
    "experts": Kind("mixtral", torch.float32),
    "sinks": Kind("gpt_oss", torch.float32),
    "int4 KV": Kind("F32", torch.float32, kv="int4"),
    "caps": Kind("gemma2", torch.float32),
    "chunks": Kind("llama4", torch.float32),
    "MLA": Kind("deepseek_v3", torch.float32),
    "sparse attention": Kind("deepseek_v32", torch.float32),
    "delta net": Kind("qwen3next", torch.float32),
    "delta net by channels": Kind("kimi_linear", torch.float32),
    "Mamba2": Kind("granitemoehybrid", torch.float32),
    "Mamba": Kind("jamba", torch.float32),
    "short convolutions": Kind("lfm2", torch.float32),
    "MLA, int8 KV": Kind("glm4_moe_lite", torch.float32, kv="int8"),
}


# -- launches --------------------------------------------------------------------------------------------------------


def specialized(value: Any) -> str:
    """Returns what Triton compiles a kernel for, of an argument that is no constant: it has another kernel for 1, for
    multiples of 16 and for addresses that are."""
    if isinstance(value, tuple):
        return str([specialized(each) for each in value])
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.data_ptr() % 16 == 0}"
    return f"{value == 1} {value % 16 == 0}" if isinstance(value, int) else type(value).__name__


def launches(run: Callable[[], Any], patch: pytest.MonkeyPatch) -> set[str]:
    """Returns every kernel that is launched with all that it is compiled for, and all products by libraries. Nothing is
    computed."""
    found: set[str] = set()

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        free = self.kwargs["do_not_specialize"] or ()
        named = zip(self.arg_names, args, strict=False)
        kinds = [(name, specialized(each)) for name, each in named if name not in free]
        found.add(f"{self.fn.__name__} {kinds} {sorted(constants.items())}")

    with patch.context() as within:
        within.setattr(InterpretedFunction, "run", note)
        for module in (weights, quantized_weights):
            within.setattr(module, "cublas_gemm", lambda *_: found.add("cublas"))
        for name in ("mm", "bmm", "matmul", "addmm", "einsum", "_scaled_mm"):
            within.setattr(torch, name, lambda *_, **__: found.add("cublas"))
        run()
    return found


def adapted(**options: Any) -> Small:
    """Returns a small model that takes adapters, on a deterministic backend."""
    return small(CudaBackend(512, 300, device=DEVICE, dtype=HALF, deterministic=True, **options))


def steps_of(rows: int) -> list[Any]:
    """Returns a step in which so many rows decode, and one with a prompt of so many tokens."""
    decode = [Chunk([1], 5, [row], row, 1) for row in range(rows)]
    return [greedy_batch(decode), greedy_batch([Chunk([1] * rows, 0, range(-(-rows // 16)), 0, 1)])]


@pytest.mark.skipif(DEVICE == "cuda", reason="launches are noted in the interpreter")
@pytest.mark.parametrize("kind", KINDS)
def test_launches_are_the_same_at_every_number_of_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, usual = (KINDS[kind].backend(tilings=tilings) for tilings in (FIXED, Tilings.of(RTX_4090)))
    for each in (backend, usual):
        each.reserve_kv(300, 16)
    wanted = launches(partial(backend.logits, steps_of(1)[0]), monkeypatch)
    assert any("_segmented_" in launch for launch in wanted)
    for rows, step in product(COUNTS, (0, 1)):
        assert launches(partial(backend.logits, steps_of(rows)[step]), monkeypatch) == wanted
    program = backend._programs[0]
    for shape in common_shapes(40, 256, 128, *program.program.split_sizes):
        rehearsal = partial(backend._preparation.rehearse, program, backend._steps.shape_for(program, shape))
        assert launches(rehearsal, monkeypatch) == wanted
    assert not any("cublas" in launch or "hopper" in launch for launch in wanted)
    assert len({frozenset(launches(partial(usual.logits, steps_of(rows)[0]), monkeypatch)) for rows in COUNTS}) > 1


@pytest.mark.skipif(DEVICE == "cuda", reason="launches are noted in the interpreter")
@pytest.mark.parametrize("name", NAMES)
def test_no_launch_of_any_family_depends_on_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Kind(name, torch.float32).backend(tilings=FIXED)
    backend.reserve_kv(300, 16)
    steps = [step for rows in (1, 64, 300) for step in steps_of(rows)]
    first, *others = [launches(partial(backend.logits, step), monkeypatch) for step in steps]
    assert all(each == first for each in others)
    assert "cublas" not in first


@pytest.mark.skipif(DEVICE == "cuda", reason="launches are noted in the interpreter")
@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_launches_of_an_encoder_are_the_same_for_every_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CudaBackend(512, 300, device=DEVICE, dtype=torch.float32, tilings=FIXED)
    backend.load(load_model(open_checkpoint(ENCODERS / name), backend))
    backend.reserve_kv(40, 16)
    texts = [[1], [1, 64], [17, 3, 48], [60] * 8]
    found = []
    for counts in texts:
        chunks = [Chunk([1] * count, 0, range(4 * row, 4 * row + 4), row) for row, count in enumerate(counts)]
        pools = tuple(Pool(row, 0, count, True, count) for row, count in enumerate(counts))
        found.append(launches(partial(backend.launch, replace(greedy_batch(chunks), pools=pools)), monkeypatch))
    assert all(each == found[0] for each in found)
    assert any("_segmented_attention" in launch for launch in found[0])


@pytest.mark.skipif(DEVICE == "cuda", reason="launches are noted in the interpreter")
@pytest.mark.parametrize("quantize", ["", "fp8"])
def test_launches_do_not_depend_on_other_adapters(quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(quantize=quantize, tilings=FIXED)
    model.backend.reserve_kv(300, 16)
    model.load(3, SOME)
    batches = [
        replace(step, adapters=np.array([3, -1, 40] * 100, np.int32)[: len(step.slots)])
        for rows in COUNTS
        for step in steps_of(rows)
    ]
    before = launches(partial(model.backend.logits, batches[0]), monkeypatch)
    assert {"_shrink", "_expand"} <= {launch.split()[0] for launch in before}
    model.load(40, LARGE, ALL)  # which changes more weights, and has blocks that are not aligned
    first, *others = [launches(partial(model.backend.logits, batch), monkeypatch) for batch in batches]
    assert all(each == first for each in others)
    assert first >= before


def test_tilings_that_are_fixed_do_not_depend_on_rows_and_fit() -> None:
    for device, rows, width in product(GPUS, (16, 4096, 28672, 128256), (64, 576, 4096, 14336)):
        tilings = Tilings(device, fixed=True)
        for kernel in ("quant_gemm", "fp8_gemm", "fp8_block_gemm"):
            assert len({getattr(tilings, kernel)(count, rows, width) for count in COUNTS}) == 1
        tiling = tilings.fixed_gemm(rows, width, 2)
        assert tiling.stages * (tiling.rows + tiling.items) * tiling.width * 2 <= device.shared_memory
        for count in (0, *COUNTS, 8192):
            parts = list(row_blocks(count, rows, tiling.split, tiling.items))
            assert [at for part in parts for at in range(part.start, part.stop)] == list(range(count))
            most = max([part.stop - part.start for part in parts], default=0)
            assert tiling.split == 1 or tiling.split * most * rows <= MAX_PARTIALS


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
def test_segments_consist_of_whole_tiles(device: DeviceProperties) -> None:
    for dims, queries, itemsize in product((64, 80, 128, 256), (16, 64, 128), (2, 4)):
        tiling = Tilings(device, fixed=True).segmented_attention(dims, itemsize, queries)
        assert SEGMENT % tiling.tile == 0
        assert SEGMENT % Tilings(device, fixed=True).segmented_mla(dims, itemsize).positions == 0


# -- bits ------------------------------------------------------------------------------------------------------------


def differs(
    backend: CudaBackend,
    prompts: Sequence[Sequence[int]],
    adapters: Sequence[int] = (),
    come: Callable[[], Any] = lambda: None,
) -> bool:
    """Returns whether some logits of the first prompt, computed in random chunks among others, are not those that it
    has alone and in one step, before others `come`. Prompts may have `adapters`."""

    def step(chunks: Sequence[Chunk]) -> Batch:
        slots = [adapters[chunk.slot] for chunk in chunks] if adapters else []
        return replace(greedy_batch(chunks), adapters=np.array(slots, np.int32))

    blocks = blocks_for(prompts, BLOCK_SIZE)
    backend.reserve_kv(blocks + 16, BLOCK_SIZE, SLOTS)
    alone = backend.logits(step([Chunk(prompts[0], 0, range(16))]))
    come()
    for longest in (5, 30):
        for chunks in random_steps(np.random.default_rng(longest), prompts, BLOCK_SIZE, longest):
            got, (first, *_) = backend.logits(step(chunks)), chunks
            wanted = alone[first.start : first.start + len(first.tokens)]
            if first.slot == 0 and not np.array_equal(got[: len(wanted)], wanted):
                return True
    return False


@pytest.mark.usefixtures("ordered_sums")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sparse attention"])  # which takes long
def test_a_token_is_bitwise_the_same_in_any_batch_and_chunking(kind: str) -> None:
    assert not differs(KINDS[kind].backend(deterministic=True), PROMPTS)


@pytest.mark.usefixtures("ordered_sums")
def test_without_the_flag_it_is_not() -> None:
    assert differs(KINDS["plain"].backend(), PROMPTS)


@pytest.mark.usefixtures("ordered_sums")
@pytest.mark.parametrize("own", [3, -1], ids=["with an adapter", "without"])
@pytest.mark.parametrize("quantize", ["", "fp8"])
def test_a_token_is_bitwise_the_same_beside_any_adapters(own: int, quantize: str) -> None:
    """Others come later, are larger and do not fill tiles: what all adapters share then changes."""
    model, prompts = adapted(quantize=quantize), [PROMPTS[0][:9], PROMPTS[2]]
    model.load(3, SOME)
    assert not differs(model.backend, prompts, (own, 40), lambda: model.load(40, LARGE))


@pytest.mark.usefixtures("ordered_sums")
@pytest.mark.parametrize("kind", ["plain", "MLA", "delta net", "Mamba2"])
def test_answers_are_the_same_with_drafts_in_company_and_from_cached_prefixes(kind: str) -> None:
    backend = KINDS[kind].backend(deterministic=True)
    seeded = SamplingParams(temperature=0.9, seed=5, logprobs=2)
    request = Request(0, tuple(PROMPTS[0][:9]), seeded, 4)

    def told(requests: Sequence[Request], step_tokens: int, drafting: Any = None) -> tuple[list[Any], int]:
        states = 4 if backend.memory_needs().state_bytes else 0
        limits = Limits(40, 2, step_tokens, BLOCK_SIZE, num_blocks=16, vocab=40, states=states)
        backend.reserve_kv(limits.num_blocks, BLOCK_SIZE, all_states(limits))
        engine, events = assemble(backend, limits, depth=1, drafting=drafting), list[Any]()
        for each in requests:
            engine.add(each)
        while not engine.idle:
            events += engine.step()
        said = [each for event in events if isinstance(event, Tokens) and event.seq == 0 for each in event.logprobs]
        return said, engine.stats().cached_tokens

    alone, _ = told([request], 24)
    drafting = RandomDrafting(lambda _: [each.token for each in alone], 40, Random(3))
    said, cached = told([request._replace(id=1), request], 7, drafting)
    assert said == alone
    assert cached > 0


@pytest.mark.usefixtures("ordered_sums")
@pytest.mark.parametrize("name", ["bert", "mpnet", "modernbert"])
def test_a_text_has_the_same_embedding_beside_others(name: str) -> None:
    path, rng = ENCODERS / name if (ENCODERS / name).exists() else CLASSIFIERS / name, np.random.default_rng(3)
    texts = [rng.integers(5, 60, count).tolist() for count in (33, 6, 50)]
    alone, together = (
        pooled(CudaBackend(128, 8, device=DEVICE, dtype=torch.float32, deterministic=True), path, some, "mean")
        for some in (texts[:1], [texts[1], texts[0], texts[2]])
    )
    assert np.array_equal(alone[0], together[1])
    assert difference(alone, pooled(RefBackend(), path, texts[:1], "mean")) < 1e-5


@pytest.mark.parametrize("name", ["llama3", "deepseek_v3", "qwen3next", "granitemoehybrid", "jamba", "lfm2"])
def test_logits_are_those_of_transformers(name: str) -> None:
    tokens, logits = expected(name)
    backend = KINDS["plain"]._replace(model=name).backend(deterministic=True)
    backend.reserve_kv(64, BLOCK_SIZE, SLOTS)
    got = backend.logits(greedy_batch([Chunk(tokens[:20], 0, range(64))]))
    assert np.abs(got - logits[:20]).max() < 2e-4


# -- attention -------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, DIMS, LENGTH, TOKENS = 4, 2, 16, 1200, 3


def attended(splits: Any, qkv: Any, cache: Any, window: int) -> torch.Tensor:
    out = torch.full((len(qkv), HEADS * DIMS), 7.0, device=DEVICE)
    lines = MOST_SPLITS * TOKENS * HEADS
    sizes = lines * DIMS, lines * 2
    split_kv = SplitKV(*(torch.empty(size, device=DEVICE) for size in sizes), ints([0] * lines))
    tables, header = ints(range(LENGTH // 16)), ints([LENGTH // 16, 0, 0, 0])
    tiling = TILINGS.segmented_attention(DIMS, 4, 16)
    places = ints(splits), ints(range(LENGTH - TOKENS, LENGTH)), tables, header, out, split_kv
    segmented_attention(qkv, cache, *places, DIMS**-0.5, window, run=TOKENS, tiling=tiling)
    assert not split_kv.arrived.any()
    return out


@pytest.mark.usefixtures("ordered_sums")
@pytest.mark.parametrize("window", [0, 300])
def test_a_context_is_bitwise_the_same_whole_split_and_in_a_run(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest tokens attend as a run whose context is split, each alone, and each alone in one program."""
    qkv = normal(TOKENS, (HEADS + 2 * KV_HEADS) * DIMS)
    cache = normal(LENGTH // 16, 2, KV_HEADS, 16, DIMS, seed=1)
    first = LENGTH - TOKENS
    batch = greedy_batch([Chunk([1] * TOKENS, first, range(LENGTH // 16))])
    split = [plan_segments(batch, run, lambda shape: shape).splits for run in (TOKENS, 1)]
    monkeypatch.setattr(segments, "MOST_SPLITS", 0)
    whole = plan_segments(batch, 1, lambda shape: shape).splits
    assert [len(each) for each in (*split, whole)] == [3, 9, 3]
    runs, alone, unsplit = (attended(each, qkv, cache, window) for each in (*split, whole))
    assert torch.equal(runs, alone)
    assert torch.equal(runs, unsplit)
    keys, values = (cache[:, part].transpose(1, 2).reshape(LENGTH, KV_HEADS, DIMS) for part in (0, 1))
    for token in range(TOKENS):
        seen = slice(max(first + token + 1 - window, 0) if window else 0, first + token + 1)
        q = qkv[token, : HEADS * DIMS].view(KV_HEADS, HEADS // KV_HEADS, DIMS)
        weights = torch.einsum("hgd,thd->hgt", q, keys[seen]).mul(DIMS**-0.5).softmax(-1)
        assert close(runs[token], torch.einsum("hgt,thd->hgd", weights, values[seen]).reshape(-1))


# -- plans and shapes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[1], [SEGMENT], [SEGMENT + 1, 3], [70_000], [9_000] * 20, [600] * 200])
def test_splits_are_segments_or_whole_contexts(lengths: list[int]) -> None:
    counts = np.arange(len(lengths), dtype=np.int32)
    splits = split_at_segments(counts, counts, np.array(lengths, np.int32), np.ones_like(counts))
    assert len(splits) <= max(MOST_SPLITS, len(lengths))
    for row, length in enumerate(lengths):
        mine = splits[splits[:, 1] == row]
        assert mine[:, 5].tolist() == [len(mine)] * len(mine)
        assert mine[0, 6] + len(mine) <= MOST_SPLITS or len(mine) == 1
        assert len(mine) == 1 or mine[:, 2].tolist() == list(range(0, length, SEGMENT))
        assert mine[:, 3].tolist() == [*mine[1:, 2].tolist(), length]


@pytest.mark.parametrize("run", [1, 4, 16])
def test_a_padded_step_has_room_for_every_batch_of_its_shape(run: int) -> None:
    rng = np.random.default_rng(run)
    for most in (1, 2, 40, 300):
        counts = rng.integers(1, most + 1, rng.integers(1, 40)).tolist()
        chunks = [Chunk([1] * count, 0, [0], row, 1) for row, count in enumerate(counts)]
        adapters = rng.integers(-1, 3, len(counts)).astype(np.int32)
        batch = replace(greedy_batch(chunks), adapters=adapters)
        plan = plan_segments(batch, run, padded)
        assert len(plan.adapters.tiles) <= plan.shape.adapter_tiles <= plan.shape.tokens
        runs = len(runs_of(batch, np.arange(len(counts), dtype=np.int32), run)[0])
        assert runs <= len(plan.splits) <= plan.shape.splits
        assert sum(counts) <= plan.shape.tokens
        assert len(counts) <= min(plan.shape.decodes, plan.shape.sampled)
        assert padded(plan.shape) == plan.shape


def test_shapes_that_are_made_ready_are_those_of_steps() -> None:
    decode = Shape(40, 40, 40, 104, 0)
    assert in_segments(decode, 16) == Shape(40, 40, 40, most_splits(40, 40, 16), 0, run=16, segmented=True)
    mixed = in_segments(Shape(384, 64, 64, 128, 64), 16)
    assert mixed == Shape(384, 64, 64, most_splits(384, 64, 16), 0, run=16, segmented=True)


# -- what else depends on nothing but the request ---------------------------------------------------------------------


def test_kv_of_another_engine_is_not_taken_for_its_own() -> None:
    backends = [KINDS["plain"].backend(deterministic=flag) for flag in (False, True)]
    assert len({each.kv.fingerprint() for each in backends}) == 2
    assert len({each.states.fingerprint() for each in backends}) == 2


def test_logprobs_of_alternatives_are_summed_up_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, summed, sum_up = KINDS["plain"].backend(deterministic=True), [], torch.logsumexp
    backend.reserve_kv(8, BLOCK_SIZE)
    batch = greedy_batch([Chunk([1 + row], 0, [row], row, 1) for row in range(3)])
    batch = replace(batch, sample=replace(batch.sample, logprobs=np.full(3, 2, np.int32)))
    monkeypatch.setattr(torch, "logsumexp", lambda x, *args, **how: (summed.append(len(x)), sum_up(x, *args, **how))[1])
    assert len(backend.wait(backend.launch(batch)).rows) == 3
    assert summed == [1, 1, 1]


def test_means_of_states_do_not_depend_on_chunks() -> None:
    rng, sums = np.random.default_rng(0), PoolingSums(1, in_order=True)
    states = torch.from_numpy(rng.normal(size=(33, 8)).astype(np.float32)).to(DEVICE, HALF)
    means = []
    for size in (33, 10, 1):
        for first in range(0, 33, size):
            last = min(first + size, 33)
            pool = Pool(0, 0, last - first, first == 0, 33 if last == 33 else 0)
            batch = replace(greedy_batch([Chunk([1], 0, [0])]), pools=(pool,))
            found = sums.take(batch, states[first:last])
        means.append(found[0])
    assert torch.equal(means[0], means[1])
    assert torch.equal(means[0], means[2])

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

from penstock.backend import open_cuda
from penstock.backend.base import Pool
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
from penstock.backend.ref.random_steps import blocks_for, random_steps
from penstock.config import Config, Device
from penstock.engine.engine import Engine
from penstock.errors import AdapterError, ConfigError
from penstock.model.load import load_model, open_checkpoint
from penstock.types import Limits, Request, SamplingParams, Tokens
from tests.cuda.device import DEVICE, HALF, TILINGS, close, ints, normal
from tests.cuda.small import load_small
from tests.cuda.test_backend import GOLDENS, SLOTS, expected, loaded
from tests.cuda.test_encoders import ENCODERS
from tests.engine.guesses import RandomDrafting
from tests.engine.test_device_properties import GPUS, H200, RTX_4090

BLOCK_SIZE = 4
COUNTS = 1, 2, 17, 64, 300
PROMPTS = [[(7 * at + 3 * seed) % 40 for at in range(length)] for seed, length in enumerate((17, 2, 6))]


class Kind(NamedTuple):
    """Names a model and how it is computed."""

    model: str  # a golden, or a format of weights of the small one
    dtype: torch.dtype = HALF
    quantize: str = ""
    kv: str = "auto"

    def backend(self, **options: Any) -> CudaBackend:
        made = CudaBackend(
            512, 300, device=DEVICE, dtype=self.dtype, quantize=self.quantize, kv=self.kv, graphs=False, **options
        )
        return loaded(self.model, made) if (GOLDENS / self.model).exists() else load_small(made, self.model)


KINDS = {
    "plain": Kind("F32", torch.float32),
    "16 bits": Kind("F32"),
    "int4": Kind("F32", quantize="int4"),
    "Q4_K": Kind("Q4_K"),
    "int8 KV": Kind("F32", torch.float32, kv="int8"),
    "fp8": Kind("F32", quantize="fp8"),
    "experts": Kind("mixtral", torch.float32),
    "sinks": Kind("gpt_oss", torch.float32),
    "caps": Kind("gemma2", torch.float32),
    "chunks": Kind("llama4", torch.float32),
}


# -- launches --------------------------------------------------------------------------------------------------------


def launches(run: Callable[[], Any], patch: pytest.MonkeyPatch) -> set[str]:
    """Returns every kernel that is launched with its constants, and all calls of cuBLAS. Nothing is computed."""
    found: set[str] = set()

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        found.add(f"{self.fn.__name__} {sorted(constants.items())}")

    with patch.context() as within:
        within.setattr(InterpretedFunction, "run", note)
        for module in (weights, quantized_weights):
            within.setattr(module, "cublas_gemm", lambda *_: found.add("cublas"))
        run()
    return found


def steps_of(rows: int) -> list[Any]:
    """Returns a step in which so many rows decode, and one with a prompt of so many tokens."""
    decode = [Chunk([1], 5, [row], row, 1) for row in range(rows)]
    return [greedy_batch(decode), greedy_batch([Chunk([1] * rows, 0, range(-(-rows // 16)), 0, 1)])]


@pytest.mark.skipif(DEVICE == "cuda", reason="launches are noted in the interpreter")
@pytest.mark.parametrize("kind", ["16 bits", "fp8", "int4", "Q4_K", "int8 KV", "experts"])
def test_launches_are_the_same_at_every_number_of_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, usual = (KINDS[kind].backend(properties=gpu, deterministic=gpu is H200) for gpu in (H200, RTX_4090))
    for each in (backend, usual):
        each.reserve_kv(300, 16)
    wanted = launches(partial(backend.logits, steps_of(1)[0]), monkeypatch)
    assert any("_segmented_attention" in launch for launch in wanted)
    for rows, step in product(COUNTS, (0, 1)):
        assert launches(partial(backend.logits, steps_of(rows)[step]), monkeypatch) == wanted
    program = backend._programs[0]
    for shape in common_shapes(40, 256, 128, program.program.run_sizes):
        rehearsal = partial(backend._rehearse, program, backend._shape_for(program, shape))
        assert launches(rehearsal, monkeypatch) == wanted
    assert not any("cublas" in launch or "hopper" in launch for launch in wanted)
    assert len({frozenset(launches(partial(usual.logits, steps_of(rows)[0]), monkeypatch)) for rows in COUNTS}) > 1


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


# -- bits ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def _alike_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the interpreter add up every element of a product in one order, as tensor cores do. What BLAS does depends
    on where in a matrix an element is."""

    def product(a: Any, b: Any, dtype: Any) -> Any:
        return np.add.reduce(a.astype(dtype)[..., :, :, None] * b.astype(dtype)[..., None, :, :], axis=-2)

    if DEVICE == "cpu":
        monkeypatch.setattr(np, "matmul", product)


def differs(backend: CudaBackend, prompts: Sequence[Sequence[int]]) -> bool:
    """Returns whether some logits of the first prompt, computed in random chunks among others, are not those that it
    has alone and in one step."""
    blocks = blocks_for(prompts, BLOCK_SIZE)
    backend.reserve_kv(blocks + 16, BLOCK_SIZE, SLOTS)
    alone = backend.logits(greedy_batch([Chunk(prompts[0], 0, range(16))]))
    for longest in (5, 30):
        for chunks in random_steps(np.random.default_rng(longest), prompts, BLOCK_SIZE, longest):
            got, (first, *_) = backend.logits(greedy_batch(chunks)), chunks
            wanted = alone[first.start : first.start + len(first.tokens)]
            if first.slot == 0 and not np.array_equal(got[: len(wanted)], wanted):
                return True
    return False


@pytest.mark.usefixtures("_alike_everywhere")
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_bitwise_the_same_in_any_batch_and_chunking(kind: str) -> None:
    assert not differs(KINDS[kind].backend(deterministic=True), PROMPTS)


@pytest.mark.usefixtures("_alike_everywhere")
def test_without_the_flag_it_is_not() -> None:
    assert differs(KINDS["plain"].backend(), PROMPTS)


@pytest.mark.usefixtures("_alike_everywhere")
def test_answers_are_the_same_with_drafts_in_company_and_from_cached_prefixes() -> None:
    backend = KINDS["plain"].backend(deterministic=True)
    seeded = SamplingParams(temperature=0.9, seed=5, logprobs=2)
    request = Request(0, tuple(PROMPTS[0][:9]), seeded, 4)

    def told(requests: Sequence[Request], step_tokens: int, drafting: Any = None) -> list[Any]:
        limits = Limits(40, 2, step_tokens, BLOCK_SIZE, num_blocks=16, vocab=40)
        backend.reserve_kv(limits.num_blocks, BLOCK_SIZE)
        engine, events = Engine(backend, limits, depth=1, drafting=drafting), list[Any]()
        for each in requests:
            engine.add(each)
        while not engine.idle:
            events += engine.step()
        return [each for event in events if isinstance(event, Tokens) and event.seq == 0 for each in event.logprobs]

    alone = told([request], 24)
    drafting = RandomDrafting(lambda _: [each.token for each in alone], 40, Random(3))
    assert told([request._replace(id=1), request], 7, drafting) == alone


def test_logits_are_those_of_transformers() -> None:
    tokens, logits = expected("llama3")
    backend = KINDS["plain"]._replace(model="llama3").backend(deterministic=True)
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
    places = ints(splits), tables, header, out, split_kv
    segmented_attention(qkv, cache, *places, DIMS**-0.5, window, run=TOKENS, tiling=tiling)
    assert not split_kv.arrived.any()
    return out


@pytest.mark.usefixtures("_alike_everywhere")
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
        batch = greedy_batch(chunks)
        plan = plan_segments(batch, run, padded)
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


# -- what is refused -------------------------------------------------------------------------------------------------


REFUSED = {"deepseek_v3": "MLA", "deepseek_v32": "sparse"} | dict.fromkeys(("qwen3next", "bamba", "lfm2"), "recurrent")


@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_sums_depend_on_chunks_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"deterministic.*{REFUSED[name]}.*device cpu"):
        Kind(name, torch.float32).backend(deterministic=True)


def test_encoders_are_refused() -> None:
    backend = CudaBackend(64, 4, device=DEVICE, dtype=torch.float32, deterministic=True)
    with pytest.raises(ConfigError, match=r"deterministic.*not causal"):
        backend.load(load_model(open_checkpoint(ENCODERS / "bert"), backend))


@pytest.mark.parametrize("kv", ["int4", "int8:int4"])
def test_caches_of_two_sides_are_refused(kv: str) -> None:
    with pytest.raises(ConfigError, match=rf"deterministic.*--kv {kv}.*int8 or fp8"):
        CudaBackend(64, 8, device=DEVICE, dtype=torch.bfloat16, kv=kv, deterministic=True)


def test_adapters_are_refused() -> None:
    backend = KINDS["plain"].backend(deterministic=True)
    with pytest.raises(AdapterError, match="--deterministic"):
        backend.adapters.pack([])
    with pytest.raises(ConfigError, match="--deterministic"):
        open_cuda(Config(model="m", adapter=("a=b",), deterministic=True), Device("cuda"))


def test_kv_of_another_engine_is_not_taken_for_its_own() -> None:
    marks = {KINDS["plain"].backend(deterministic=flag).kv.fingerprint() for flag in (False, True)}
    assert len(marks) == 2


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

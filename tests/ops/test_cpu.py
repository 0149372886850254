"""The native CPU backend: every op against the reference on every instruction set, the same answer in any batch, and
a refusal of everything malformed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.base import LAST_SAMPLED, Batch
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.blocks.kv_file import KvFile
from penstock.backend.cpu import CpuBackend
from penstock.backend.cpu._native import Program, Weight, isas
from penstock.backend.ref import RefBackend
from penstock.backend.ref.cases import BYTE, CASES, EXACT, FLOAT, Case, attend, attention, difference, run
from penstock.backend.ref.ops import RefOps
from penstock.backend.ref.random_steps import blocks_for, random_steps
from penstock.errors import ConfigError
from penstock.model.dequantize import dequantize
from penstock.model.families.llama import build
from penstock.model.random_tensor import random_tensor
from penstock.model.spec import AttentionSpec, KvGroup, ModelSpec
from penstock.model.tensor import AFFINE, FORMATS, STORAGE

MIXED = ("Q4_0", "Q4_1", "Q8_0", "F16", "BF16", "Q5_1", "F32", "MXFP4")
EXACT_ATTENTION = [case for case in CASES if "attend" in case.op and case.format == "F32"]
SPEC = ModelSpec(
    arch="llama",
    layers=2,
    dim=96,
    hidden=160,
    vocab=83,
    max_len=512,
    eps=1e-5,
    attn=attention(6, 2, 16, interleaved=True),
)


class RandomPacker:
    """Random tensors in place of a checkpoint's, in formats that change from part to part."""

    def __init__(self, backend: Any, formats: Sequence[str], seed: int = 0) -> None:
        self._backend = backend
        self._formats = formats
        self._rng = np.random.default_rng(seed)
        self._made = 0

    def vector(self, name: str, size: int, plus: float = 0.0) -> Any:
        return self._backend.pack_vector(random_tensor(self._rng, "F32", size))

    def matrix(self, *parts: tuple[str, int], width: int) -> Any:
        tensors = [random_tensor(self._rng, self._next_format(), rows, width) for _, rows in parts]
        return self._backend.pack_matrix(tensors, [None] * len(parts))

    def _next_format(self) -> str:
        self._made += 1
        return self._formats[self._made % len(self._formats)]


def loaded(backend: Any, formats: Sequence[str] = MIXED, spec: ModelSpec = SPEC) -> Any:
    backend.load(build(spec, RandomPacker(backend, formats)))
    return backend


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(SPEC.vocab, size=length).tolist()


def logits_alone(backend: Any, tokens: list[int], block_size: int) -> np.ndarray:
    blocks = blocks_for([tokens], block_size)
    backend.reserve_kv(blocks, block_size)
    return backend.logits(greedy_batch([Chunk(tokens, 0, range(blocks))]))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}: {case.name}")
def test_op_follows_the_reference(case: Case, isa: str):
    wanted = run(case.make(np.random.default_rng(9)), RefBackend())
    got = run(case.make(np.random.default_rng(9)), CpuBackend(2, isa=isa))
    assert max(map(difference, got, wanted)) <= case.tolerance


def to_eight_bits(x: np.ndarray, share: int = 32) -> np.ndarray:
    """What a quantized weight is multiplied with: 32 values share a scale, the largest of them is 127 of it."""
    blocks = x.reshape(-1, share)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    codes = np.rint(blocks * np.divide(127, largest, out=np.zeros_like(largest), where=largest > 0))
    return (codes * (largest / 127)).reshape(x.shape)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("seed", [7, 11])
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.op == "linear" and STORAGE[case.format].values > 1],
    ids=lambda case: case.name,
)
def test_quantized_products_lose_nothing_but_the_activations_rounding(
    case: Case, seed: int, isa: str, monkeypatch: pytest.MonkeyPatch
):
    got = run(case.make(np.random.default_rng(seed)), CpuBackend(2, isa=isa))
    exact = RefOps.linear
    monkeypatch.setattr(RefOps, "linear", lambda ops, x, weight, precision="": exact(ops, to_eight_bits(x), weight))
    wanted = run(case.make(np.random.default_rng(seed)), RefBackend())
    assert max(map(difference, got, wanted)) <= FLOAT


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("format", [name for name in (*FORMATS, *AFFINE) if STORAGE[name].values > 1])
def test_sampled_rows_are_rounded_within_the_range_of_each_block(format: str, isa: str):
    rng = np.random.default_rng(5)
    weight, table = random_tensor(rng, format, 49, 512), random_tensor(rng, "F32", 7, 512)

    class Head:
        def __init__(self, backend: Any) -> None:
            self.weight, self.table = (backend.pack_matrix([t], [None]) for t in (weight, table))

        def forward(self, ops: Any) -> Any:
            return ops.linear(ops.take_sampled(ops.embed(self.table)), self.weight)

    backend = CpuBackend(2, isa=isa)
    backend.load(Head(backend))
    blocks = dequantize(table).reshape(-1, 32)
    middles = (blocks.min(axis=1, keepdims=True) + blocks.max(axis=1, keepdims=True)) / 2
    rounded = (to_eight_bits(blocks - middles) + middles).reshape(7, 512)
    for rows in (1, 3, 7):
        got = backend.logits(greedy_batch([Chunk(range(rows), 0, [0], sample=rows)]))
        assert difference(got, rounded[:rows] @ dequantize(weight).T) <= FLOAT


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("case", EXACT_ATTENTION, ids=lambda case: f"{case.op}: {case.name}")
def test_attention_over_f32_kv_is_exact_to_rounding(case: Case, isa: str):
    wanted = run(case.make(np.random.default_rng(8)), RefBackend())
    got = run(case.make(np.random.default_rng(8)), CpuBackend(2, isa=isa, kv="f32"))
    assert max(map(difference, got, wanted)) <= FLOAT


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("case", EXACT_ATTENTION, ids=lambda case: f"{case.op}: {case.name}")
def test_attention_over_int8_kv_loses_nothing_but_its_rounding(case: Case, isa: str):
    got = run(case.make(np.random.default_rng(8)), CpuBackend(2, isa=isa, kv="int8"))
    wanted = run(case.make(np.random.default_rng(8)), RefBackend("int8"))
    assert max(map(difference, got, wanted)) <= FLOAT


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kv", ["int4", "int8:int4", "int4:f16"])
@pytest.mark.parametrize(
    ("spec", "lengths", "longest"),
    [
        (attention(9, 3, 64, interleaved=True), (17, 70), 16),
        (attention(2, 1, 96, interleaved=False, q_gain=True), (5, 64), 16),  # three runs of the Hadamard transform
        (attention(3, 1, 32, interleaved=False, window=7), (20,), 1),
    ],
)
def test_attention_over_4_bits_computes_what_the_reference_defines(
    spec: AttentionSpec, lengths: Sequence[int], longest: int, kv: str, isa: str
):
    make = partial(attend, spec=spec, lengths=lengths, longest=longest)
    got = run(make(np.random.default_rng(8)), CpuBackend(2, isa=isa, kv=kv))
    wanted = run(make(np.random.default_rng(8)), RefBackend(kv))
    assert max(map(difference, got, wanted)) <= FLOAT
    assert max(map(difference, got, run(make(np.random.default_rng(8)), RefBackend()))) > 10 * FLOAT


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("format", [*FORMATS, *AFFINE])
@pytest.mark.parametrize("rows", [2, 3, 7, 8, 9, 65, 130])
def test_products_of_many_rows_equal_those_of_one(format: str, rows: int, isa: str):
    """The loops for several rows at a time must add up in the order of the one for a single row."""
    rng = np.random.default_rng(rows)
    weight, inputs = random_tensor(rng, format, 49, 1024), random_tensor(rng, "F32", rows, 1024)

    class Model:
        def __init__(self, backend: CpuBackend) -> None:
            self.weight, self.table = (backend.pack_matrix([t], [None]) for t in (weight, inputs))

        def forward(self, ops: Any) -> Any:
            return ops.take_sampled(ops.linear(ops.embed(self.table), self.weight))

    backend = CpuBackend(2, isa=isa)
    backend.load(Model(backend))
    together = backend.logits(greedy_batch([Chunk(range(rows), 0, [0])]))
    alone = [backend.logits(greedy_batch([Chunk([row], 0, [0])]))[0] for row in range(rows)]
    assert np.array_equal(together, np.stack(alone))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize(
    ("block_size", "window", "formats", "kv"),
    [
        (16, 0, MIXED, "f16"),
        (16, 20, MIXED, "int8"),
        (5, 0, MIXED, "int8"),
        (5, 20, MIXED, "int8:int4"),
        (16, 0, MIXED, "int4"),
        (48, 0, MIXED, "f32"),
        (16, 0, ("Q4_1",), "f16"),
        (16, 0, ("Q8_0",), "f16"),
    ],
)
def test_a_row_is_bitwise_the_same_in_any_batch_chunking_and_thread_count(
    isa: str, block_size: int, window: int, formats: Sequence[str], kv: str
):
    attn = attention(3, 1, 32, interleaved=True) if "int4" in kv else SPEC.attn
    spec = replace(SPEC, attn=replace(attn, window=window))
    prompts = [prompt(length, seed) for seed, length in enumerate((150, 1, 33, 17, 70))]
    alone = loaded(CpuBackend(1, isa=isa, kv=kv), formats, spec)
    wanted = [logits_alone(alone, tokens, block_size) for tokens in prompts]
    for seed, (threads, longest) in enumerate([(1, 7), (2, 40), (3, 200), (9, 1)]):
        backend = loaded(CpuBackend(threads, isa=isa, kv=kv), formats, spec)
        backend.reserve_kv(blocks_for(prompts, block_size), block_size)
        for chunks in random_steps(np.random.default_rng(seed), prompts, block_size, longest):
            parts = [wanted[chunk.slot][chunk.start : chunk.start + len(chunk.tokens)] for chunk in chunks]
            assert np.array_equal(backend.logits(greedy_batch(chunks)), np.concatenate(parts))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("name", ["multiplier", "BF16", "Q8_0"])
def test_mla_is_bitwise_the_same_in_any_chunking(isa: str, name: str):
    """Prompts are attended as answers are, in the absorbed form."""
    make = next(case.make for case in CASES if (case.op, case.name) == ("attend_mla", name))
    assert isinstance(make, partial)
    found = []
    for threads, longest in (1, 200), (2, 33), (3, 1):
        trial = partial(make, lengths=(150, 40), longest=longest)(np.random.default_rng(8))
        order = np.concatenate([batch.tokens for batch in trial.steps]).argsort()
        found.append(np.concatenate(run(trial, CpuBackend(threads, isa=isa)))[order])
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


@pytest.mark.parametrize("isa", isas())
def test_a_long_row_is_bitwise_the_same_alone_in_pieces_and_in_a_batch(isa: str):
    """Long contexts are attended in parts that several threads share out."""
    spec = replace(SPEC, max_len=2048)
    prompts = [prompt(length, seed) for seed, length in enumerate((1100, 3, 300))]
    alone = loaded(CpuBackend(1, isa=isa), spec=spec)
    wanted = [logits_alone(alone, tokens, 16) for tokens in prompts]
    backend = loaded(CpuBackend(3, isa=isa), spec=spec)
    backend.reserve_kv(blocks_for(prompts, 16), 16)
    for chunks in random_steps(np.random.default_rng(1), prompts, 16, 90):
        parts = [wanted[chunk.slot][chunk.start : chunk.start + len(chunk.tokens)] for chunk in chunks]
        assert np.array_equal(backend.logits(greedy_batch(chunks)), np.concatenate(parts))
    blocks = list(range(blocks_for(prompts[:1], 16)))
    backend.logits(greedy_batch([Chunk(prompts[0], 0, blocks)]))
    for at in (511, 512, 700, 1099):  # one token alone: in pieces
        last = greedy_batch([Chunk(prompts[0][at : at + 1], at, blocks)])
        assert np.array_equal(backend.logits(last)[0], wanted[0][at])


@pytest.mark.parametrize("isa", isas())
def test_a_model_of_many_formats_follows_the_reference(isa: str):
    """On sequences of one token: where random weights attend to several, rounding decides which."""
    chunks = [Chunk([token], 0, [token], token) for token in range(SPEC.vocab)]
    answers = []
    for backend in (CpuBackend(2, isa=isa), RefBackend()):
        loaded(backend).reserve_kv(SPEC.vocab, 16)
        answers.append(backend.logits(greedy_batch(chunks)))
    assert difference(*answers) <= BYTE


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("format", ["Q4_1", "Q8_0", "F16"])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_product_and_its_gate_at_once_give_what_they_give_apart(
    rows: int, format: str, isa: str, monkeypatch: pytest.MonkeyPatch
):
    batch = greedy_batch([Chunk(prompt(rows, 3), 0, range(3))])
    at_once, apart = (CpuBackend(2, isa=isa) for _ in range(2))
    loaded(at_once, [format]).reserve_kv(3, 16)
    monkeypatch.setattr("penstock.backend.cpu.record.fuses_gate", lambda weight, act: False)
    loaded(apart, [format]).reserve_kv(3, 16)
    assert np.array_equal(at_once.logits(batch), apart.logits(batch))


def test_large_weights_are_packed_by_several_threads():
    tensor = random_tensor(np.random.default_rng(0), "Q4_K", 16400, 256)

    class Model:
        def __init__(self, backend: Any) -> None:
            self.table = backend.pack_matrix([tensor], [None])

        def forward(self, ops: Any) -> Any:
            return ops.take_sampled(ops.embed(self.table))

    answers = []
    for backend in (CpuBackend(1), RefBackend()):
        backend.load(Model(backend))
        answers.append(backend.logits(greedy_batch([Chunk([0, 8199, 8200, 8201, 16399], 0, [0])])))
    assert difference(*answers) <= EXACT


def test_a_step_may_sample_nothing():
    backend = loaded(CpuBackend(2))
    backend.reserve_kv(4, 16)
    assert backend.logits(greedy_batch([Chunk(prompt(5, 0), 0, [0], sample=0)])).shape == (0, SPEC.vocab)
    result = backend.wait(backend.launch(greedy_batch([Chunk(prompt(5, 0), 5, [0], sample=0)], step=3)))
    assert (result.step, result.rows[0].tokens) == (3, ())


def test_sampled_tokens_stay_in_the_backend_by_slot():
    backend = loaded(CpuBackend(2))
    backend.reserve_kv(8, 16)
    prompts = {5: prompt(9, 0), 2: prompt(4, 1)}
    tables = {5: [0, 1], 2: [4, 5]}
    first = [Chunk(tokens, 0, tables[slot], slot, 1) for slot, tokens in prompts.items()]
    answered = backend.wait(backend.launch(greedy_batch(first)))
    tokens = dict(zip(prompts, (row.tokens[0] for row in answered.rows), strict=True))
    following = [Chunk([LAST_SAMPLED], len(prompts[slot]), tables[slot], slot, 1) for slot in (2, 5)]
    known = [chunk._replace(tokens=[tokens[chunk.slot]]) for chunk in following]
    assert np.array_equal(backend.logits(greedy_batch(following)), backend.logits(greedy_batch(known)))


@pytest.mark.parametrize("block_size", [16, 5])
def test_moved_blocks_hold_what_they_held(block_size: int):
    tokens = prompt(40, 4)
    blocks = blocks_for([tokens], block_size)
    backend = loaded(CpuBackend(2))
    wanted = logits_alone(backend, tokens, block_size)[-1]
    backend.reserve_kv(2 * blocks, block_size)
    backend.logits(greedy_batch([Chunk(tokens[:-1], 0, range(blocks))]))
    backend.kv.copy_blocks([(block, 2 * blocks - 1 - block) for block in range(blocks)])
    moved = range(2 * blocks - 1, blocks - 1, -1)
    assert np.array_equal(backend.logits(greedy_batch([Chunk(tokens[-1:], 39, moved)]))[0], wanted)


def test_blocks_behind_the_window_are_not_read():
    spec = replace(SPEC, attn=replace(SPEC.attn, window=20))
    backend = loaded(CpuBackend(2), spec=spec)
    tokens = prompt(60, 5)
    wanted = logits_alone(backend, tokens, 16)[-1]
    backend.logits(greedy_batch([Chunk(tokens[:-1], 0, range(4))]))
    assert np.array_equal(backend.logits(greedy_batch([Chunk(tokens[-1:], 59, [-9, 10**6, 2, 3])]))[0], wanted)


def test_groups_that_do_not_fit_the_layers_are_refused():
    backend = loaded(CpuBackend(1))
    for layers in ([[0]], [[0], [0]], [[0, 1], [1]], [[0, 1, 2]]):
        with pytest.raises(ValueError, match="group"):
            backend.reserve_kv(4, 16, groups=[KvGroup(0, tuple(group)) for group in layers])
    backend.reserve_kv(4, 16, groups=[KvGroup(0, (1,)), KvGroup(0, (0,))])
    with pytest.raises(ValueError, match="2 layer groups, the step has block tables for 1"):
        backend.logits(GOOD)


@pytest.mark.parametrize("kv", ["f16", "f32", "int8", "int4", "int8:int4"])
@pytest.mark.parametrize("block_size", [16, 5])
def test_exported_blocks_are_as_good_as_computed_ones(kv: str, block_size: int):
    tokens = prompt(40, 4)
    blocks = blocks_for([tokens], block_size)
    spec = replace(SPEC, attn=attention(3, 1, 32, interleaved=True))
    first, second = (loaded(CpuBackend(2, kv=kv), spec=spec) for _ in range(2))
    wanted = logits_alone(first, tokens, block_size)[-1]
    first.logits(greedy_batch([Chunk(tokens[:-1], 0, range(blocks))]))
    second.reserve_kv(2 * blocks, block_size)
    data = first.kv.export_blocks(list(range(blocks)))
    others = list(range(2 * blocks - 1, blocks - 1, -1))
    second.kv.import_blocks(others, data)
    assert np.array_equal(second.logits(greedy_batch([Chunk(tokens[-1:], 39, others)]))[0], wanted)
    for wrong in ([0], [2 * blocks], [-1]):
        with pytest.raises(ValueError, match=r"bytes|outside the KV cache"):
            second.kv.import_blocks(wrong, data[: len(data) // blocks] + b"x" * (wrong == [0]))
    with pytest.raises(ValueError, match="outside the KV cache"):
        second.kv.export_blocks([2 * blocks])


@pytest.mark.parametrize("block_size", [16, 5])
def test_a_kv_cache_in_a_file_outlives_its_backend(block_size: int, tmp_path: Path):
    file = tmp_path / "kv"
    file.touch()
    tokens = prompt(40, 4)
    blocks = blocks_for([tokens], block_size)
    first = loaded(CpuBackend(2, kv_file=KvFile(str(file))))
    wanted = logits_alone(loaded(CpuBackend(2)), tokens, block_size)[-1]
    first.reserve_kv(blocks, block_size)
    first.logits(greedy_batch([Chunk(tokens[:-1], 0, range(blocks))]))
    first.close()
    again = KvFile(str(file))
    second = loaded(CpuBackend(2, kv_file=again))
    second.reserve_kv(blocks, block_size)
    assert np.array_equal(second.logits(greedy_batch([Chunk(tokens[-1:], 39, range(blocks))]))[0], wanted)
    assert file.stat().st_size == again.end
    closed = KvFile(str(file))
    closed.close()
    with pytest.raises(MemoryError):
        loaded(CpuBackend(1, kv_file=closed)).reserve_kv(blocks, block_size)


def test_a_slot_that_sampled_nothing_has_no_last_token():
    backend = loaded(CpuBackend(1))
    backend.reserve_kv(1, 16)
    with pytest.raises(ValueError, match="token id -1"):
        backend.logits(greedy_batch([Chunk([LAST_SAMPLED], 0, [0])]))


def test_kv_cost_is_what_the_spec_says():
    per_token = 2 * SPEC.layers * SPEC.attn.kv_width
    assert loaded(CpuBackend(1)).memory_needs().kv_bytes_per_token == 2 * per_token
    assert loaded(CpuBackend(1, kv="f32")).memory_needs().kv_bytes_per_token == 4 * per_token
    scales = 2 * SPEC.layers * SPEC.attn.kv_heads * 4
    assert loaded(CpuBackend(1, kv="int8")).memory_needs().kv_bytes_per_token == per_token + scales


@pytest.mark.parametrize(
    ("kv", "head"), [("int8:int4", 64 + 4 + 32 + 4), ("int4", 2 * (32 + 4)), ("int4:f16", 32 + 4 + 2 * 64)]
)
def test_keys_and_values_cost_what_their_own_formats_take(kv: str, head: int):
    spec = replace(SPEC, attn=attention(2, 2, 64, interleaved=True))
    backend = loaded(CpuBackend(1, kv=kv), spec=spec)
    assert backend.memory_needs().kv_bytes_per_token == SPEC.layers * 2 * head
    assert backend.footprint(spec, []).kv_token == SPEC.layers * 2 * head


@pytest.mark.parametrize(("kv", "dims"), [("int4", 16), ("int8:int4", 48), ("int4:int8", 40)])
def test_a_head_that_4_bits_have_no_place_for_is_refused(kv: str, dims: int):
    with pytest.raises(ConfigError, match=f"in {kv} is not possible .* multiple of 32 dimensions, .* have {dims}"):
        loaded(CpuBackend(1, kv=kv), spec=replace(SPEC, attn=attention(2, 1, dims, interleaved=True)))


def test_formats_that_a_cpu_has_not_are_refused_with_those_it_has():
    with pytest.raises(ConfigError, match=r"unknown KV type 'int8:fp8' for a CPU: use auto, one of f16, f32, int8, "):
        CpuBackend(1, kv="int8:fp8")


# ---- malformed input ----

GOOD = greedy_batch([Chunk([1, 2, 3], 30, [0, 1, 2]), Chunk([4, 5], 0, [3, 0, 0])])
BAD: dict[str, Batch] = {
    "token beyond the vocabulary": replace(GOOD, tokens=np.array([1, 2, SPEC.vocab, 4, 5], np.int32)),
    "negative token": replace(GOOD, tokens=np.array([1, 2, -7, 4, 5], np.int32)),
    "negative position": replace(GOOD, positions=np.array([30, 31, 32, -1, 0], np.int32)),
    "position beyond the table": replace(GOOD, positions=np.array([30, 31, 48, 0, 1], np.int32)),
    "position far beyond": replace(GOOD, positions=np.array([30, 31, 2**31 - 1, 0, 1], np.int32)),
    "too few positions": replace(GOOD, positions=GOOD.positions[:-1].copy()),
    "block outside the cache": replace(GOOD, tables=np.array([[[0, 1, 4], [3, 0, 0]]], np.int32)),
    "negative block": replace(GOOD, tables=np.array([[[0, -1, 2], [3, 0, 0]]], np.int32)),
    "a table missing": replace(GOOD, tables=GOOD.tables[:, :1].copy()),
    "rows that overlap": replace(GOOD, row_start=np.array([0, 6, 5], np.int32)),
    "rows that go back": replace(GOOD, row_start=np.array([0, -1, 5], np.int32)),
    "rows that end early": replace(GOOD, row_start=np.array([0, 3, 4], np.int32)),
    "rows that start late": replace(GOOD, row_start=np.array([1, 3, 5], np.int32)),
    "no rows": replace(GOOD, row_start=np.zeros(0, np.int32)),
    "sampled beyond the tokens": replace(GOOD, sampled=np.array([5], np.int32)),
    "sampled below 0": replace(GOOD, sampled=np.array([-1], np.int32)),
    "a slot missing": replace(GOOD, slots=GOOD.slots[:1].copy()),
    "a slot below 0": replace(GOOD, slots=np.array([0, -1], np.int32)),
    "a slot beyond any": replace(GOOD, slots=np.array([0, 2**30], np.int32)),
    "tokens of another type": replace(GOOD, tokens=GOOD.tokens.astype(np.int64)),
    "positions with gaps": replace(GOOD, positions=np.repeat(GOOD.positions, 2)[::2]),
    "tokens of two dimensions": replace(GOOD, tokens=GOOD.tokens[None]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_batch_is_refused_and_harms_nothing(name: str):
    backend = loaded(CpuBackend(2))
    backend.reserve_kv(4, 16)
    wanted = backend.logits(GOOD)
    with pytest.raises((ValueError, TypeError)):
        backend.logits(BAD[name])
    assert np.array_equal(backend.logits(GOOD), wanted)


def test_a_step_before_there_is_a_cache_is_refused():
    with pytest.raises(ValueError, match="no KV cache yet"):
        loaded(CpuBackend(2)).logits(GOOD)


def test_blocks_outside_the_cache_do_not_move():
    backend = loaded(CpuBackend(1))
    backend.reserve_kv(4, 16)
    for pair in [(0, 4), (-1, 0), (2**40, 0)]:
        with pytest.raises(ValueError, match="outside the KV cache"):
            backend.kv.copy_blocks([pair])


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (16, 0), (2**31, 1), (2**20, 2**20)])
def test_an_impossible_cache_is_refused(blocks: int, size: int):
    with pytest.raises(ValueError, match="KV cache needs between"):
        loaded(CpuBackend(1)).reserve_kv(blocks, size)


def test_a_cache_beyond_any_machine_is_refused():
    wide = replace(SPEC, attn=attention(1024, 1024, 64, interleaved=True))
    with pytest.raises(MemoryError):
        loaded(CpuBackend(1), spec=wide).reserve_kv(2**31 - 1, 1)


@pytest.mark.parametrize(
    ("width", "parts"),
    [
        (0, [("F32", 1)]),
        (8, []),
        (8, [("F32", 0)]),
        (40, [("Q4_0", 1)]),
        (32, [("Q4_K", 1)]),
        (8, [("Q9", 1)]),
        (2**31, [("F32", 1)]),
    ],
)
def test_an_impossible_weight_is_refused(width: int, parts: list[tuple[str, int]]):
    with pytest.raises(ValueError, match=r"weight|rows hold|needs"):
        Weight(width, parts)


def test_a_weight_takes_only_rows_it_has():
    weight = Weight(32, [("Q8_0", 5), ("F32", 2)])
    block = np.zeros(34, np.uint8)
    for part, row, rows, data in [(2, 0, 1, block), (0, 5, 1, block), (0, 2**63, 1, block), (0, 0, 1, block[:-1])]:
        with pytest.raises(ValueError, match=r"part|bytes"):
            weight.fill(part, row, rows, data)
    with pytest.raises(ValueError, match="bias"):
        weight.set_bias(np.zeros(6, np.float32))


def test_a_program_checks_its_buffers_when_built():
    program = Program("generic", 1, "f16")
    wide, narrow, sampled = (
        program.buffer("T", 64, False),
        program.buffer("T", 32, False),
        program.buffer("S", 64, False),
    )
    plain, quantized = Weight(64, [("F32", 32)]), Weight(64, [("Q8_0", 32)])
    gain = np.ones(64, np.float32)
    angles, heads = program.angles(np.ones(4), 1.0), {"heads": 2, "kv_heads": 1, "head_dim": 16}

    def attend(qkv: int, out: int, layer: int = 0, angles: int = angles, vectors: Any = None, **numbers: float) -> None:
        program.attend(qkv, out, layer=layer, angles=angles, numbers=heads | numbers, vectors=vectors or {})

    wrong = [
        lambda: program.buffer("X", 8, False),
        lambda: program.buffer("T", 0, False),
        lambda: program.linear(99, plain, narrow),
        lambda: program.linear(-1, plain, narrow),
        lambda: program.linear(narrow, plain, narrow),
        lambda: program.linear(wide, plain, sampled),
        lambda: program.linear(wide, quantized, narrow),
        lambda: program.linear(wide, plain, narrow, gated=True),
        lambda: program.embed(plain, narrow),
        lambda: program.add_norm(wide, None, gain[:9].copy(), 1e-5, wide, None),
        lambda: program.add_norm(wide, None, gain, 1e-5, wide, None),
        lambda: program.take_sampled(sampled, sampled),
        lambda: program.act_and_mul(narrow, wide, "silu"),
        lambda: program.act_and_mul(wide, narrow, "relu"),
        lambda: program.norm_runs(wide, [(gain[:5].copy(), 16), (gain[:8].copy(), 8)], 1e-5, wide),
        lambda: program.norm_runs(wide, [(gain[:0].copy(), 16), (gain[:8].copy(), 8)], 1e-5, wide),
        lambda: program.norm_runs(wide, [(gain[:8].copy(), 1 << 20), (gain[:8].copy(), 8)], 1e-5, wide),
        lambda: program.add(wide, narrow, wide),
        lambda: program.scale(narrow, 2.0, wide),
        lambda: program.soft_cap(wide, 0.0, wide),
        lambda: attend(wide, narrow, layer=1),
        lambda: attend(wide, narrow, heads=3, kv_heads=2),
        lambda: attend(wide, narrow, head_dim=0),
        lambda: attend(wide, narrow, head_dim=15.5),
        lambda: attend(wide, narrow, heads=-2),
        lambda: attend(wide, narrow, angles=77),
        lambda: attend(narrow, narrow),
        lambda: attend(wide, narrow, patience=2.0),
        lambda: attend(wide, narrow, temperature_span=0),
        lambda: attend(wide, narrow, chunk=4, causal=0),
        lambda: program.layer_norm_heads(wide, gain[:8].copy(), gain[:8].copy(), 6, 1e-5, wide),
        lambda: attend(wide, narrow, vectors={"biases": gain}),
        lambda: attend(wide, narrow, vectors={"sinks": gain[:3].copy()}),
        lambda: program.angles(np.zeros(0), 1.0),
        lambda: program.answer(99),
        lambda: program.keep(sampled),
        lambda: program.keep(99),
        lambda: program.read_kept(0, np.zeros((0, 64), np.float32)),
        lambda: program.run(
            *(np.zeros(shape, np.int32) for shape in (0, 0, 1, 0, (1, 0, 0), 0)), np.zeros((0, 8), np.float32)
        ),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match=r"."):
            call()


def test_states_are_kept_of_the_last_step_and_no_further():
    program = Program("generic", 1, "f16")
    kept, sampled = program.buffer("T", 2, False), program.buffer("S", 2, False)
    table = Weight(2, [("F32", 3)])
    table.fill(0, 0, 3, np.arange(6, dtype=np.float32).view(np.uint8))
    program.embed(table, kept)
    program.keep(kept)
    with pytest.raises(ValueError, match="of its own"):
        program.answer(kept)
    program.take_sampled(kept, sampled)
    program.answer(sampled)
    arrays = [np.array(values, np.int32) for values in ([2, 0], [0, 1], [0, 2], [0], [[[0]]], [])]
    program.run(*arrays, np.zeros((0, 2), np.float32))
    out = np.zeros((1, 2), np.float32)
    for first, rows, width in ((0, 3, 2), (2, 1, 2), (2**63, 1, 2), (0, 1, 3)):
        with pytest.raises(ValueError, match="no such rows"):
            program.read_kept(first, np.zeros((rows, width), np.float32))
    with pytest.raises(ValueError, match="already"):
        program.keep(kept)
    program.read_kept(1, out)
    assert out.tolist() == [[0, 1]]


def test_settings_this_machine_cannot_follow_are_refused():
    with pytest.raises(ConfigError, match="use auto or one of"):
        CpuBackend(1, isa="mmx")
    with pytest.raises(ConfigError, match="unknown KV type 'int3'"):
        CpuBackend(1, kv="int3")
    with pytest.raises(ValueError, match="threads"):
        CpuBackend(5000)

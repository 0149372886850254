"""Prompts over a KV cache of 8 bits that Hopper attends to in 16: the copy, the kernel after it, and the plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend, inputs, kv_expansion
from penstock.backend.cuda.contexts import BLOCK, MOST_BLOCKS, PromptSizes
from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.graphs import padded
from penstock.backend.cuda.kernels.expand_kv import expand_kv
from penstock.backend.cuda.kernels.prefill_attention import prefill_attention, queries_per_tile
from penstock.backend.cuda.kv_expansion import FEWEST_BLOCKS, MOST_PER_TOKEN, TABLE_WORDS, KvExpansion, kv_expansion_of
from penstock.backend.ref import RefBackend
from penstock.backend.ref.cases import attend, difference, run
from penstock.backend.ref.ops import attention
from tests.cuda.device import DEVICE, HALF, HOPPER, TILINGS, close, ints, normal
from tests.cuda.small import spec_for
from tests.cuda.test_attention import spec_of
from tests.cuda.test_hopper_attention import asked as asked
from tests.cuda.test_kv import filled, kinds, values_of
from tests.cuda.test_mla import forms_of, steps_of

LLAMA = KvExpansion(heads=32, kv_heads=8, dims=128, room=32 * BLOCK)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
needs_hopper = pytest.mark.skipif(not HOPPER.device.has_hopper_attention, reason="needs a Hopper GPU")
RANDOM = np.random.default_rng(0)
BLOCKS = RANDOM.permutation(70).tolist()
CHUNKS = [Chunk([0] * 150, 0, BLOCKS[:10]), Chunk([0], 9, BLOCKS[10:11]), Chunk([0] * 40, 230, BLOCKS[11:28])]
ALWAYS = {"LAUNCH": 0.0, "MARGIN": 0.0}  # what makes every copy pay


@kinds
@pytest.mark.parametrize("name", ["smollm2", "llama3"])
def test_copies_have_the_values_and_tables_of_contexts(name: str, kind: str) -> None:
    spec, batch = spec_of(name), greedy_batch(CHUNKS)
    cache = filled(spec, kind, 70)
    expansion = KvExpansion(spec.heads, spec.kv_heads, spec.head_dim, 8 * BLOCK)
    with pytest.MonkeyPatch.context() as patch:
        for constant, value in ALWAYS.items():
            patch.setattr(kv_expansion, constant, value)
        placed = expansion.place(batch, np.array([0, 2], np.int32))
    blocks = np.concatenate([placed.blocks, np.full((3, 3), -1, np.int32)])
    memory = torch.full((expansion.room, expansion.width), torch.nan, dtype=HALF, device=DEVICE)
    copies = expansion.copies_within(memory, ints([-1] * 100))
    width = batch.tables.shape[2]
    expand_kv(*cache[:2], ints(blocks), ints(batch.tables.ravel()), ints([width]), *copies)

    tables = copies.tables[: 3 * width].reshape(3, width).tolist()
    assert tables[0] == [*range(10), *[-1] * (width - 10)]
    assert tables[1] == [-1] * width
    assert tables[2] == [*range(16, 33), *[-1] * (width - 17)]
    wanted = values_of(cache).to(HALF)
    for chunk, copied in ((CHUNKS[0], range(10)), (CHUNKS[2], range(16, 33))):
        length = chunk.start + len(chunk.tokens)
        for index, (page, copy) in enumerate(zip(chunk.table, copied, strict=True)):
            count = min(length - 16 * index, 16)
            assert torch.equal(copies.lines[copy, :, :, :count], wanted[page, :, :, :count])


@needs_hopper
@kinds
@pytest.mark.parametrize("dtype", DTYPES)
def test_hopper_attends_to_copies(dtype: str, kind: str) -> None:
    """What the cache holds is read as 16 bits: the rest of the copy's memory is NaN."""
    spec, batch = spec_of("llama3"), greedy_batch([CHUNKS[0], CHUNKS[2]])
    cache, rows = filled(spec, kind, 70), np.array([0, 1], np.int32)
    expansion = KvExpansion(spec.heads, spec.kv_heads, spec.head_dim, 8 * BLOCK)
    placed = kv_expansion.place_contexts(batch, rows, PromptSizes.of(batch, rows), 8)
    work = inputs.plan_attention(batch, 128 // 4, padded)
    qkv = normal(len(batch.tokens), spec.q_width + 2 * spec.kv_width, dtype=DTYPES[dtype], seed=1)
    out = torch.full((len(qkv), spec.q_width), torch.nan, dtype=qkv.dtype, device=DEVICE)
    memory = torch.full((expansion.room, expansion.width), torch.nan, dtype=qkv.dtype, device=DEVICE)
    copies, header = expansion.copies_within(memory, ints([-1] * 100)), ints([batch.tables.shape[2]])
    expand_kv(*cache[:2], ints(placed.blocks), ints(batch.tables.ravel()), header, *copies)
    how = {
        "tiling": TILINGS.prefill_attention(queries_per_tile(4), spec.head_dim, 2),
        "hopper": HOPPER.hopper_attention(spec.head_dim),
    }
    prefill_attention(qkv, copies.lines, ints(work.tiles), copies.tables, header, out, spec.scale, 0, **how)

    keys, values = values_of(cache).cpu().numpy().swapaxes(2, 3).swapaxes(0, 1)  # [blocks, block_size, kv_heads, D]
    q = qkv.float().cpu().numpy().reshape(len(qkv), -1, spec.head_dim)[:, : spec.heads]
    for row, (first, last) in enumerate(zip(batch.row_start, batch.row_start[1:], strict=False)):
        positions = batch.positions[first:last]
        context = np.arange(positions[-1] + 1)
        at = batch.tables[0, row, context // 16], context % 16
        wanted = attention(q[first:last], keys[at], values[at], (positions, 0), spec, {})
        assert close(out[first:last], torch.from_numpy(wanted).reshape(last - first, -1).to(DEVICE))


@needs_hopper
@pytest.mark.parametrize(
    ("sinks", "pads"), [(False, False), (True, True)], ids=["own shape", "sinks, shape of a graph"]
)
def test_prompts_and_answers_in_one_step(
    sinks: bool, pads: bool, monkeypatch: pytest.MonkeyPatch, asked: list[bool]
) -> None:
    """The backend copies contexts, attends with Hopper's kernel, and decodes over 8 bits."""
    for constant, value in ALWAYS.items():
        monkeypatch.setattr(kv_expansion, constant, value)
    monkeypatch.setattr(kv_expansion, "MOST_PER_TOKEN", 4)
    spec = replace(spec_of("smollm2"), sinks=sinks)
    trial = steps_of(
        attend(np.random.default_rng(3), spec=spec, lengths=(230, 10, 300)),
        [Chunk(range(120), 0, range(15)), Chunk(range(230, 239), 0, [15], 1)],
        [Chunk(range(120, 230), 120, range(15)), Chunk([239], 9, [15], 1)],
        [Chunk(range(240, 540), 0, range(19))],
    )
    backend = CudaBackend(384, 128, device=DEVICE, dtype=HALF, kv="int8", tilings=Tilings.of(HOPPER.device))
    if pads:
        monkeypatch.setattr(backend._steps, "pad", lambda program, shape: padded(shape, program.program.spare_splits))
    got, wanted = run(trial, backend), run(trial, RefBackend())
    assert [blocks for blocks, *_ in forms_of(backend, trial)] == [2, 2, 3]
    assert max(difference(some[: len(each)], each) for some, each in zip(got, wanted, strict=True)) <= 2e-2
    assert asked == [True] * 3


def test_copies_count_as_workspace() -> None:
    spec = spec_for("F32")
    spec = replace(spec, attn=replace(spec.attn, head_dim=64), layer_attn=())
    how = {"device": DEVICE, "dtype": HALF, "tilings": Tilings.of(HOPPER.device)}
    plain, copying = (CudaBackend(512, 8, kv=kv, **how).footprint(spec, []).workspace for kv in ("auto", "int8"))
    expansion = kv_expansion_of(spec.cached_attention, 512, HOPPER)
    assert copying - plain == expansion.bytes == MOST_PER_TOKEN * 512 * 4 * spec.attn.kv_width + 4 * TABLE_WORDS


@pytest.mark.parametrize(
    ("count", "context", "pays"),
    [(200, 200, False), (256, 256, True), (20, 400, True), (20, 16384, True), (16384, 16384, True)],
)
def test_what_saves_time_is_copied(count: int, context: int, pays: bool) -> None:
    assert LLAMA.pays(PromptSizes(np.array([count]), np.array([context]))) == pays


def test_long_contexts_and_short_prompts_are_not_copied() -> None:
    def planned(*chunks: Chunk) -> inputs.AttentionPlan:
        return inputs.plan_attention(greedy_batch(chunks), 32, lambda shape: shape, expansion=LLAMA)

    answer, prompt = Chunk([0], 700, [0]), Chunk(range(2000), 0, [0])
    for chunks in [answer, prompt], [prompt, answer]:
        plan = planned(*chunks)
        assert (len(plan.contexts.blocks), plan.shape.expanded, plan.shape.tiles) == (16, FEWEST_BLOCKS, 63)
    assert planned(Chunk(range(1000), 1500, [0])).shape.expanded == 32
    wide = np.zeros(TABLE_WORDS + 1, int)
    for chunks in [answer], [Chunk(range(200), 0, [0])], [Chunk(range(4097), 0, [0])], [Chunk(range(2000), 0, wide)]:
        assert planned(*chunks).shape.expanded == 0
    assert LLAMA.usual_blocks(128) == 0
    assert LLAMA.usual_blocks(2048) == FEWEST_BLOCKS


def test_layers_that_hopper_cannot_attend_with_are_not_copied() -> None:
    spec = spec_of("llama3")
    found = kv_expansion_of([spec, spec], 2048, HOPPER)
    assert found == KvExpansion(spec.heads, spec.kv_heads, spec.head_dim, 16 * 2048)
    assert found.bytes == 16 * 2048 * 2 * spec.kv_width * 2 + 4 * TABLE_WORDS
    assert kv_expansion_of([replace(spec, kv_heads=8, heads=32)], 8192, HOPPER).bytes == (512 << 20) + 4 * TABLE_WORDS
    assert kv_expansion_of([replace(spec, kv_heads=1)], 1 << 20, HOPPER).room == MOST_BLOCKS * BLOCK
    others = [{"window": 100}, {"chunk": 64}, {"causal": False}, {"head_dim": 80}, {"temperature": 0.1}]
    for layers in [], *([spec, replace(spec, **other)] for other in others), [spec, replace(spec, kv_heads=4)]:
        assert kv_expansion_of(layers, 2048, HOPPER) is None
    assert kv_expansion_of([spec], 2048, TILINGS) is None or DEVICE == "cuda"

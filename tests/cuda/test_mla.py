"""MLA in both forms against the reference: absorbed over balanced splits, expanded in pieces, and both in one step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend, inputs
from penstock.backend.cuda.contexts import BLOCK, MOST_BLOCKS, PromptSizes
from penstock.backend.cuda.graphs import padded
from penstock.backend.cuda.kernels.kv_tile import SplitKV
from penstock.backend.cuda.kernels.mla_attention import MlaTiling, mla_decode
from penstock.backend.cuda.mla_expansion import MlaDims, MlaExpansion
from penstock.backend.ref import RefBackend
from penstock.backend.ref.cases import CASES, Trial, difference, run
from penstock.backend.ref.mla_cases import attend_mla, mla
from penstock.backend.ref.ops import attention
from tests.cuda.device import DEVICE, HALF, close, ints, normal

DEEPSEEK = MlaExpansion(MlaDims(heads=128, nope=128, rope=64, rank=512, v_dim=128), 4096)
SMALL = MlaExpansion(MlaDims(heads=2, nope=24, rope=16, rank=48, v_dim=20), 2 * BLOCK)
TWO_HEADS = mla(2, 16, 48)
TOLERANCES = {"auto": 1e-5, "int8": 2e-2}


def cuda_backend(tokens: int, rows: int = 8, kv: str = "auto") -> CudaBackend:
    return CudaBackend(tokens, rows, device=DEVICE, dtype=torch.float32, kv=kv)


def steps_of(trial: Trial, *steps: list[Chunk]) -> Trial:
    """Returns a trial of the same weights over other steps."""
    blocks = 1 + max(max(chunk.table) for chunks in steps for chunk in chunks)
    return trial._replace(steps=[greedy_batch(chunks, i) for i, chunks in enumerate(steps)], num_blocks=blocks)


def forms_of(backend: CudaBackend, trial: Trial) -> list[tuple[int, int, int]]:
    """Returns of each step the blocks of contexts that are expanded, the splits and the tiles."""
    program = backend._programs[0]
    plans = [backend._steps.plan(program, batch) for batch in trial.steps]
    return [(len(plan.contexts.blocks), len(plan.splits), len(plan.tiles)) for plan in plans]


@pytest.mark.parametrize("kv", TOLERANCES)
def test_contexts_are_expanded_in_pieces(kv: str) -> None:
    """Pieces have 128 positions: one row's chunk continues what lies in a piece before it, another's begins in one."""
    trial = steps_of(
        attend_mla(np.random.default_rng(3), spec=TWO_HEADS, lengths=(230, 10)),
        [Chunk(range(120), 0, range(15))],
        [Chunk(range(120, 230), 120, range(15)), Chunk(range(230, 240), 0, [15], 1)],
    )
    backend = cuda_backend(128, kv=kv)
    got, wanted = run(trial, backend), run(trial, RefBackend())
    assert backend._programs[0].expansion.room == BLOCK
    assert forms_of(backend, trial) == [(1, 0, 1), (3, 0, 2)]
    assert max(map(difference, got, wanted)) <= TOLERANCES[kv]


@pytest.mark.parametrize("pads", [False, True], ids=["own shape", "shape of a graph"])
def test_answers_and_prompts_in_one_step(pads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are attended in the absorbed form. Those that only pad the step are in the place of a prompt."""
    trial = steps_of(
        attend_mla(np.random.default_rng(4), spec=TWO_HEADS, lengths=(31, 6, 70)),
        [Chunk(range(30), 0, [7, 3]), Chunk(range(31, 36), 0, [5], 1)],
        [Chunk([30], 30, [7, 3]), Chunk([36], 5, [5], 1), Chunk(range(37, 107), 0, [0, 1, 2, 6, 9], 2)],
    )
    backend = cuda_backend(256, rows=128)
    if pads:
        monkeypatch.setattr(backend._steps, "pad", lambda program, shape: padded(shape, program.program.spare_splits))
    got, wanted = run(trial, backend), run(trial, RefBackend())
    assert forms_of(backend, trial) == [(2, 0, 2), (1, 2, 1)]
    assert max(difference(some[: len(each)], each) for some, each in zip(got, wanted, strict=True)) <= 1e-5


def test_a_rehearsed_step_expands_nothing() -> None:
    trial = steps_of(attend_mla(np.random.default_rng(6), spec=TWO_HEADS, lengths=(20,)), [Chunk(range(20), 0, [2, 0])])
    backend = cuda_backend(128)
    (before,) = run(trial, backend)
    program = backend._programs[0]
    assert (
        program.usual(inputs.Shape(20, 1, 0, 0, 1)).expanded
        == backend._steps.plan(program, trial.steps[0]).shape.expanded
        == 1
    )
    assert program.usual(inputs.Shape(2, 2, 2, 2, 0)).expanded == 0
    backend.prepare(2, 30)
    assert np.array_equal(backend.logits(trial.steps[0]), before)


def test_a_few_tokens_of_a_long_prompt_are_absorbed() -> None:
    trial = steps_of(
        attend_mla(np.random.default_rng(5), spec=TWO_HEADS, lengths=(118,)),
        [Chunk(range(100), 0, range(8))],
        [Chunk(range(100, 118), 100, range(8), sample=1)],
    )
    backend = cuda_backend(128)
    got, wanted = run(trial, backend), run(trial, RefBackend())
    assert forms_of(backend, trial) == [(1, 0, 1), (0, 0, 1)]
    assert max(map(difference, got, wanted)) <= 1e-5


def test_selected_positions_are_never_expanded() -> None:
    case = next(case for case in CASES if (case.op, case.name) == ("select_positions", "one"))
    backend = cuda_backend(128)
    trial = case.make(np.random.default_rng(0))._replace(steps=[])
    run(trial, backend)
    assert backend._programs[0].expansion is None


@pytest.mark.parametrize(
    ("count", "context", "pays"),
    [
        (2, 2, True),
        (2048, 2048, True),
        (170, 1_000_000, False),
        (175, 1_000_000, True),
        (64, 80, True),
        (64, 2048, False),
    ],
)
def test_what_takes_less_arithmetic_is_done(count: int, context: int, pays: bool) -> None:
    assert DEEPSEEK.pays(PromptSizes(np.array([count]), np.array([context]))) == pays


def test_contexts_lie_one_behind_the_other() -> None:
    chunks = [Chunk([0], 700, [0]), Chunk(range(300), 0, [0]), Chunk([0], 9, [0]), Chunk(range(200), 129, [0])]
    batch = greedy_batch(chunks)
    placed = SMALL.place(batch, np.array([1, 3], np.int32))
    assert placed.blocks.tolist() == [
        *([1, 0, 128], [1, 128, 128], [1, 256, 44]),
        *([3, 0, 128], [3, 128, 128], [3, 256, 73]),
    ]
    assert placed.starts.tolist() == [0, 0, 0, 3 * BLOCK]
    assert placed.room == 8  # three pieces of two blocks, rounded up


def test_prompts_must_come_last_and_fit() -> None:
    def planned(*chunks: Chunk) -> inputs.AttentionPlan:
        return inputs.plan_attention(greedy_batch(chunks), 32, lambda shape: shape, expansion=SMALL)

    prompt, answer = Chunk(range(300), 0, [0]), Chunk([0], 700, [0])
    expanded = planned(answer, prompt)
    assert (expanded.shape.expanded, expanded.shape.tiles) == (4, 3)
    for others in [prompt, answer], [answer], [Chunk(range(MOST_BLOCKS * BLOCK + 1), 0, [0])]:
        assert planned(*others).shape.expanded == 0


@pytest.mark.parametrize("queries", [16, 32])
def test_splits_of_rows_of_unequal_lengths_are_balanced_and_joined(queries: int) -> None:
    """Programs of few heads and of all heads attend to the same splits."""
    heads, rope, rank = 20, 16, 32
    lengths = 400, 5, 130
    chunks = [Chunk([0], length - 1, range(30 * i, 30 * i + 30), i) for i, length in enumerate(lengths)]
    batch = greedy_batch(chunks)
    splits = inputs.plan_attention(batch, 32, lambda shape: shape).splits
    assert np.bincount(splits[:, 1]).tolist() == [6, 1, 2]
    assert (splits[:, 3] - splits[:, 2]).max() < 2 * inputs.SHORTEST_SPLIT
    cache, q = normal(90, 16, rope + rank, dtype=HALF), normal(3, heads * (rope + rank), dtype=HALF, seed=1)
    out = torch.full((3, heads * rank), torch.nan, dtype=HALF, device=DEVICE)
    sizes = len(splits) * heads * rank, len(splits) * heads * 2
    split_kv = SplitKV(*(torch.full((size,), torch.nan, device=DEVICE) for size in sizes), ints([0] * 2 * len(splits)))
    tables, header = ints(batch.tables.ravel()), ints([batch.tables.shape[2]])
    about = out, split_kv, rank, 0.2
    mla_decode(q, cache, ints(splits), tables, header, *about, tiling=MlaTiling(queries, 32, 4, 2))
    spec = mla(heads, rope, rank, multiplier=0.2)
    for row, length in enumerate(lengths):
        keys = cache[30 * row : 30 * row + 30].reshape(-1, 1, rope + rank)[:length].float().cpu().numpy()
        query = q[row].float().cpu().numpy().reshape(1, heads, -1)
        found = attention(query, keys, keys[..., rope:], (np.array([length - 1]), 0), spec, {})
        assert close(out[row], torch.from_numpy(found).to(DEVICE).reshape(-1))
    assert not split_kv.arrived.any()

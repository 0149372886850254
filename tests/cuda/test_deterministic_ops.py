"""Ops of a deterministic backend: as the reference has them, and the same to the bit whatever is computed beside them
and however a sequence is divided."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from penstock.backend.batches import Chunk
from penstock.backend.cuda import CudaBackend, segments
from penstock.backend.cuda.kernels import segmented_attention, segmented_mla
from penstock.backend.ref import RefBackend
from penstock.backend.ref.cases import CASES, Case, Trial, attend, attention, difference, run
from penstock.backend.ref.delta_cases import CHANNELS, LONG, by_channel, chunked_delta
from penstock.backend.ref.mamba2_cases import LONG as LONG_MAMBA2
from penstock.backend.ref.mamba2_cases import chunked as chunked_mamba2
from penstock.backend.ref.mla_cases import FEW, attend_mla, mla, sparse
from penstock.backend.ref.scan_cases import ODD as ODD_SCAN
from penstock.backend.ref.scan_cases import chunked_scan
from tests.cuda.device import DEVICE, HALF
from tests.cuda.test_mla import steps_of

OWN = "attend", "attend_mla", "select_positions", "delta_net", "mamba2", "selective_scan"  # ops with a way of their own
SHORT = 64  # positions of a segment, which no tile exceeds
LENGTHS = 75, 9
TABLES = [5, 0, 3, 1, 7], [2, 4]
FEWEST = 34  # tokens that all cases have inputs for

HEADS = partial(attention, 4, 2, 16, interleaved=False)
MAKE: dict[str, partial[Trial]] = {
    "selected positions": partial(sparse, spec=FEW, lengths=(25, 9)),
    "MLA": partial(attend_mla, spec=mla(6, 16, 48), lengths=LENGTHS),
    "attention": partial(attend, spec=HEADS(), lengths=LENGTHS),
    "delta net": partial(chunked_delta, spec=LONG, lengths=LENGTHS, longest=9),
    "a window": partial(attend, spec=HEADS(window=20), lengths=LENGTHS),
    "Mamba2": partial(chunked_mamba2, spec=LONG_MAMBA2, lengths=LENGTHS, longest=9),
    "delta net by channel": partial(by_channel, spec=CHANNELS, lengths=(40, 9), longest=9),
    "Mamba": partial(chunked_scan, spec=ODD_SCAN, lengths=LENGTHS, longest=9),
}
WHOLE = {
    "an encoder": attention(2, 1, 16, interleaved=False, causal=False),
    "an encoder with a window": attention(2, 2, 16, interleaved=False, causal=False, window=9),
    "biases": attention(2, 2, 16, interleaved=False, rotated=0, causal=False, distance_bias=7),
}


def backend(dtype: torch.dtype = torch.float32) -> CudaBackend:
    return CudaBackend(1200, 8, device=DEVICE, dtype=dtype, deterministic=True)


@pytest.mark.parametrize("case", [case for case in CASES if case.op in OWN], ids=lambda case: f"{case.op}: {case.name}")
def test_op_follows_the_reference(case: Case) -> None:
    wanted, got = (run(case.make(np.random.default_rng(9)), each) for each in (RefBackend(), backend()))
    assert max(map(difference, got, wanted)) <= 1e-5


@pytest.fixture
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (segments, segmented_attention, segmented_mla):
        monkeypatch.setattr(module, "SEGMENT", SHORT)


def rows_of(trial: Trial, *steps: Sequence[Chunk]) -> np.ndarray:
    """Returns what an op gives for all tokens of the first sequence, over these steps."""
    tensor_cores = HALF if DEVICE == "cuda" else torch.float32  # the interpreter shows more in 32 bits
    found = run(steps_of(trial, *map(list, steps)), backend(tensor_cores))
    sizes = [sum(len(chunk.tokens) for chunk in chunks if chunk.slot == 0) for chunks in steps]
    return np.concatenate([each[:size] for each, size in zip(found, sizes, strict=True)])


def chunk_of(begin: int, end: int, slot: int = 0) -> Chunk:
    return Chunk([(at + slot) % FEWEST for at in range(begin, end)], begin, TABLES[slot], slot)


@pytest.mark.usefixtures("ordered_sums", "_short_segments")
@pytest.mark.parametrize("kind", MAKE)
def test_chunks_splits_and_company_change_no_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence comes in one step, in which no context is split, and in chunks beside another."""
    trial, length = MAKE[kind](np.random.default_rng(5)), MAKE[kind].keywords["lengths"][0]
    half = length // 2 + 3
    first, *others = [chunk_of(*each) for each in pairwise((0, half, half + 1, half + 3, length))]
    company = rows_of(trial, [first, chunk_of(0, 9, 1)], *([each] for each in others))
    monkeypatch.setattr(segments, "MOST_SPLITS", 0)
    alone = rows_of(trial, [chunk_of(0, length)])
    assert np.isfinite(alone).all()
    assert np.array_equal(alone, company)


@pytest.mark.usefixtures("ordered_sums", "_short_segments")
@pytest.mark.parametrize("kind", WHOLE)
def test_a_whole_row_is_the_same_beside_others(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = attend(np.random.default_rng(5), spec=WHOLE[kind], lengths=LENGTHS)
    company = rows_of(trial, [chunk_of(0, 75), chunk_of(0, 9, 1)])
    monkeypatch.setattr(segments, "MOST_SPLITS", 0)
    assert np.array_equal(rows_of(trial, [chunk_of(0, 75)]), company)

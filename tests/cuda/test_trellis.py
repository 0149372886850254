"""EXL3 weights on a GPU: the bits of their file in memory, against what the format's definition makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend
from penstock.backend.cuda.exchange import copies
from penstock.backend.cuda.footprint import expands
from penstock.backend.cuda.kernels.trellis import Tiling, dequantize_trellis, rotate_inputs, trellis_gemm
from penstock.backend.cuda.packer import CudaPacker, host_workspace
from penstock.backend.cuda.storage import StorageRules, storage_of
from penstock.backend.cuda.trellis_weights import TrellisMatrix
from penstock.backend.cuda.weights import DenseMatrix, PackTarget
from penstock.backend.ref import RefBackend
from penstock.errors import WeightsError
from penstock.model.dequantize import dequantize
from penstock.model.load import load_placed, open_checkpoint
from penstock.model.low_rank import LowRankPart, LowRankUpdate
from penstock.model.random_tensor import random_tensor
from penstock.model.roles import Role
from tests.cuda.device import DEVICE, HALF, TILINGS, normal

GOLDEN = Path(__file__).parents[1] / "models" / "formats" / "exl3"
EXACT = 2e-3  # rows are rounded to float16
BOOKS = ["3inst", "mcg", "mul1"]


def packed(
    formats: Sequence[str], rows: Sequence[int], width: int, bias: bool = False, deterministic: bool = False
) -> tuple[Any, torch.Tensor]:
    """A weight of several parts, and its values."""
    rng = np.random.default_rng(0)
    parts = [random_tensor(rng, format, count, width) for format, count in zip(formats, rows, strict=True)]
    biases = [random_tensor(rng, "F32", count) if bias else None for count in rows]
    backend = CudaBackend(128, 64, device=DEVICE, dtype=HALF, deterministic=deterministic)
    weight = backend.pack_matrix(parts, biases)
    backend._packer.target.workspace.transfer.finish()
    return weight, torch.from_numpy(np.concatenate([dequantize(part) for part in parts])).to(DEVICE)


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def product(weight: Any, x: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(x), weight.rows), torch.nan, device=DEVICE)
    weight.product(x, out)
    return out


@pytest.mark.parametrize("code_book", BOOKS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_values_are_those_of_the_definition(bits: int, code_book: str) -> None:
    weight, values = packed([f"EXL3-{bits}-{code_book}"], [128], 128)
    out = torch.full((128, 128), torch.nan, device=DEVICE)
    dequantize_trellis(weight.parts[0], out)
    assert difference(out, values) < 5e-4


@pytest.mark.parametrize("count", [1, 20, 65])
def test_parts_have_bits_and_factors_of_their_own(count: int) -> None:
    """65 rows are more than are multiplied without writing the weight out, in bfloat16."""
    weight, values = packed(["EXL3-3-mcg", "EXL3-4-mul1"], [256, 128], 256, bias=True)
    assert isinstance(weight, TrellisMatrix)
    x = normal(count, 256, seed=1).to(HALF)
    wanted = x.double() @ values.double().T + weight.bias
    assert difference(product(weight, x), wanted) < (EXACT if count <= 64 else 5e-3)


def test_a_deterministic_product_has_one_tiling_at_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, values = packed(["EXL3-3"], [256], 512, deterministic=True)
    tilings = set()

    def recorded(rows: Any, part: Any, bias: Any, out: Any, tiling: Tiling, scratch: Any) -> None:
        tilings.add(tiling)
        trellis_gemm(rows, part, bias, out, tiling, scratch)

    monkeypatch.setattr("penstock.backend.cuda.trellis_weights.trellis_gemm", recorded)
    for count in (1, 20, 65):
        x = normal(count, 512, seed=1).to(HALF)
        assert difference(product(weight, x), x.double() @ values.double().T) < EXACT
    assert len(tilings) == 1


@pytest.mark.parametrize("code_book", BOOKS)
def test_columns_are_shared_out(code_book: str) -> None:
    weight, values = packed([f"EXL3-2-{code_book}"], [128], 512)
    part, scratch, x = weight.parts[0], weight.workspace.scratch, normal(3, 512, seed=1).to(HALF)
    rotated, out = torch.empty(3, 512, dtype=torch.float16, device=DEVICE), torch.empty(3, 128, device=DEVICE)
    rotate_inputs(x, part, rotated)
    trellis_gemm(rotated, part, None, out, Tiling(16, 64, 4, 4), scratch)
    assert difference(out, x.double() @ values.double().T) < EXACT


def adapted_logits(backend: Any, tokens: list[int]) -> tuple[Any, np.ndarray, np.ndarray]:
    """Returns the golden's weights as they are packed, its logits, and those with a random adapter."""
    model, placements = load_placed(open_checkpoint(GOLDEN), backend)
    backend.load(model)
    backend.reserve_kv(16, 4)
    rng = np.random.default_rng(0)
    weights = [placement.weight for placement in placements if placement.parts[0].name == "layers.0.q"]
    a, b = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in ((8, 128), (128, 8)))
    backend.adapters.load(0, backend.adapters.pack([LowRankUpdate(weights[0], (LowRankPart(128, a, b),))]))
    batch = greedy_batch([Chunk(tokens, 0, range(8))])
    plain, adapted = (backend.logits(replace(batch, adapters=np.array([slot], np.int32))) for slot in (-1, 0))
    return weights[0], plain, adapted


def test_a_model_answers_with_the_bits_of_its_file(caplog: pytest.LogCaptureFixture) -> None:
    with np.load(GOLDEN / "expected.npz") as file:
        tokens, wanted = file["tokens"].tolist()[:6], file["logits"][:6]
    weight, plain, adapted = adapted_logits(CudaBackend(64, 8, device=DEVICE, dtype=HALF), tokens)
    _, _, reference = adapted_logits(RefBackend(), tokens)
    assert isinstance(weight, TrellisMatrix)
    assert np.linalg.norm(plain - wanted) < 8e-2 * np.linalg.norm(wanted)
    assert np.linalg.norm(adapted - reference) < 8e-2 * np.linalg.norm(reference)
    assert np.linalg.norm(adapted - plain) > 0.2 * np.linalg.norm(wanted)
    assert not caplog.text
    tensors = [open_checkpoint(GOLDEN).tensors[f"layers.0.{name}"] for name in "qkv"]
    taken = [sum(each.nbytes for each in (part.words, part.svh, part.suh)) for part in weight.parts]
    assert taken == [storage_of(tensor, StorageRules()).bytes for tensor in tensors]
    assert all(map(expands, tensors))


def test_what_no_plain_product_has_is_widened() -> None:
    tensor = random_tensor(np.random.default_rng(0), "EXL3-3", 128, 128).with_role(Role.EMBEDDING)
    packer = CudaPacker(PackTarget(host_workspace(TILINGS), torch.bfloat16))
    assert isinstance(packer.pack_matrix([tensor], [None]), DenseMatrix)
    assert storage_of(tensor, StorageRules()).kind == "BF16"
    assert not expands(tensor)
    assert storage_of(tensor.with_role(Role.EXPERT_IN), StorageRules()).kind == "BF16"


def test_weights_of_one_layout_are_exchanged() -> None:
    rng, packer = np.random.default_rng(0), CudaPacker(PackTarget(host_workspace(TILINGS), torch.bfloat16))
    one, other, wider, book = (
        packer.pack_matrix([random_tensor(rng, format, 128, 128)], [None])
        for format in ("EXL3-2", "EXL3-2", "EXL3-3", "EXL3-2-mul1")
    )
    assert [len(new) for _, new in copies(one, other)] == [8, 128, 128]
    with pytest.raises(WeightsError):
        list(copies(one, wider))
    with pytest.raises(WeightsError):
        list(copies(one, book))

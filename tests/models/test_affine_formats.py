"""Codes with scales and minima or zero points: what they become in memory, at how many bits, and what that computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.cpu.weights import stored_as
from penstock.backend.cuda.storage import StorageRules, storage_of
from penstock.backend.ref import RefBackend
from penstock.model.dequantize import dequantize
from penstock.model.formats.grouped import Factors, Grouped
from penstock.model.load import load_model, open_checkpoint
from penstock.model.safetensors import read_safetensors
from penstock.model.tensor import Tensor, some_rows
from tests.models.conftest import write_safetensors

FOLDER = Path(__file__).parent / "formats"
ROWS = 48


def grouped(bits: int, group: int, width: int, added: str) -> tuple[Tensor, Any]:
    """Random codes whose groups have minima, zero points or one zero point for all, and their values."""
    rng = np.random.default_rng(bits * group)
    codes = rng.integers(0, 1 << bits, (ROWS, width)).astype(np.uint8)
    groups = ROWS, width // group
    scales = rng.normal(0, 0.01, groups).astype(np.float16).astype(np.float32)
    zeros: Any = np.int16(1 << bits - 1)
    minima = None
    if added == "zeros":
        zeros = rng.integers(0, 1 << bits, groups).astype(np.int16)
    if added == "minima":
        minima = rng.normal(0, 0.1, groups).astype(np.float16).astype(np.float32)

    def factors(first: int, last: int) -> Factors:
        rows = slice(first, last)
        own = zeros[rows] if zeros.ndim else zeros
        return Factors(scales[rows], own, None if minima is None else minima[rows])

    every = np.arange(width) // group
    wide = scales.astype(np.float64)[:, every]
    if minima is not None:
        values = wide * codes + minima[:, every]
    else:
        values = wide * (codes.astype(np.int16) - (zeros[:, every] if zeros.ndim else zeros))
    made = Grouped("w", "codes", (ROWS, width), bits, group, lambda first, last: codes[first:last], factors)
    return made.tensor(), values.astype(np.float32)


@pytest.mark.parametrize(
    ("bits", "group", "width", "added", "format", "size"),
    [
        (4, 128, 256, "zeros", "U4_ZERO_64", 4.5),  # AWQ
        (4, 64, 128, "zeros", "U4_ZERO_64", 4.5),
        (4, 32, 128, "zeros", "U4_ZERO_32", 5),
        (4, 96, 192, "zeros", "U4_ZERO_32", 5),
        (4, 96, 96, "zeros", "U4_ZERO_32", 5),  # one group for all columns
        (3, 64, 128, "zeros", "Q4_0", 4.5),
        (4, 64, 128, "", "Q4_0", 4.5),
        (8, 128, 256, "zeros", "U8_ZERO_64", 8.5),
        (8, 32, 128, "zeros", "U8_ZERO_32", 9),
        (8, 64, 128, "", "Q8_0", 8.5),
        (2, 64, 128, "minima", "U4_MIN_64", 4.5),  # MLX
        (4, 64, 128, "minima", "U4_MIN_64", 4.5),
        (4, 32, 128, "minima", "Q4_1", 5),
        (5, 64, 128, "minima", "Q5_1", 6),
        (6, 64, 128, "minima", "U6_MIN_64", 6.5),
        (6, 32, 128, "minima", "U6_MIN_32", 7),
        (8, 128, 128, "minima", "U8_MIN_64", 8.5),
        (8, 32, 128, "minima", "U8_MIN_32", 9),
    ],
)
def test_codes_stay_exact_at_their_own_bits(
    bits: int, group: int, width: int, added: str, format: str, size: float
) -> None:
    tensor, values = grouped(bits, group, width, added)
    assert tensor.format.name == format
    assert np.array_equal(dequantize(tensor), values)
    assert np.array_equal(dequantize(some_rows(tensor, 5, 41)), values[5:41])
    assert len(tensor.data) == tensor.size
    for predicted in (stored_as(tensor), storage_of(tensor, StorageRules())):
        assert (predicted.kind, predicted.bits) == (format, size)
    assert CpuBackend(1).pack_matrix([tensor], [None]).nbytes == tensor.shape[0] * width * size / 8


# ---- models: the goldens, whose groups have 32 columns, with the factors of every other group left out ----


def first_groups(stored: dict[str, Tensor], columns: tuple[str, ...], rows: tuple[str, ...] = ()) -> None:
    """Leaves out all but the first of two columns, or rows, of these tensors."""
    for name, tensor in stored.items():
        values = tensor.data.view(f"u{tensor.format.bytes}").reshape(tensor.shape)
        if name.endswith(columns):
            values = values[:, :1]
        elif name.endswith(rows or ("nothing",)):
            values = values[:1]
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        stored[name] = replace(tensor, shape=values.shape, source=data)


def of_64(said: Any) -> Any:
    """Returns the same config with groups of 64."""
    if isinstance(said, dict):
        return {key: 64 if key == "group_size" else of_64(value) for key, value in said.items()}
    return said


Edit = Callable[[dict[str, Tensor]], None]
MLX: Edit = lambda stored: first_groups(stored, ("scales", "biases"))  # noqa: E731


@pytest.mark.parametrize(
    ("kind", "edit", "kept"),
    [
        ("awq", lambda stored: first_groups(stored, (), ("scales", "qzeros")), {"U4_ZERO_64"}),
        ("int4-zeros", lambda stored: first_groups(stored, ("weight_scale", "zero_point")), {"U4_ZERO_64"}),
        ("mlx", MLX, {"U4_MIN_64", "U8_MIN_64", "BF16"}),
        ("mlx-3-6", MLX, {"U4_MIN_64", "U6_MIN_64"}),
    ],
)
def test_models_with_groups_of_64_compute_what_the_reference_does(
    kind: str, edit: Edit, kept: set[str], tmp_path: Path
) -> None:
    """On a CPU, activations are rounded to 8 bits."""
    folder = tmp_path / kind
    shutil.copytree(FOLDER / kind, folder)
    (folder / "config.json").write_text(json.dumps(of_64(json.loads((folder / "config.json").read_text()))))
    stored = read_safetensors(FOLDER / kind / "model.safetensors")
    edit(stored)
    write_safetensors(folder / "model.safetensors", stored)
    checkpoint = open_checkpoint(folder)
    named = checkpoint.tensors.items()
    assert {tensor.format.name for name, tensor in named if name[-2:] in (".q", ".k", ".o")} == kept
    tokens = np.load(FOLDER / kind / "expected.npz")["tokens"].tolist()
    answers = []
    for backend in (RefBackend(), CpuBackend(2, kv="f32")):
        backend.load(load_model(checkpoint, backend))
        backend.reserve_kv(4, 16)
        answers.append(backend.logits(greedy_batch([Chunk(tokens, 0, range(4))])))
    assert np.linalg.norm(answers[1] - answers[0]) < 0.06 * np.linalg.norm(answers[0])

"""A weight takes the memory that the plan says, in every format and role, because both ask storage.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.cuda.exchange import leaves
from penstock.backend.cuda.experts import pack_matrices
from penstock.backend.cuda.packer import CudaPacker, host_workspace
from penstock.backend.cuda.storage import CODE_BITS, FP8, StorageRules, WeightLayout, common_layout, storage_of
from penstock.backend.cuda.weights import PackTarget
from penstock.model.random_tensor import random_tensor
from penstock.model.roles import EXPERTS, MLA, Role
from penstock.model.tensor import FP8 as FP8_FORMATS
from penstock.model.tensor import PLAIN, Scales, Stack, Tensor
from tests.cuda.device import TILINGS

SHAPES = ((32, 256), (20, 512))  # rows that fill tiles, and others
ROLES = (Role.MLP_IN, Role.ROUTER, Role.EXPERT_IN, Role.MLA_HEADS, Role.EMBEDDING, None)
FORMATS = (*CODE_BITS, *PLAIN, "EXL3-3", FP8)


def tensors(format: str, role: Role | None) -> Iterator[Tensor]:
    """Yields tensors of a format: of several shapes, and with all kinds of scales."""
    rng = np.random.default_rng(0)
    for shape in SHAPES if format != "EXL3-3" else ((128, 256),):
        if format == FP8:
            whole = Tensor("w", FP8_FORMATS[FP8], shape, rng.integers(0, 100, shape, np.uint8).reshape(-1))
            for columns in (0, 64, 128, shape[1], 2 * shape[1]):
                values = np.ones((1, -(-shape[1] // columns)) if columns else (1, 1), np.float32)
                yield replace(whole, role=role, scales=Scales(values, 64, columns) if columns else None)
            continue
        tensor = replace(random_tensor(rng, format, *shape), role=role)
        yield tensor
        if format in CODE_BITS:
            yield replace(tensor, scales=Scales(np.full((1, 1), 3, np.float32), shape[0], shape[1]))


def packed_bytes(weight: Any) -> int:
    storages = {part.untyped_storage() for part in leaves(weight) if isinstance(part, torch.Tensor)}
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def packed(packer: CudaPacker, tensor: Tensor) -> Any:
    if tensor.role in MLA:
        return packer.pack_heads(replace(tensor, shape=(4, tensor.shape[0] // 4, tensor.shape[1])))
    if tensor.role in EXPERTS:
        return pack_matrices([Stack([tensor], [None])], packer.target)
    return packer.pack_matrix([tensor], [None])


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_takes_what_is_planned(format: str, role: Role | None) -> None:
    for quantize in ("", "fp8", "int4") if format in PLAIN else ("",):
        target = PackTarget(host_workspace(TILINGS), torch.bfloat16, quantize)
        for tensor in tensors(format, role):
            weight = packed(CudaPacker(target), tensor)
            planned = storage_of(tensor, target.rules)
            assert packed_bytes(weight) == planned.bytes == planned.as_stored().bytes(tensor), planned


def test_a_vector_takes_four_bytes_for_each_value() -> None:
    vector = random_tensor(np.random.default_rng(0), "BF16", 64)
    target = PackTarget(host_workspace(TILINGS), torch.bfloat16, "int4")
    assert packed_bytes(CudaPacker(target).pack_vector(vector)) == storage_of(vector, target.rules).bytes == 256


def test_parts_of_one_matrix_have_one_layout() -> None:
    rng, rules = np.random.default_rng(0), StorageRules("int4")
    q4, q6, plain = (replace(random_tensor(rng, name, 32, 256), role=Role.MLP_IN) for name in ("Q4_K", "Q6_K", "BF16"))
    router = replace(plain, role=Role.ROUTER)
    assert common_layout([q4, q6], rules, experts=False) is WeightLayout.CODES
    assert common_layout([q4, q6], rules, experts=True) is WeightLayout.VALUES, "kernels read one format"
    assert common_layout([q4, plain], rules, experts=False) is WeightLayout.VALUES
    assert common_layout([plain, plain], rules, experts=False) is WeightLayout.INT4
    assert common_layout([plain, router], rules, experts=False) is WeightLayout.VALUES

"""Scales that are floats of 8 bits: packed weights keep them as they are, and every one of them is read as defined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.cpu._native import isas
from penstock.model.dequantize import dequantize
from penstock.model.tensor import FORMATS, Tensor
from tests.small_scales import CODES, WIDTH, weight_of_every_scale


class Model:
    """Gives the rows of a table, or the products of the first one with a weight."""

    def __init__(self, backend: CpuBackend, table: Tensor, weight: Tensor | None = None) -> None:
        self.table = backend.pack_matrix([table], [None])
        self.weight = weight and backend.pack_matrix([weight], [None])

    def forward(self, ops: Any) -> Any:
        rows = ops.embed(self.table)
        return ops.take_sampled(ops.linear(rows, self.weight) if self.weight else rows)


@pytest.mark.parametrize("format", CODES)
def test_rows_have_the_values_of_the_definition(format: str):
    weight = weight_of_every_scale(format)
    backend = CpuBackend(1)
    backend.load(Model(backend, weight))
    rows = range(len(CODES[format]))
    got = backend.logits(greedy_batch([Chunk([row], 0, [0]) for row in rows]))
    assert np.array_equal(got, dequantize(weight))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("count", [1, 12])
@pytest.mark.parametrize("format", CODES)
def test_products_with_every_scale(format: str, count: int, isa: str):
    weight = weight_of_every_scale(format)
    x = np.random.default_rng(1).uniform(0.5, 1, (1, WIDTH)).astype(np.float32)
    backend = CpuBackend(1, isa=isa)
    backend.load(Model(backend, Tensor("x", FORMATS["F32"], x.shape, x.reshape(-1).view(np.uint8)), weight))
    got = backend.logits(greedy_batch([Chunk([0], 0, [0])] * count)).astype(np.float64)
    wanted = dequantize(weight).astype(np.float64) @ x[0]
    assert (np.abs(got - wanted) <= 5e-3 * wanted).all()  # rounded rows are nearer, the next scale is farther


@pytest.mark.parametrize(("format", "bits"), [("NVFP4", 4.5), ("MXFP4", 4.25)])
def test_weights_take_the_bits_of_their_file(format: str, bits: float):
    tensor = Tensor("weight", FORMATS[format], (16, 2880), np.zeros(16 * 2880 * int(8 * bits) // 64, np.uint8))
    backend = CpuBackend(1)
    assert backend.stored_as(tensor)[:2] == (format, bits)
    line = 64  # to which a panel of 16 rows is rounded up
    assert 0 <= backend.pack_matrix([tensor], [None]).nbytes - tensor.size < line

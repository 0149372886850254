"""EXL3 weights on a CPU: their products on every instruction set, what they take, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.backend.base import Floats
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.cpu._native import Program, Weight, isas, packed_bits
from penstock.model.dequantize import dequantize
from penstock.model.low_rank import LowRankPart, LowRankUpdate
from penstock.model.random_tensor import random_tensor
from penstock.model.roles import Role
from penstock.model.tensor import Tensor

BOOKS = ("3inst", "mcg", "mul1")
WIDTH, TOKENS = 256, 130  # more than are multiplied at once
ROUNDING = 5e-4  # kernels do not round numbers to float16


class Product:
    """Multiplies the rows of a table with a weight: all of them, or those that are sampled."""

    def __init__(self, backend: Any, table: Tensor, parts: list[Tensor], bias: list[Tensor | None], head: bool) -> None:
        self.table, self.weight = backend.pack_matrix([table], [None]), backend.pack_matrix(parts, bias)
        self._head = head

    def forward(self, ops: Any) -> Any:
        rows = ops.embed(self.table)
        if self._head:
            return ops.linear(ops.take_sampled(rows), self.weight)
        return ops.take_sampled(ops.linear(rows, self.weight))


def loaded(isa: str, bits: int) -> tuple[CpuBackend, Product, Floats]:
    """Returns a product with a part for each code book, and what it is of all tokens."""
    rng = np.random.default_rng(bits)
    table = random_tensor(rng, "F32", TOKENS, WIDTH)
    parts = [random_tensor(rng, f"EXL3-{bits}-{book}", 128 * (1 + i), WIDTH) for i, book in enumerate(BOOKS)]
    bias = [None, random_tensor(rng, "F32", 256), None]
    backend = CpuBackend(2, isa=isa)
    model = Product(backend, table, parts, bias, head=bits % 2 == 0)
    backend.load(model)
    backend.reserve_kv(TOKENS // 16 + 1, 16)
    wanted = dequantize(table) @ np.concatenate([dequantize(part) for part in parts]).T
    wanted[:, 128:384] += dequantize(bias[1])
    return backend, model, wanted


def rows_of(backend: CpuBackend, count: int, adapters: tuple[int, ...] = ()) -> Floats:
    batch = greedy_batch([Chunk(list(range(count)), 0, range(TOKENS // 16 + 1), sample=count)])
    return backend.logits(replace(batch, adapters=np.array(adapters, np.int32)))


def difference(got: Floats, wanted: Floats) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("bits", range(1, 9))
def test_products_follow_the_definition_in_any_batch(bits: int, isa: str) -> None:
    backend, _, wanted = loaded(isa, bits)
    alone = rows_of(backend, 1)[0]
    for count in (2, 7, TOKENS):
        got = rows_of(backend, count)
        assert difference(got, wanted[:count]) < ROUNDING
        assert np.array_equal(got[0], alone)


@pytest.mark.parametrize("isa", isas())
def test_adapters_are_added(isa: str) -> None:
    backend, model, wanted = loaded(isa, 3)
    rng = np.random.default_rng(0)
    a, b = (rng.normal(0, 0.1, shape).astype(np.float32) for shape in ((4, WIDTH), (256, 4)))
    update = LowRankUpdate(model.weight, (LowRankPart(128, a, b),))
    backend.adapters.load(0, backend.adapters.pack([update]))
    plain, adapted = rows_of(backend, 9), rows_of(backend, 9, (0,))
    assert np.array_equal(plain[:, :128], adapted[:, :128])
    assert np.array_equal(plain[:, 384:], adapted[:, 384:])
    table = dequantize(random_tensor(np.random.default_rng(3), "F32", TOKENS, WIDTH))[:9]
    assert difference((adapted - plain)[:, 128:384], table @ a.T @ b.T) < 2e-3
    assert difference(plain, wanted[:9]) < ROUNDING


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_weights_take_the_bits_of_their_file_and_two_vectors(bits: int) -> None:
    backend, tensor = CpuBackend(1), random_tensor(np.random.default_rng(0), f"EXL3-{bits}", 256, 512)
    packed = backend.pack_matrix([tensor], [None])
    assert packed.nbytes == 256 * 512 * bits // 8
    assert backend.stored_as(tensor).kind == f"EXL3-{bits}"
    assert backend.stored_as(tensor).bytes(tensor) == packed.nbytes + 4 * (256 + 512)
    assert packed_bits(f"EXL3-{bits}-mcg") == bits


@pytest.mark.parametrize("role", [Role.MLA_KV_B, Role.EMBEDDING])
def test_what_no_plain_product_has_is_widened(role: Role) -> None:
    backend, tensor = CpuBackend(1), random_tensor(np.random.default_rng(0), "EXL3-3", 128, 128)
    tensor = tensor.with_role(role)
    assert backend.stored_as(tensor).kind == "BF16"
    assert backend.pack_matrix([tensor], [None]).nbytes == 2 * 128 * 128


def test_parts_beside_plain_ones_are_widened() -> None:
    rng, backend = np.random.default_rng(0), CpuBackend(1)
    parts = [random_tensor(rng, format, 128, 128) for format in ("EXL3-3", "F16")]
    assert backend.pack_matrix(parts, [None, None]).nbytes == 2 * 2 * 128 * 128


def test_weights_of_one_layout_are_exchanged() -> None:
    rng, backend = np.random.default_rng(0), CpuBackend(1)
    one, other = (backend.pack_matrix([random_tensor(rng, "EXL3-2", 128, 128)], [None]) for _ in range(2))
    backend._packing.finish()
    before = one.packed.copy()
    one.exchange(other)
    assert np.array_equal(other.packed, before)
    assert not np.array_equal(one.packed, before)
    for format in ("EXL3-3", "EXL3-2-mul1"):
        with pytest.raises(ValueError, match="can be exchanged"):
            one.exchange(backend.pack_matrix([random_tensor(rng, format, 128, 128)], [None]))


def test_what_is_malformed_is_refused() -> None:
    weight, zeros = Weight(128, [("EXL3-2-mcg", 128)]), np.zeros(128, np.float32)
    with pytest.raises(ValueError, match="multiples of 128"):
        Weight(64, [("EXL3-2-mcg", 128)])
    with pytest.raises(ValueError, match="no native kernel"):
        Weight(128, [("EXL3-9-mcg", 128)])
    with pytest.raises(ValueError, match="EXL3 parts alone"):
        Weight(128, [("EXL3-2-mcg", 128), ("F16", 128)])
    with pytest.raises(ValueError, match="whole tiles"):
        weight.fill(0, 0, 8, np.zeros(8 * 32, np.uint8))
    with pytest.raises(ValueError, match="a factor for each row and column"):
        weight.set_trellis(0, zeros[:64], zeros)
    with pytest.raises(ValueError, match="no such EXL3 part"):
        Weight(128, [("F16", 128)]).set_trellis(0, zeros, zeros)
    program = Program("generic", 1, "f16")
    out = program.buffer("T", 128, False)
    for refuse in (program.embed, program.embed_positions):
        with pytest.raises(ValueError, match="takes an EXL3 weight"):
            refuse(weight, out)
    with pytest.raises(ValueError, match="takes an EXL3 weight"):
        program.per_head_linear(out, weight, 1, 0, program.buffer("T", 128, False))

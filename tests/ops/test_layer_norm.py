"""Ops of models with layer norms: their reference against the plainest loops, and what a native program refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.cpu._native import Program, Weight
from penstock.backend.ref import cases
from penstock.backend.ref.kv_cache import RefCache
from penstock.backend.ref.ops import Matrix, RefOps


def ops_at(first: int, tokens: int) -> RefOps:
    return RefOps(greedy_batch([Chunk(range(tokens), first, [0])]), RefCache(1, 64))


def test_add_layer_norm():
    rng = np.random.default_rng(0)
    x, residual = rng.normal(size=(2, 3, 5)).astype(np.float32)
    gain, bias = rng.normal(size=(2, 5)).astype(np.float32)
    got, total = ops_at(0, 3).add_layer_norm(x, residual, gain, bias, 1e-2)
    assert np.array_equal(total, x + residual)
    assert ops_at(0, 3).add_layer_norm(x, None, gain, bias, 1e-2)[1] is x
    for row, answer in zip(total.tolist(), got.tolist(), strict=True):
        mean = sum(row) / 5
        deviation = math.sqrt(sum((value - mean) ** 2 for value in row) / 5 + 1e-2)
        wanted = [(value - mean) / deviation * g + b for value, g, b in zip(row, gain, bias, strict=True)]
        assert answer == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("act", "meaning"),
    [
        ("silu", lambda x: x / (1 + math.exp(-x))),
        ("gelu", lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
        ("gelu_tanh", lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2),
        ("relu", lambda x: max(x, 0.0)),
    ],
)
def test_activate(act, meaning):
    x = np.array([[-30.0, -3.0, -0.5], [0.0, 1.0, 30.0]], np.float32)
    wanted = [[meaning(value) for value in row] for row in x.tolist()]
    assert ops_at(0, 2).activate(x, act) == pytest.approx(np.array(wanted), rel=1e-5, abs=1e-7)


def test_the_two_gelus_are_told_apart():
    """By more than an op is allowed to be wrong."""
    x = np.linspace(-4, 4, 100, dtype=np.float32)[:, None]
    exact, near = (ops_at(0, 100).activate(x, act) for act in ("gelu", "gelu_tanh"))
    assert cases.difference(near, exact) > 5 * cases.FLOAT


def test_embed_positions_takes_the_rows_of_positions():
    table = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    assert np.array_equal(ops_at(6, 3).embed_positions(Matrix(table, None)), table[6:])


def test_positions_beyond_the_table_are_refused():
    trial = cases.embed_positions(np.random.default_rng(0), format="F32", width=8)
    backend = CpuBackend(1)
    cases.run(trial, backend)
    backend.logits(greedy_batch([Chunk([0], 39, [0] * 3)]))
    for position in (40, -1):
        with pytest.raises(ValueError, match=f"position {position} is outside the model's 40"):
            backend.logits(greedy_batch([Chunk([0], position, [0] * 3)]))


def test_a_program_checks_these_ops_when_built():
    program = Program("generic", 1, "f16")
    kinds = [("T", 8), ("T", 8), ("T", 4), ("S", 8)]
    wide, other, narrow, sampled = (program.buffer(symbol, width, False) for symbol, width in kinds)
    ones = np.ones(8, np.float32)
    wrong = [
        lambda: program.add_layer_norm(wide, None, ones[:7].copy(), ones, 1e-5, other, None),
        lambda: program.add_layer_norm(wide, None, ones, ones[:7].copy(), 1e-5, other, None),
        lambda: program.add_layer_norm(wide, None, ones, ones, 1e-5, wide, None),
        lambda: program.add_layer_norm(wide, None, ones, ones, 1e-5, narrow, None),
        lambda: program.add_layer_norm(wide, other, ones, ones, 1e-5, other, other),
        lambda: program.add_layer_norm(wide, other, ones, ones, 1e-5, other, None),
        lambda: program.activate(wide, narrow, "silu"),
        lambda: program.activate(wide, sampled, "silu"),
        lambda: program.activate(wide, other, "sine"),
        lambda: program.activate(wide, 99, "silu"),
        lambda: program.embed_positions(Weight(8, [("F32", 3)]), narrow),
        lambda: program.embed_positions(Weight(8, [("F32", 3)]), sampled),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match=r"."):
            call()

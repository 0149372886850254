"""Our interpreter of Gluon finds the faults that are put into kernels here, and nothing where there is none."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import inputs
from penstock.backend.cuda.contexts import BLOCK
from penstock.backend.cuda.graphs import padded
from penstock.backend.cuda.kernels import hopper_attention, hopper_gemm, hopper_low_rank, hopper_mla
from penstock.backend.cuda.kernels.split_k import SplitKScratch
from tests.cuda.device import DEVICE, ints, normal
from tests.cuda.gluon.faults import KernelFault
from tests.cuda.gluon.launch import Interpreter
from tests.cuda.test_hopper_low_rank import Updates
from tests.cuda.test_hopper_mla import attended as attended_with_mla

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU interprets nothing")
WRONG = "differs"  # what is said of a result that is not what it should be

ATTENTION_FAULTS = {
    "wait for the wrong phase": (
        "keys_ready.index(stage), turn // CONFIG.stages & 1)",
        "keys_ready.index(stage), turn // CONFIG.stages & 1 ^ 1)",
        "reads keys, and no barrier orders|deadlock",
    ),
    "no wait for values": (
        "mbarrier.wait(buffers.values_ready.index(before), (turn - 1) // CONFIG.stages & 1)",
        "pass",
        "reads values, and no barrier orders that after values_ready",
    ),
    "no wait for a free stage": (
        "mbarrier.wait(free.index(stage), (turn // CONFIG.stages & 1) ^ 1)",
        "pass",
        "overwrites|arrives at",
    ),
    "stage freed before its product has ended": (
        "score = warpgroup_mma_wait(1, deps=[score])\n        mbarrier.arrive(buffers.keys_free.index(stage))",
        "mbarrier.arrive(buffers.keys_free.index(stage))\n        score = warpgroup_mma_wait(1, deps=[score])",
        "overwrites keys, .*(still reads|has read it)",
    ),
    "stage never freed": ("mbarrier.arrive(buffers.values_free.index(before))", "pass", "deadlock"),
    "stage freed by one of two": (
        "init(keys_free.index(stage), count=2)",
        "init(keys_free.index(stage), count=1)",
        "overwrites|ends another phase",
    ),
    "product not waited for": (
        "score = warpgroup_mma_wait(1, deps=[score])",
        "pass",
        "before it has waited",
    ),
    "one product too few waited for": (
        "warpgroup_mma_wait(1, deps=[score])",
        "warpgroup_mma_wait(2, deps=[score])",
        "before it has waited",
    ),
    "registers not kept": (
        "mix, weights = warpgroup_mma_wait(0, deps=[mix, weights])\n        mbarrier",
        "mix = warpgroup_mma_wait(0, deps=[mix])\n        mbarrier",
        "does not keep the registers",
    ),
    "queries not fenced": ("wanted, 0.0))\n    fence_async_shared()", "wanted, 0.0))", "without a fence"),
    "cleared tail not fenced": (
        "gl.zeros_like(value)))\n        fence_async_shared()",
        "gl.zeros_like(value)))",
        "without a fence",
    ),
    "too many bytes expected": ("CONFIG.tile * SHAPE.dims * 2)", "CONFIG.tile * SHAPE.dims * 4)", "deadlock"),
    "too few bytes expected": (
        "CONFIG.tile * SHAPE.dims * 2)",
        "CONFIG.tile * SHAPE.dims)",
        "over before it landed|ends with",
    ),
    "turn given that nobody takes": (
        "await_turn(WHICH)  # the other one gave one turn more than it took",
        "pass",
        "threads at named barrier",
    ),
    "mask one position short": ("column <= newest", "column < newest", WRONG),
    "no mask of rows": ("0.0))\n    fence", "0.0))\n    wanted = wanted | True\n    fence", "do not exist"),
    "stage that does not exist": (
        "stage = turn % CONFIG.stages\n    mbarrier",
        "stage = turn\n    mbarrier",
        "no element",
    ),
    "tail not cleared": ("    _clear_tail(buffers, span, CONFIG)\n", "", WRONG),
}
GEMM_FAULTS = {
    "wait for the wrong phase": (
        "turn // STAGES & 1)",
        "turn // STAGES & 1 ^ 1)",
        "reads left_tiles, and no barrier orders|deadlock",
    ),
    "stage filled before its product has ended": (
        "warpgroup_mma_wait(2, deps=[left, right])",
        "warpgroup_mma_wait(4, deps=[left, right])",
        "overwrites .* still reads",
    ),
    "last products not waited for": (
        "return warpgroup_mma_wait(0, deps=[left, right])",
        "return left, right",
        "before it has waited",
    ),
    "bytes of x not expected": ("(2 * ROWS + COUNT) * WIDTH", "2 * ROWS * WIDTH", "deadlock|over before it landed"),
    "copy after the last tile": ("(turn > FILLED - STAGES) & (ahead < last)", "turn > FILLED - STAGES", "ends with"),
    "no mask of rows": ("(line < rows) & (item < count)", "item < count", "do not exist"),
    "no wait for the kernel before": (
        "gdc_wait()\n        _fetch_items(x, items, ready, first, last, steps, FILLED, WIDTH)\n        begin",
        "pass\n        _fetch_items(x, items, ready, first, last, steps, FILLED, WIDTH)\n        begin",
        "before it has waited for the kernel",
    ),
    "next column forgotten": ("column = ahead % steps * WIDTH", "column = at % steps * WIDTH", WRONG),
}

MLA_FAULTS = {
    "stage freed before its product has ended": (
        "score = warpgroup_mma_wait(1, deps=[score])\n        mbarrier.arrive(buffers.keys_free.index(stage))",
        "mbarrier.arrive(buffers.keys_free.index(stage))\n        score = warpgroup_mma_wait(1, deps=[score])",
        "overwrites (nope|rope)_tiles, .*(still reads|has read it)",
    ),
    "one product too few waited for": (
        "score = warpgroup_mma_wait(1, deps=[score])",
        "score = warpgroup_mma_wait(2, deps=[score])",
        "before it has waited",
    ),
    "bytes of rotated keys not expected": (
        "CONFIG.tile * (CONFIG.nope + CONFIG.rope) * 2)",
        "CONFIG.tile * CONFIG.nope * 2)",
        "over before it landed|deadlock|ends with",
    ),
    "rotated keys forgotten": (
        "return warpgroup_mma(buffers.rope_queries.index(WHICH), rope, score, is_async=True)",
        "return score",
        WRONG,
    ),
    "keys of another head": ("line = span.head * CONFIG.room + position", "line = position", WRONG),
    "mix of earlier pieces not shrunk": (
        "True, CONFIG)\n    mix = mix * gl.convert_layout(shrink, gl.SliceLayout(1, MIX))[:, None]\n",
        "True, CONFIG)\n",
        WRONG,
    ),
    "earlier pieces forgotten": ("context < 0, end <= ROOM", "context < -9999, end <= ROOM", WRONG),
    "answer before the last piece": ("context < 0, end <= ROOM", "context < 0, end > 0", WRONG),
}

UPDATE_FAULTS = {
    "B not fenced": ("fence_async_shared()\n        left = ", "left = ", "without a fence"),
    "product not waited for": (
        "left, right = warpgroup_mma_wait(0, deps=[left, right])\n    return",
        "pass\n    return",
        "before it has waited|overwrites",
    ),
    "every adapter for every row": (
        "gl.where(mine[:, :, None], values, 0.0)",
        "gl.where(mine[:, :, None] | True, values, 0.0)",
        WRONG,
    ),
    "rows that are not there": (
        "there = ((row < count) & (turn < depth))[:, None]",
        "there = row[:, None] >= 0",
        "do not exist",
    ),
    "B of another half": ("(tile % 2 if GATED else RIGHT) * 2048", "(tile % 2 if GATED else 0) * 2048", WRONG),
}


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[Any]:
    """Returns a function that imports a copy of a module with one text replaced."""

    def copy_of(module: ModuleType, text: str, other: str) -> ModuleType:
        source = inspect.getsource(module)
        assert text in source
        path = tmp_path / "faulty_kernel.py"
        path.write_text(source.replace(text, other))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        found = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        return found

    yield copy_of
    sys.modules.pop("faulty_kernel", None)


def attended(kernels: Any) -> torch.Tensor:
    """Returns what a prompt of 40 tokens attends to behind 330 others, beside a shorter one."""
    heads, kv_heads, dims = 8, 2, 64
    batch = greedy_batch([Chunk([0] * 40, 330, range(24)), Chunk([0] * 3, 7, [24])])
    work = inputs.plan_attention(batch, 128 // 4, padded)
    cache = normal(25, 2, kv_heads, 16, dims, dtype=torch.bfloat16)
    cache[23, :, :, 2:] = cache[24, :, :, 10:] = torch.nan
    qkv = normal(len(batch.tokens), (heads + 2 * kv_heads) * dims, dtype=torch.bfloat16, seed=1)
    out = torch.full((len(qkv), heads * dims), torch.nan, dtype=torch.bfloat16)
    about = ints(work.tiles), ints(batch.tables.ravel()), ints([batch.tables.shape[2]]), out, 0.1, 0
    kernels.hopper_attention(qkv, cache, *about, tiling=hopper_attention.HopperAttentionTiling(64, 2))
    return out


def multiplied(kernels: Any) -> torch.Tensor:
    """Returns a product of three rows with a matrix whose rows are no whole number of tiles."""
    weight, x = normal(200, 320, dtype=torch.bfloat16), normal(3, 320, dtype=torch.bfloat16, seed=1)
    out = torch.full((3, 200), torch.nan, dtype=torch.bfloat16)
    tiling = hopper_gemm.Tiling(1, 2, 3)
    kernels.hopper_gemm(x, weight, None, out, tiling, SplitKScratch.on(torch.device("cpu")))
    return out


def attended_in_pieces(kernels: Any) -> torch.Tensor:
    """Returns what 70 tokens find behind 300 others, in pieces of two tiles."""
    tiling = hopper_attention.HopperAttentionTiling(64, 2)
    return attended_with_mla([(70, 300)], 2 * BLOCK, torch.bfloat16, tiling, kernels.hopper_mla)[0]


def updated(kernels: Any) -> torch.Tensor:
    """Returns a product of three rows that adapters update, two of which have one. The product itself is right."""
    updates = Updates(256, 320, 20, False, 4)
    weight, x = normal(256, 320, dtype=torch.bfloat16), normal(3, 320, dtype=torch.bfloat16, seed=1)
    out = torch.full((3, 256), torch.nan, dtype=torch.bfloat16)
    known = updates.of(x, [2, -1, 0])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("find_updates", "low_rank_sums"):
            patch.setattr(hopper_gemm, name, getattr(kernels, name))
        patch.setattr("tests.cuda.gluon.launch.INTERPRETER", Interpreter())  # knows none of these functions yet
        scratch = SplitKScratch.on(torch.device("cpu"))
        hopper_gemm.hopper_gemm(x, weight, None, out, hopper_gemm.Tiling(1, 1, 3), scratch, updates=known)
    return out


def check(run: Any, module: ModuleType, right: ModuleType, expected: str) -> None:
    """Expects a fault to be reported, or the result to be wrong where only that can be seen."""
    wanted = run(right)
    assert not wanted.isnan().any()
    if expected == WRONG:
        assert not torch.allclose(run(module), wanted, equal_nan=True)
    else:
        with pytest.raises(KernelFault, match=expected):
            run(module)


@pytest.mark.parametrize("name", ATTENTION_FAULTS)
def test_faults_of_attention_are_found(name: str, faulty: Any) -> None:
    text, other, expected = ATTENTION_FAULTS[name]
    check(attended, faulty(hopper_attention, text, other), hopper_attention, expected)


@pytest.mark.parametrize("name", GEMM_FAULTS)
def test_faults_of_products_are_found(name: str, faulty: Any) -> None:
    text, other, expected = GEMM_FAULTS[name]
    check(multiplied, faulty(hopper_gemm, text, other), hopper_gemm, expected)


@pytest.mark.parametrize("name", MLA_FAULTS)
def test_faults_of_mla_are_found(name: str, faulty: Any) -> None:
    text, other, expected = MLA_FAULTS[name]
    check(attended_in_pieces, faulty(hopper_mla, text, other), hopper_mla, expected)


@pytest.mark.parametrize("name", UPDATE_FAULTS)
def test_faults_of_updates_are_found(name: str, faulty: Any) -> None:
    text, other, expected = UPDATE_FAULTS[name]
    check(updated, faulty(hopper_low_rank, text, other), hopper_low_rank, expected)

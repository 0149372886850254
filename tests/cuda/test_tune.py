"""What `penstock doctor --tune` measures, with a clock of the test's own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from penstock.backend.cuda.device_properties import DeviceProperties
from penstock.backend.cuda.kernels.skinny_gemm import SplitKScratch
from penstock.backend.cuda.tune import CHOSEN, SHAPES, Bench, Call, call_of, candidates, matrix, measure, products
from penstock.backend.cuda.tuned_tilings import Product
from tests.cuda.device import DEVICE, normal
from tests.cuda.test_tilings import stage_bytes
from tests.engine.test_device_properties import A100, GPUS, RTX_4090


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
def test_candidates_fit_shared_memory(device: DeviceProperties) -> None:
    for product in products(device, SHAPES):
        tilings = candidates(device, product)
        assert len(tilings) > 2, product
        if product.kernel not in ("gemv", "expert_gemv", "small_gemm"):
            arguments = product.count, product.rows, product.width, 2, False
            sizes = [tiling.stages * stage_bytes(product.kernel, arguments, tiling) for tiling in tilings]
            assert max(sizes) <= device.shared_memory


def test_fp8_is_measured_only_where_the_gpu_has_it() -> None:
    kinds = [{product.kind for product in products(device, SHAPES)} for device in (A100, RTX_4090)]
    assert kinds[1] - kinds[0] == {"fp8"}


def test_the_fastest_candidate_that_runs_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock likes the third candidate best; the second does not run."""
    monkeypatch.setattr("penstock.backend.cuda.tune.KINDS", {"gemv": ("16 bits",)})
    times = iter([3.0, -1.0, 1.0, *[2.0] * 100])

    def seconds(calls: Sequence[Call]) -> float:
        took = next(times)
        if took < 0:
            raise RuntimeError("out of resources")
        calls[0]()
        return took

    device = torch.device(DEVICE)
    bench = Bench(device, A100, SplitKScratch.on(device), seconds)
    lines: list[str] = []
    product = Product("gemv", "16 bits", 1, 32, 64)
    assert measure(bench, [(32, 64)], lines.append) == [(product, tuple(candidates(A100, product)[2]))]
    assert len(lines) == 1


@pytest.mark.parametrize("kind", ["16 bits", "fp8"])
@pytest.mark.parametrize("gated", [False, True])
def test_experts_are_measured_with_the_matrices_of_all_that_are_chosen(kind: str, gated: bool) -> None:
    device, product = torch.device(DEVICE), Product("expert_gemv", kind, 1, 16, 512, gated)
    bench = Bench(device, RTX_4090, SplitKScratch.on(device), lambda calls: calls[0]() or 1.0)
    weight, tiling = matrix(bench, product), candidates(RTX_4090, product)[0]
    values = weight.values.float() * weight.scales[:, None] if kind == "fp8" else weight.float()
    x, out = normal(1, 512, dtype=torch.bfloat16), torch.empty(CHOSEN, 16, device=DEVICE, dtype=torch.bfloat16)
    call_of(product, x, weight, out, tiling, bench.scratch)()
    wanted = (values @ x[0].float()).view(CHOSEN, -1)
    if gated:
        wanted = torch.nn.functional.silu(wanted[:, :16]) * wanted[:, 16:]
    torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(DEVICE == "cpu", reason="takes minutes in the interpreter")
def test_every_product_runs() -> None:
    device = torch.device(DEVICE)

    def seconds(calls: Sequence[Call]) -> float:
        calls[0]()
        return 1.0

    bench = Bench(device, RTX_4090, SplitKScratch.on(device), seconds)
    assert len(measure(bench, [(256, 1024)])) == len(list(products(RTX_4090, [(256, 1024)])))

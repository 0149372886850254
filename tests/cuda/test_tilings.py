"""Tilings of GPUs that are not here: what is chosen for an H200 is what was measured, what others get fits them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend, quantized_tilings
from penstock.backend.cuda import tilings as dense_tilings
from penstock.backend.cuda.device_properties import DeviceProperties
from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.fp8_weights import Fp8Matrix
from penstock.backend.cuda.kernels.expert_gemm import block_tiling
from penstock.backend.cuda.kernels.split_k import MAX_PARTIALS
from penstock.backend.cuda.storage import StorageRules, storage_of
from penstock.backend.cuda.tuned_tilings import Product, TunedTilings, entry_name, write_tuned
from penstock.backend.cuda.weights import DenseMatrix
from penstock.errors import ConfigError
from penstock.model.tensor import FP8, Tensor
from tests.cuda.device import DEVICE, HALF
from tests.cuda.test_backend import BLOCK_SIZE, SLOTS, expected, loaded
from tests.engine.test_device_properties import A100, B200, GPUS, H100, H200, RTX_4090

COUNTS = (1, 2, 4, 5, 8, 16, 17, 32, 33, 64, 65, 100, 128, 129, 200, 256)
HEIGHTS = (16, 576, 1536, 2048, 4096, 6144, 6400, 8448, 14336, 16384, 28672, 128256)
SHAPES = list(product(HEIGHTS, (64, 576, 1536, 4096, 14336)))
ROWS = [(count, *shape) for count in COUNTS for shape in SHAPES]
BOTH = False, True
GATES = list(product(BOTH, BOTH))
DIGESTS = {  # of all that the tables chose before they knew of other GPUs
    "gemv": "a7d2f13c8377dfac",
    "skinny": "401e866b3f4f743d",
    "hopper_gemm": "07ae60fe5016bd03",
    "small_gemm": "8696a2ef46a60128",
    "quant_gemv": "8d3b9914d7b4e286",
    "quant_gemm": "aafae5ab21b4a37b",
    "fp8_gemm": "85984b0c1953cb28",
    "fp8_block_gemm": "a93e6c224a883b25",
}


def asked(kernel: str) -> Iterator[tuple[Any, ...]]:
    """Yields the arguments of many choices."""
    kinds = "4 bits", "more bits", "fp8"
    some = {
        "gemv": SHAPES,
        "skinny": [(*row, size, gated) for row in ROWS for size in (2, 4) for gated in BOTH],
        "hopper_gemm": [(*row, size, gated) for row in ROWS if row[0] <= 128 for size in (1, 2) for gated in BOTH],
        "small_gemm": [(kind, *row, gated) for kind in kinds for row in ROWS if row[0] <= 16 for gated in BOTH],
        "quant_gemv": [
            (groups, *shape, gated, t) for groups in (1, 2, 4) for shape in SHAPES for gated in BOTH for t in BOTH
        ],
        "quant_gemm": ROWS,
        "fp8_gemm": ROWS,
        "fp8_block_gemm": ROWS,
    }
    return iter(some[kernel])


@pytest.mark.parametrize("device", [H100, H200], ids=lambda device: device.name)
@pytest.mark.parametrize("kernel", DIGESTS)
def test_an_h100_and_an_h200_have_the_tilings_that_were_measured(kernel: str, device: DeviceProperties) -> None:
    choose = getattr(Tilings(device), kernel)
    chosen = [(found := choose(*arguments)) and tuple(found) for arguments in asked(kernel)]
    assert hashlib.blake2b(repr(chosen).encode(), digest_size=8).hexdigest() == DIGESTS[kernel]


def test_attention_of_an_h200_is_as_it_was_measured() -> None:
    tilings = Tilings(H200)
    assert tilings.prefill_attention(128, 128, 2) == (64, 8, 3)
    assert tilings.prefill_attention(128, 256, 2) == (64, 8, 2)
    assert [tilings.hopper_attention(dims) for dims in (64, 128, 256)] == [(128, 3), (128, 3), (64, 2)]
    assert tilings.hopper_attention(80) is Tilings(B200).hopper_attention(128) is None
    assert tilings.decode_attention(1, 128, 2) == tilings.decode_attention(8, 256, 2) == (64, 4, 2)
    assert tilings.decode_attention(8, 128, 2) == (64, 2, 2)
    assert tilings.mla_prefill(576, 2) == (64, 32, 8, 2)
    assert (tilings.mla_decode(128, 576, 2), tilings.mla_decode(16, 576, 2)) == ((64, 32, 8, 3), (16, 32, 4, 3))
    assert block_tiling(H200, 128, 2) == (128, 64, 8, 4)


def stage_bytes(kernel: str, arguments: tuple[Any, ...], tiling: Any) -> int:
    """What one stage takes, said again from the shapes of the tiles."""
    if kernel == "skinny":
        count, _, _, itemsize, gated = arguments
        items = next(size for size in (16, 32, 64) if size >= count)
        return int((tiling.rows * (1 + gated) + items) * tiling.width * itemsize)
    if kernel == "fp8_block_gemm":
        return int((tiling.rows + tiling.items * (2 if arguments[0] <= 16 else 1)) * 128)
    return int((16 * tiling.tiles + tiling.rows) * 64 * tiling.steps * (2 if kernel == "quant_gemm" else 1))


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
@pytest.mark.parametrize("kernel", ["skinny", "quant_gemm", "fp8_gemm", "fp8_block_gemm"])
def test_every_product_fits_shared_memory_and_scratch(kernel: str, device: DeviceProperties) -> None:
    choose = getattr(Tilings(device), kernel)
    for arguments in asked(kernel):
        if tiling := choose(*arguments):
            assert tiling.stages >= 1
            assert tiling.stages * stage_bytes(kernel, arguments, tiling) <= device.shared_memory, (arguments, tiling)
            gated = kernel == "skinny" and arguments[-1]
            assert tiling.split == 1 or tiling.split * arguments[0] * arguments[1] * (1 + gated) <= MAX_PARTIALS


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
@pytest.mark.parametrize("dims", [64, 80, 128, 192, 256])
def test_attention_fits_shared_memory(dims: int, device: DeviceProperties) -> None:
    tilings, wide = Tilings(device), 1 << (dims - 1).bit_length()
    for queries, tiling in ((128, tilings.prefill_attention(128, dims, 2)), (16, tilings.decode_attention(4, dims, 2))):
        assert tiling.tile >= 16
        assert 2 * wide * (queries + 2 * tiling.tile * tiling.stages) <= device.shared_memory
    if hopper := tilings.hopper_attention(dims):
        assert 2 * wide * (128 + 2 * hopper.tile * hopper.stages) + 1024 <= device.shared_memory
    for mla in (tilings.mla_prefill(576, 2), *(tilings.mla_decode(heads, 576, 2) for heads in (1, 16, 20, 128))):
        assert 2 * 576 * (mla.queries + mla.positions * max(mla.stages - 1, 1)) <= device.shared_memory
    expanded = tilings.mla_expanded(dims, 64, dims, 2)
    assert 2 * (128 * (wide + 64) + expanded.tile * expanded.stages * (2 * wide + 64)) <= device.shared_memory
    assert tilings.expand_latents(dims, dims, 2) * 2 * 64 * (128 + 2 * wide) <= device.shared_memory


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
def test_experts_fit_shared_memory(device: DeviceProperties) -> None:
    for size, itemsize in product((16, 32, 64, 128), (2, 4)):
        tiling = block_tiling(device, size, itemsize)
        assert tiling.stages * (tiling.rows + size) * tiling.width * itemsize <= device.shared_memory


def test_programs_follow_the_number_of_multiprocessors() -> None:
    small, large = (Tilings(device).skinny(4, 4096, 4096, 2) for device in (RTX_4090, B200))
    assert small
    assert large
    assert (small.split, large.split) == (2 * 128 // 64, 2 * 148 // 64)


def test_only_hopper_has_its_kernel() -> None:
    assert [device.name for device in GPUS if device.has_hopper_gemm] == [H100.name, H200.name]


MEASURED = {
    Product("quant_gemm", "4 bits", 64, 4096, 4096): (8, 64, 1, 2, 8, 2),
    Product("small_gemm", "4 bits", 16, 4096, 4096): (2, 4, 2, 1),
    Product("gemv", "16 bits", 1, 4096, 4096): (2, 512, 8),
    Product("expert_gemv", "fp8", 1, 768, 2048, True): (1, 1024, 2),
}


def test_measured_tilings_win(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tilings.json"
    write_tuned(path, A100.name, MEASURED.items())
    tilings = Tilings.of(A100, path)
    assert tilings.quant_gemm(40, 4096, 4096) == (8, 64, 1, 2, 8, 2)
    assert tilings.quant_gemm(65, 4096, 4096) == quantized_tilings.quant_gemm_tiling(A100, 65, 4096, 4096)
    assert tilings.small_gemm("4 bits", 9, 4096, 4096) == (2, 4, 2, 1)
    assert tilings.small_gemm("4 bits", 9, 4096, 4096, True) == quantized_tilings.small_gemm_tiling(
        "4 bits", 9, 4096, 4096, True
    )
    assert tilings.gemv(4096, 4096) == (2, 512, 8)
    assert tilings.gemv(4096, 2048) == (2, 512, 8)
    assert tilings.gemv(4096, 1024) == dense_tilings.gemv_tiling(4096, 1024)
    assert tilings.expert_gemv(1, 1408, 2048, True) == (1, 1024, 2)
    for itemsize, gated in ((1, False), (2, True)):
        usual = dense_tilings.expert_gemv_tiling(itemsize, gated)
        assert tilings.expert_gemv(itemsize, 768, 2048, gated) == usual
    assert not caplog.records


@pytest.mark.parametrize(("itemsize", "gated"), [(1, False), (1, True), (2, False), (2, True), (4, True)])
def test_lanes_of_experts_read_16_bytes_and_have_registers_for_them(itemsize: int, gated: bool) -> None:
    lines, lanes, warps = dense_tilings.expert_gemv_tiling(itemsize, gated)
    assert lanes * itemsize == 16 * 32 * warps
    assert lines * lanes * (2 if gated else 1) <= 64 * 32 * warps


@pytest.mark.parametrize("entry", [entry_name("another GPU"), entry_name(A100.name) + "0"])
def test_measured_tilings_of_others_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture, entry: str) -> None:
    path = tmp_path / "tilings.json"
    write_tuned(path, A100.name, MEASURED.items())
    path.write_text(json.dumps({entry: json.loads(path.read_text())[entry_name(A100.name)]}))
    with caplog.at_level(logging.WARNING):
        tilings = Tilings.of(A100, path)
    assert tilings.gemv(4096, 4096) == dense_tilings.gemv_tiling(4096, 4096)
    assert "penstock doctor --tune" in caplog.text


def test_a_measured_split_fits_the_scratch_memory_of_a_taller_matrix() -> None:
    tuned = TunedTilings({Product("quant_gemm", "4 bits", 256, 8192, 4096): (4, 128, 1, 4, 4, 3)})
    tilings = Tilings(A100, tuned)
    assert tilings.quant_gemm(256, 8192, 4096).split == 4
    assert tilings.quant_gemm(256, 16384, 4096).split == 2


def backend_like(properties: DeviceProperties, path: Path | None = None, **options: Any) -> CudaBackend:
    return CudaBackend(256, 64, device=DEVICE, tilings=Tilings.of(properties, path), **{"dtype": HALF} | options)


def test_a_model_runs_with_the_tilings_of_an_a100(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens, logits = expected("llama3")
    backend = loaded("llama3", backend_like(A100, tmp_path / "none.json", dtype=torch.float32))
    assert caplog.text.count("penstock doctor --tune") == 1
    assert backend.name == A100.name
    backend.reserve_kv(64, BLOCK_SIZE, SLOTS)
    got = backend.logits(greedy_batch([Chunk(tokens, 0, range(64))]))
    assert abs(got - logits).max() < 2e-4


def test_weights_in_fp8_become_16_bits_without_tensor_cores_for_them() -> None:
    format = FP8["F8_E4M3"]
    tensor = Tensor("w", format, (64, 64), torch.zeros(64 * 64, dtype=torch.uint8).numpy())
    kinds: list[tuple[DeviceProperties, type]] = [(A100, DenseMatrix), (RTX_4090, Fp8Matrix)]
    for device, kind in kinds:
        backend = backend_like(device)
        assert isinstance(backend.pack_matrix([tensor], [None]), kind)
        assert backend.stored_as(tensor).bits == (16 if kind is DenseMatrix else 8)
    assert storage_of(tensor, StorageRules()).bits == 8


@pytest.mark.parametrize("options", [{"quantize": "fp8"}, {"kv": "fp8"}])
def test_fp8_is_refused_where_the_gpu_lacks_it(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"8\.9"):
        backend_like(A100, **options)
    assert backend_like(RTX_4090, **options).name == RTX_4090.name

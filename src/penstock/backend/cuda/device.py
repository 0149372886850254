"""Declares NVIDIA GPUs, which torch and Triton compute on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backend.device import Calibration, Device, DeviceKind, LayerShape
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.backend.base import Backend
    from penstock.backend.blocks.kv_file import KvFile
    from penstock.backend.packed_cache import PackedCache
    from penstock.config import Config

NVIDIA = Path("/dev/nvidiactl")  # exists if a driver is loaded
PACKAGES = ("torch", "triton")
QUANTIZATIONS = {"q8_0": "Q8_0", "q4_k": "Q4_K", "fp8": "", "int4": ""}


def has_gpu() -> bool:
    """Returns whether there is a GPU that torch and Triton can use; logs why torch cannot."""
    if not NVIDIA.exists() or not _installed():
        return False
    reason = _torch_problem()
    if reason:
        import logging  # takes longer than the rest

        logging.getLogger(__name__).warning(
            "there is an NVIDIA GPU, but %s; the CPU computes (--device cuda makes this an error)", reason
        )
    return not reason


def _installed() -> bool:
    return all(find_spec(package) is not None for package in PACKAGES)


def _torch_problem() -> str:
    """Returns why torch cannot use the GPU; empty if it can."""
    import runpy  # few commands need it

    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    if runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda") is None:
        return "this torch was built without CUDA"  # known without importing it, which takes seconds
    from penstock.backend.cuda.devices import gpu_count

    return "" if gpu_count() else "torch finds none it can use: `nvidia-smi` may say why"


def open_cuda(
    config: Config, device: Device, packed: Sequence[PackedCache | None] = (), kv_file: KvFile | None = None
) -> Backend:
    """Opens the GPU with the device's index; raises ConfigError if it cannot be used."""
    if not _installed():
        raise ConfigError(f"device {device} needs torch and triton: pip install 'penstock[cuda]'")
    from penstock.backend.cuda.backend import CudaBackend
    from penstock.backend.cuda.keeper import open_arena

    return CudaBackend(
        config.step_tokens,
        config.max_rows,
        device=str(device),
        prefill_budget=config.prefill_budget,
        quantize="" if QUANTIZATIONS.get(config.quantize) else config.quantize,
        kv=config.kv,
        deterministic=config.deterministic,
        arena=open_arena(str(device), config.descriptors),
    )


def tune(report: Callable[[str], None]) -> Path:
    """Measures the tilings of the first GPU; raises ConfigError if there is none."""
    if not has_gpu():
        raise ConfigError("--tune measures kernels on an NVIDIA GPU: none that torch and triton can use is here")
    from penstock.backend.cuda.tune import tune

    return tune(report=report)


DEVICE = DeviceKind(
    name="cuda",
    help="cuda, cuda:N (the GPU with that index)",
    noun="a GPU",
    indexed=True,
    order=1,
    open=open_cuda,
    is_available=has_gpu,
    is_present=NVIDIA.exists,
    defaults={"max_rows": 256, "step_tokens": 2048, "prefill_budget": 384},
    fp8_defaults={"prefill_budget": 640},  # 640 FP8 tokens take no longer than 384 with weights of 16 bits
    quantizations=QUANTIZATIONS,
    quantizes_heads=False,
    kv_formats=("bf16", "fp8", "int8", "int4"),
    exports_memory=True,
    own_memory=True,
    kernel_cache="TRITON_CACHE_DIR",
    cluster_resource="GPU",
    packages=PACKAGES,
    extra="cuda",
    hardware="NVIDIA GPUs",
    eval_windows=4,
    calibration=Calibration(
        large=LayerShape(4096, 14336, 32, 8, 128),
        small=LayerShape(256, 256, 2, 1, 128),
        bytes=1 << 30,
        tokens=2048,
        rows=(1, 8, 32, 128),
        formats=("BF16", "fp8", "Q4_K"),
    ),
    tune=tune,
)

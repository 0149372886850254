"""Declares the CPU, which native code computes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.backend.device import Calibration, Device, DeviceKind, LayerShape
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.backend.base import Backend
    from penstock.backend.blocks.kv_file import KvFile
    from penstock.backend.packed_cache import PackedCache
    from penstock.config import Config

DEFAULTS = {"max_rows": 64, "step_tokens": 512, "prefill_budget": 192}
QUANTIZATIONS = {"q8_0": "Q8_0", "q4_k": "Q4_K", "int4": "Q4_1"}
NO_NATIVE = (
    "it was not built when Penstock was installed, because there was no C++ compiler; install one (on Debian and "
    "Ubuntu the package g++, on Fedora gcc-c++, on macOS `xcode-select --install`), then install Penstock again"
)


def has_native() -> bool:
    try:
        import penstock.backend.cpu.backend  # noqa: F401
    except ImportError:
        return False
    return True


def open_cpu(
    config: Config, device: Device, packed: Sequence[PackedCache | None] = (), kv_file: KvFile | None = None
) -> Backend:
    if not has_native():
        raise ConfigError(f"device cpu needs native code: {NO_NATIVE}")
    from penstock.backend.cpu.backend import CpuBackend
    from penstock.config import available_threads

    return CpuBackend(threads=config.threads or available_threads(), kv=config.kv, packed=packed, kv_file=kv_file)


DEVICE = DeviceKind(
    name="cpu",
    help="cpu",
    order=2,
    open=open_cpu,
    is_available=has_native,
    defaults=DEFAULTS,
    quantizations=QUANTIZATIONS,
    kv_formats=("f16", "f32", "int8", "int4"),
    exact_kv="f32",
    cached_weights=True,
    kv_in_file=True,
    calibration=Calibration(
        large=LayerShape(1024, 2816, 16, 4, 64),
        small=LayerShape(64, 64, 1, 1, 64),
        bytes=160 << 20,
        tokens=256,
        rows=(1, 8, 32),
        formats=("BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"),
    ),
)

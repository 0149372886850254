"""Declares the reference, which computes in NumPy: slow, and right by definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.backend.cpu.device import DEFAULTS, NO_NATIVE, QUANTIZATIONS
from penstock.backend.device import Device, DeviceKind
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.backend.base import Backend
    from penstock.backend.blocks.kv_file import KvFile
    from penstock.backend.packed_cache import PackedCache
    from penstock.config import Config


def is_available() -> bool:
    """Returns True, and warns: everything faster was tried before."""
    import logging  # takes longer than the rest

    logging.getLogger(__name__).warning("NumPy computes, which is slow, since there is no native code: %s", NO_NATIVE)
    return True


def open_ref(
    config: Config, device: Device, packed: Sequence[PackedCache | None] = (), kv_file: KvFile | None = None
) -> Backend:
    from penstock.backend.ref.backend import RefBackend

    if config.deterministic:
        raise ConfigError("the reference is not deterministic: NumPy's sums depend on shapes; use device cpu")
    return RefBackend(config.kv)


DEVICE = DeviceKind(
    name="ref",
    help="ref (NumPy, slow)",
    order=3,
    open=open_ref,
    is_available=is_available,
    defaults=DEFAULTS,
    quantizations=QUANTIZATIONS,
    kv_formats=("f32", "f16", "int8", "int4"),
    computes_in_numpy=True,
)

"""The native CPU backend: a model's forward pass recorded once and run by one native call per step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.backend.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]


def __getattr__(name: str) -> Any:
    if name != "CpuBackend":  # imported on first use, so that the declaration stays light
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from penstock.backend.cpu.backend import CpuBackend

    return CpuBackend

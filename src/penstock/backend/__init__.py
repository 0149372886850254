"""Whatever computes. `base` is the seam; each folder beside it is one way to do the work."""

from __future__ import annotations

from penstock.backend.base import Backend
from penstock.errors import ConfigError

DEVICES = ("auto", "cpu", "ref")


def open_backend(device: str, threads: int) -> Backend:
    if device in ("auto", "cpu"):
        from penstock.backend.cpu import CpuBackend

        return CpuBackend(threads=threads)
    if device == "ref":
        from penstock.backend.ref import RefBackend

        return RefBackend()
    raise ConfigError(f"unknown device {device!r}: use one of {', '.join(DEVICES)}")

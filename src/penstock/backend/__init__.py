"""Whatever computes. `base` is the seam; each folder beside it is one way to do the work."""

from __future__ import annotations

from penstock.backend.base import Backend
from penstock.errors import ConfigError

DEVICES = ("auto", "cpu", "ref")


def open_backend(device: str, threads: int, kv: str = "auto") -> Backend:
    if device in ("auto", "cpu"):
        from penstock.backend.cpu import CpuBackend

        return CpuBackend(threads=threads, kv=kv)
    if device == "ref":
        from penstock.backend.ref import RefBackend

        if kv not in ("auto", "f32"):
            raise ConfigError(f"the reference keeps its KV cache as f32; got {kv!r}")
        return RefBackend()
    raise ConfigError(f"unknown device {device!r}: use one of {', '.join(DEVICES)}")

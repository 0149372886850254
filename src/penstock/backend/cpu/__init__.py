"""The native CPU backend: a model's forward pass recorded once and run by one native call per step."""

from __future__ import annotations

from penstock.backend.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]

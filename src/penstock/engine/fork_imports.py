"""Imports what an engine process needs, for the process that forks them (ipc/launchers.py). It opens no device."""

from __future__ import annotations

from contextlib import suppress

from penstock.engine import build
from penstock.model.families import llama
from penstock.model.gguf import config

__all__ = ["build", "config", "llama"]

with suppress(ImportError):  # the extension may not be built
    import penstock.backend.cpu.backend  # noqa: F401

"""Penstock turns weights on disk into tokens streamed to callers, on a laptop, a server or a fleet."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.llm import LLM, Completion
    from penstock.types import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "SamplingParams", "__version__"]

_HOMES = {"LLM": "penstock.llm", "Completion": "penstock.llm", "SamplingParams": "penstock.types"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

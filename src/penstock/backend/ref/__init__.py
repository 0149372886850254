"""Computes every op in plain NumPy: this is the reference, slow and right by definition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.backend.ref.backend import RefBackend

__all__ = ["RefBackend"]


def __getattr__(name: str) -> Any:
    if name != "RefBackend":  # imported on first use, so that the declaration stays light
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from penstock.backend.ref.backend import RefBackend

    return RefBackend

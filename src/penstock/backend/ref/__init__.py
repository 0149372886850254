"""Computes every op in plain NumPy: this is the reference, slow and right by definition."""

from __future__ import annotations

from penstock.backend.ref.backend import RefBackend

__all__ = ["RefBackend"]

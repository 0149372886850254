"""The reference: every op in plain NumPy. It is slow, and it is right by definition."""

from __future__ import annotations

from penstock.backend.ref.backend import RefBackend

__all__ = ["RefBackend"]

"""Finds the reason that ended an answer, for dialects that report more than a finish reason."""

from __future__ import annotations

from penstock.text import REPETITION, Delta
from penstock.types import Request


def stop_token(delta: Delta) -> int | None:
    return delta.tokens[-1] if delta.silent else None


def stop_reason(request: Request, delta: Delta) -> int | str | None:
    """Returns the stop string, or the caller's own stop token, that ended the answer, or "repetition" if it fell into a
    loop; None for all other endings."""
    if delta.stop is not None:
        return delta.stop
    if delta.loop:
        return REPETITION
    token = stop_token(delta)
    return token if token in request.sampling.stop_token_ids else None

"""Timing steps of backends that compute while they are launched."""

from __future__ import annotations

import time

from penstock.backend.base import Backend, Batch


def time_step(backend: Backend, batch: Batch, times: int) -> float:
    """See Backend.time_step."""
    return min(_seconds(backend, batch) for _ in range(times))


def _seconds(backend: Backend, batch: Batch) -> float:
    begun = time.perf_counter()
    backend.wait(backend.launch(batch))
    return time.perf_counter() - begun

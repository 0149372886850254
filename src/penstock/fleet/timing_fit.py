"""Fits the timing of a simulated replica to a model's work and a machine's measured speed."""

from __future__ import annotations

import numpy as np

from penstock.fleet.timing import EngineTiming
from penstock.planning.roofline import MachineProfile, ModelCosts, decode_time, prefill_time
from penstock.types import Limits

POINTS = 16  # sample points per polynomial
BYTES_PER_MS = 8e6  # copy speed between processes: 8 GB/s


def fit_timing(profile: MachineProfile, costs: ModelCosts, limits: Limits, context: int) -> EngineTiming:
    """Returns the timing of one replica whose rows have `context` tokens on average. Time that a prompt's attention
    takes beyond one step is left out: the polynomial knows a step's new tokens only."""
    kv_tokens = limits.num_blocks * limits.block_size
    sizes = np.linspace(max(limits.step_tokens / POINTS, 1), limits.step_tokens, POINTS).astype(int)
    steps = [1000 * prefill_time(profile, costs, int(size), limits.step_tokens) for size in sizes]
    most = min(limits.max_rows, kv_tokens / context)
    rows = np.unique(np.linspace(1, max(most, 2), POINTS).astype(int))
    answers = [1000 * decode_time(profile, costs, int(count), context) for count in rows]
    copy_ms = costs.kv_token / BYTES_PER_MS
    return EngineTiming(
        prefill=_quadratic(sizes, steps),
        decode=_quadratic(rows * context / kv_tokens, answers),
        kv_tokens=kv_tokens,
        step_tokens=limits.step_tokens,
        max_rows=limits.max_rows,
        prefill_budget=limits.prefill_budget,
        pull_ms_per_token=copy_ms,
        host_ms_per_token=copy_ms,
    )


def _quadratic(x: np.ndarray, y: list[float]) -> tuple[float, float, float]:
    """Returns the coefficients of the polynomial nearest to these points, relative to their size. Two points make a
    line."""
    found = np.polyfit(x, y, min(2, len(x) - 1), w=1 / np.asarray(y))
    square, linear, fixed = (0.0,) * (3 - len(found)) + tuple(map(float, found))
    return square, linear, fixed

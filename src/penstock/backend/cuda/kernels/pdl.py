"""Programmatic dependent launch: a kernel starts while the one before it drains, and waits for its results itself.

Every kernel of a step lets the next one start at once, and calls `gdc_wait` before it reads what another kernel wrote
and before it writes anything. What it loads earlier can only be weights, or the numbers that describe the step.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gdc_launch_dependents", "gdc_wait", "options"]

enabled = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def options(num_warps: int = 4, num_stages: int = 3, *, early: bool = True) -> dict[str, Any]:
    """What every launch says beside its arguments; `early`: it starts while the one before it drains."""
    early = early and enabled
    return {"PDL": early, "launch_pdl": early, "num_warps": num_warps, "num_stages": num_stages}

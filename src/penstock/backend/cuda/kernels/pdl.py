"""Programmatic dependent launch (PDL): a kernel may start while the one before it in the stream still runs.

GPUs of compute capability 9.0 and up hide a kernel's start behind the end of the one before it. Every kernel of a step
first calls `let_next_start`, and calls `wait_for_previous` before it reads what another kernel wrote and before it
writes anything. Before that it may load only weights and the numbers that describe the step.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gdc_launch_dependents", "gdc_wait", "launch_options", "let_next_start", "wait_for_previous"]

enabled = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def let_next_start(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Waits until the kernel before this one has ended and its writes are visible, where PDL is on."""
    if PDL:
        gdc_wait()


def launch_options(num_warps: int = 4, num_stages: int = 3, *, early: bool = True) -> dict[str, Any]:
    """Returns the keyword arguments that every launch passes; `early`: the kernel may start before the one before it
    has ended."""
    early = early and enabled
    return {"PDL": early, "launch_pdl": early, "num_warps": num_warps, "num_stages": num_stages}

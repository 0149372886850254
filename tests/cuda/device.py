"""Where the tests run, and how close they may expect results to be there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from penstock.backend.cuda.device_properties import INTERPRETER
from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.devices import device_properties

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILINGS = Tilings(device_properties(torch.device(DEVICE)))
# Tilings for the kernels that only Hopper runs: `tests.cuda.gluon` interprets them where there is no GPU.
HOPPER = Tilings(replace(INTERPRETER, capability=(9, 0))) if DEVICE == "cpu" else TILINGS
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's dot products do not know bfloat16
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def normal(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Largest difference over largest value, within what the type of `got` allows."""
    wanted = wanted.double()
    difference = (got.double() - wanted).abs().max() / wanted.abs().max()
    return bool(difference <= TOLERANCE[got.dtype])

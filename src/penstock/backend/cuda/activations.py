"""Names the functions of torch that compute activations which gate nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def relu2(x: Any, *, out: Any) -> None:
    torch.clamp_min(x, 0, out=out).square_()


ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "silu": torch.ops.aten.silu.out,
    "gelu": torch.ops.aten.gelu.out,
    "gelu_tanh": partial(torch.ops.aten.gelu.out, approximate="tanh"),
    "relu": partial(torch.ops.aten.clamp_min.out, min=0),
    "relu2": relu2,
}

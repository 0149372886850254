"""Defines what GEMM kernels know when they are compiled."""

from __future__ import annotations

from typing import Any, NamedTuple


class Epilogue(NamedTuple):
    """Describes the last operations of a product before it stores its sums."""

    gated: bool = False  # stores silu of the first half of the rows times the second
    bias: bool = False


class GemmConfig(NamedTuple):
    """Holds the constants of one GEMM kernel."""

    tiling: Any  # a Tiling of the kernel's own module
    epilogue: Epilogue
    even: bool = True  # the last step over the columns is a whole one
    format: Any = None  # the QuantFormat of a quantized matrix
    columns: int = 0  # what rows of x are padded to

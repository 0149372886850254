"""Lists the quantizations of GGUF files, and chooses one that fits in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

Fit = Literal["fits", "tight", "too large"]

BITS = {  # approximate bits per weight, including mixed formats and scales
    "IQ2_M": 2.9,
    "Q2_K": 3.2,
    "Q3_K_S": 3.6,
    "Q3_K_M": 3.9,
    "Q3_K_L": 4.2,
    "IQ4_XS": 4.4,
    "MXFP4": 4.6,
    "Q4_0": 4.6,
    "Q4_K_S": 4.7,
    "Q4_K_M": 4.9,
    "Q4_1": 5.1,
    "Q5_0": 5.6,
    "Q5_K_S": 5.6,
    "Q5_K_M": 5.7,
    "Q6_K": 6.6,
    "Q8_0": 8.5,
    "F16": 16,
    "BF16": 16,
}
FOUR_BITS = ("Q4_K_M", "MXFP4", "Q4_K_S", "Q4_0", "IQ4_XS", "IQ4_NL", "Q4_1")
FEWER_BITS = ("Q3_K_L", "Q3_K_M", "IQ3_M", "Q3_K_S", "Q2_K", "IQ2_M")  # if four bits do not fit
MORE_BITS = ("Q5_K_M", "Q5_0", "Q5_K_S", "Q6_K", "Q8_0", "BF16", "F16", "F32")  # if the repository has only these
SMALL = 10**9  # bytes; a model whose Q8_0 is smaller loses more by four bits than it saves

OVERHEAD = 1.1  # memory of weights, as a multiple of the file size, at most
WORK = 2**28  # least bytes of a KV cache and the workspace of steps
EASY = 0.8  # share of the free memory, above which a fit is tight

_QUANTIZATION = r"(?:UD-)?(?:I?Q[1-8]_\w+|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|F16|FP16|F32)"
_NAME = re.compile(_QUANTIZATION, re.IGNORECASE)
_AT_END = re.compile(rf"(?:.*?[-._/])?({_QUANTIZATION})(?:-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE)


def quantization(text: str) -> str:
    """Returns GGUF's spelling of a quantization, such as Q4_K_M; "" for other texts."""
    name = text.upper()
    if not _NAME.fullmatch(name):
        return ""
    return "F16" if name == "FP16" else name


def quantization_of(file: str) -> str:
    match = _AT_END.fullmatch(file)
    return quantization(match[1]) if match else ""


def size_about(parameters: float, name: str) -> int:
    """Returns a file's approximate bytes, given the parameters in billions and the quantization."""
    return round(parameters * 1e9 * BITS[name] / 8)


def memory_needed(size: int) -> int:
    return int(size * OVERHEAD) + WORK


def fit(size: int, memory: int) -> Fit:
    needed = memory_needed(size)
    return "too large" if needed > memory else "tight" if needed > EASY * memory else "fits"


def choose(sizes: Mapping[str, int], memory: int) -> str:
    """Returns the first preferred quantization that fits by its size, or ""."""
    return next((name for name in preferred(sizes) if fit(sizes[name], memory) != "too large"), "")


def preferred(sizes: Mapping[str, int]) -> list[str]:
    """Returns the quantizations in the order of preference: Q8_0 of a small model, then four bits, then fewer,
    then more.
    """
    small = ("Q8_0",) if sizes.get("Q8_0", SMALL) < SMALL else ()
    named = (*small, *FOUR_BITS, *FEWER_BITS, *MORE_BITS)
    rest = sorted(sizes.keys() - set(named), key=lambda name: sizes[name])
    return list(dict.fromkeys(name for name in (*named, *rest) if name in sizes))

"""Random matrices made on the GPU, in every format that is kept there."""

from __future__ import annotations

from typing import Any

import torch

from penstock.backend.cuda.fp8_weights import RowScaledFp8
from penstock.backend.cuda.kernels.fp8 import quantize_fp8
from penstock.backend.cuda.pack_quantized import CODINGS, SPLIT, pack_blocks, quantize_int4
from penstock.backend.cuda.quantized_weights import QuantizedMatrix, Workspace
from penstock.backend.cuda.weights import DenseMatrix
from penstock.model.dequantize import layout_of
from penstock.model.tensor import FORMATS

DEVICE = torch.device("cuda")
KINDS = ("bf16", "fp8", "int4", "q4_k", "q4_k_m", "q8_0")


def random_blocks(name: str, rows: int, width: int) -> Any:
    """Bytes of a format, with scales of a sensible size: [rows, blocks, bytes]."""
    format, layout = FORMATS[name], layout_of(name)
    blocks = torch.randint(0, 256, (rows, width // format.values, format.bytes), dtype=torch.uint8, device=DEVICE)
    for field in ("d", "m"):
        if field in layout.fields:
            at = layout.fields[field][1]
            size = torch.rand(blocks.shape[:2], device=DEVICE) * 1e-3 + 1e-4
            blocks[..., at : at + 2] = size.half()[..., None].view(torch.uint8)
    if "e" in layout.fields:
        blocks[..., layout.fields["e"][1]] = 118  # an exponent
    return blocks


def random_codes(name: str, rows: int, width: int) -> Any:
    """A matrix of float8, of 4 bits, or of a file's format."""
    if name in ("FP8", "INT4"):
        values = torch.empty(rows, width, device=DEVICE, dtype=torch.bfloat16).normal_(0, 0.02)
        return quantize_fp8(values) if name == "FP8" else quantize_int4(values)
    blocks = random_blocks(name, rows, width)
    return pack_blocks(lambda first, last: SPLIT[name](blocks[first:last]), CODINGS[name], rows, width)


class RandomWeights:
    """Stands in for a checkpoint's packer. As in files made by llama.cpp, the head of Q4_K is of Q6_K, and in "q4_k_m"
    v and down are in every other layer."""

    def __init__(self, workspace: Workspace, kind: str) -> None:
        self._workspace = workspace
        self._kind = kind

    def vector(self, name: str, size: int, plus: float = 0.0) -> Any:
        return torch.ones(size, device=DEVICE)

    def matrix(self, *parts: tuple[str, int], width: int) -> Any:
        rows = sum(rows for _, rows in parts)
        if self._kind == "bf16":
            values = torch.empty((rows, width), dtype=torch.bfloat16, device=DEVICE).normal_(0, 0.02)
            return DenseMatrix(values, None, self._workspace)
        if self._kind == "fp8":
            return RowScaledFp8(random_codes("FP8", rows, width), None, self._workspace)
        formats = [self._format(name) for name, _ in parts]
        if len(set(formats)) == 1:
            return QuantizedMatrix((random_codes(formats[0], rows, width),), None, self._workspace)
        last = parts[-1][1]  # v, below q and k
        stacked = (random_codes(formats[0], rows - last, width), random_codes(formats[-1], last, width))
        return QuantizedMatrix(stacked, None, self._workspace)

    def _format(self, name: str) -> str:
        if not self._kind.startswith("q4_k"):
            return self._kind.upper()
        layer, _, matrix = name.removeprefix("layers.").partition(".")
        better = self._kind == "q4_k_m" and matrix in ("v", "down") and int(layer) % 2
        return "Q6_K" if name == "head" or better else "Q4_K"

"""Decides how a GPU stores each weight. The memory plan and the packers ask this file; it imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import prod
from typing import NamedTuple

from penstock.backend.base import StoredAs
from penstock.backend.cuda.device import DEVICE
from penstock.backend.quantize_at_load import may_quantize
from penstock.model.formats.near_blocks import as_near_blocks
from penstock.model.formats.trellis import trellis_of
from penstock.model.roles import EXPERTS, MLA
from penstock.model.tensor import AFFINE, PLAIN, Tensor, factor_of

ROWS, COLUMNS = 16, 64  # per tile: see pack_quantized.py
FP8, FP8_COLUMNS = "F8_E4M3", 128  # columns that share a scale, in kernels that read FP8
# Bits of one value, its share of scales included, in formats that stay quantized.
CODE_BITS = {
    "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5, "Q2_K": 5.125, "Q3_K": 4.5625, "Q4_K": 4.625,
    "Q5_K": 5.625, "Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.3125, "MXFP4": 4.25, "NVFP4": 4.5, "NF4": 4.5,
    "IQ1_S": 4.3125, "IQ1_M": 4.5625, "IQ2_XXS": 4.3125, "IQ2_XS": 4.5625, "IQ2_S": 4.5625, "IQ3_XXS": 4.3125,
    "IQ3_S": 4.3125, "TQ1_0": 4.3125, "TQ2_0": 4.3125,
    **{name: affine.bits + 32 / affine.values for name, affine in AFFINE.items()},
}  # fmt: skip
INT4_BITS = 4.5


class WeightLayout(Enum):
    """Names the layouts of packed weights."""

    VECTOR = "values in float32"
    VALUES = "values in the type of activations"
    CODES = "codes of the file's format"
    TRELLIS = "the trellis of EXL3"
    FP8 = "FP8 values and scales of the file"
    INT4 = "4 bits, quantized at load"
    ROW_FP8 = "FP8 with a scale for each row, quantized at load"


class StorageRules(NamedTuple):
    """Describes a device's storage, and the format for plain weights."""

    quantize: str = ""  # fp8 or int4
    value_bytes: int = 2  # per activation; tests use 4
    has_fp8: bool = True  # tensor cores read FP8


class Storage(NamedTuple):
    """Describes how one weight is stored."""

    layout: WeightLayout
    kind: str  # the name of its format
    bits: float  # per value, including scales
    bytes: int  # including padding

    def as_stored(self) -> StoredAs:
        return StoredAs(self.kind, self.bits, self.bytes)


def storage_of(tensor: Tensor, rules: StorageRules, experts: bool | None = None) -> Storage:
    """Returns the storage of a tensor that is packed by itself. `experts`: stored as the matrices of experts are; by
    default, its role decides."""
    count = prod(tensor.shape)
    if len(tensor.shape) == 1:
        return Storage(WeightLayout.VECTOR, "F32", 32, 4 * count)
    if len(tensor.shape) == 2 and tensor.role not in MLA:
        tensor = as_near_blocks(tensor) or tensor
        stacked = tensor.role in EXPERTS if experts is None else experts
        found = _in_file_format(tensor, rules, stacked) or _quantized(tensor, rules, stacked)
        if found:
            return found
    size = rules.value_bytes
    return Storage(WeightLayout.VALUES, "BF16" if size == 2 else "F32", 8 * size, size * count)


def common_layout(parts: Sequence[Tensor], rules: StorageRules, experts: bool) -> WeightLayout:
    """Returns the layout of tensors that are packed as one matrix: their own if all have the same one. The codes of
    experts must have one format."""
    stored = [storage_of(part, rules, experts) for part in parts]
    kinds = {(each.layout, each.kind if experts else "") for each in stored}
    return stored[0].layout if len(kinds) == 1 else WeightLayout.VALUES


def _in_file_format(tensor: Tensor, rules: StorageRules, experts: bool) -> Storage | None:
    """Returns the storage of a tensor that keeps the codes of its file; None if no kernel reads them."""
    if rules.value_bytes != 2:
        return None
    (rows, width), name = tensor.shape, tensor.format.name
    if (trellis := trellis_of(tensor)) and not experts:
        bits = trellis.bits_with_vectors
        return Storage(WeightLayout.TRELLIS, trellis.name, bits, int(rows * width * bits / 8))
    if name in CODE_BITS and factor_of(tensor) is not None and not (experts and rows % ROWS):
        factors = 4 * rows if experts and tensor.scales is not None else 0
        return Storage(WeightLayout.CODES, name, CODE_BITS[name], _tiles_bytes(rows, width, CODE_BITS[name]) + factors)
    if name == FP8 and rules.has_fp8 and _takes_scales(tensor) and not (width % COLUMNS and not experts):
        room = rows if experts else _whole_tiles(rows)
        scales = room if _columns(tensor) >= width else rows * -(-width // FP8_COLUMNS)
        return Storage(WeightLayout.FP8, name, 8, room * width + 4 * scales)
    return None


def _takes_scales(tensor: Tensor) -> bool:
    return _columns(tensor) >= tensor.shape[1] or _columns(tensor) % FP8_COLUMNS == 0


def _columns(tensor: Tensor) -> int:
    return tensor.shape[1] if tensor.scales is None else tensor.scales.columns


def _quantized(tensor: Tensor, rules: StorageRules, experts: bool) -> Storage | None:
    rows, width = tensor.shape
    if not rules.quantize or tensor.format.name not in PLAIN or not may_quantize(tensor, DEVICE):
        return None
    if rules.quantize == "fp8" and (experts or width % COLUMNS == 0):
        return Storage(WeightLayout.ROW_FP8, "fp8", 8, _whole_tiles(rows) * (width + 4))
    if rules.quantize == "int4" and not (experts and (rows % ROWS or rules.value_bytes != 2)):
        return Storage(WeightLayout.INT4, "int4", INT4_BITS, _tiles_bytes(rows, width, INT4_BITS))
    return None


def _tiles_bytes(rows: int, width: int, bits: float) -> int:
    return int(_whole_tiles(rows) * -(-width // COLUMNS) * COLUMNS * bits / 8)


def _whole_tiles(rows: int) -> int:
    return -(-rows // ROWS) * ROWS

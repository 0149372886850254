"""Reads torchao as saved by transformers: each tensor of a quantized weight is named `_weight_` plus its kind.

    int8, and fewer bits in bytes: value = scale * (code - zero_point)
    int4, two codes in a byte:     value = scale * code + zero_point; scales and zero points are [groups, rows]
    float8:                        value = scale * code

Tensor types identify the format, so the config's recipes are not needed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.formats.fp8_checkpoint import scales_of as fp8_scales
from penstock.model.formats.grouped import PLAIN, Array, Factors, Grouped, plain_values, unpack
from penstock.model.formats.modules import ModuleScheme, ModuleTensors, Scheme, check_shape, integers, matrix_shape
from penstock.model.tensor import FP8, Scales, Tensor

QDATA, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
KEYS = {
    "include_input_output_embeddings",
    "modules_to_not_convert",
    "quant_method",
    "quant_type",
    "quant_type_kwargs",
    "untie_embedding_weights",
}
HALF = 8  # half of the 4-bit range


def read(config: ConfigReader) -> Scheme:
    config.refuse_others(KEYS)
    return ModuleScheme(weight, QDATA, (QDATA, SCALE), optional=(ZERO,))


def weight(module: str, tensors: ModuleTensors) -> Tensor:
    codes, scale, zero = tensors[QDATA], tensors[SCALE], tensors.get(ZERO)
    if codes.format.name in FP8 and zero is None:
        return fp8(codes, scale)
    if codes.format.name not in ("I8", "U8") or len(codes.shape) != 2:
        raise UnsupportedModel(
            f"tensor {codes.name!r} is stored as {codes.format.name} of shape {codes.shape}, packed for one kind of "
            "GPU; save the model with a packing format of torchao that is called plain"
        )
    if zero is not None and zero.format.name in PLAIN:
        return int4(codes, scale, zero)
    return int8(codes, scale, zero)


def fp8(codes: Tensor, scale: Tensor) -> Tensor:
    rows, width = matrix_shape(codes)
    down, across = matrix_shape(scale)
    if not (down and across) or rows % down or width % across:
        raise MalformedFile(f"tensor {scale.name!r} has shape {scale.shape}, which does not divide {codes.shape}")
    return replace(codes, scales=fp8_scales(codes, scale, (rows // down, width // across)))


def int8(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    rows, width = matrix_shape(codes)
    groups = scale.shape[-1] if len(scale.shape) == 2 else 1
    check_shape(scale, (rows, groups), (1, groups))
    if not groups or width % groups:
        raise MalformedFile(f"tensor {scale.name!r} has {groups} groups, which do not divide {width} columns")
    numbers = integers(codes, "I8").view(np.uint8)
    zeros: Array = np.int16(128)
    if zero is not None:
        check_shape(zero, scale.shape)
        moved = integers(zero, "I8").astype(np.int16)
        zeros = zeros + np.broadcast_to(moved, (rows, groups)) if moved.any() else zeros
    if groups == 1 and not zeros.ndim:
        return replace(codes, scales=Scales(np.broadcast_to(plain_values(scale), (rows, 1)), 1, width))

    def factors(first: int, last: int) -> Factors:
        scales = np.broadcast_to(plain_values(scale), (rows, groups))[first:last]
        return Factors(scales, zeros[first:last] if zeros.ndim else zeros)

    return Grouped(
        codes.name,
        "torchao's int8",
        (rows, width),
        8,
        width // groups,
        lambda first, last: numbers[first:last] ^ np.uint8(128),
        factors,
    ).tensor()


def int4(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Returns a weight of signed 4-bit codes. Zero points are added; if all are 0, only scales are stored."""
    rows, half = matrix_shape(codes)
    groups, width = scale.shape[0] if scale.shape else 0, 2 * half
    check_shape(scale, (groups, rows))
    check_shape(zero, (groups, rows))
    if not groups or width % groups:
        raise MalformedFile(f"tensor {scale.name!r} has {groups} groups, which do not divide {width} columns")
    stored = integers(codes, "I8", "U8").view(np.uint8)
    scales, added = plain_values(scale).T, plain_values(zero).T
    minima = added - HALF * scales if added.any() else None

    def factors(first: int, last: int) -> Factors:
        rows = slice(first, last)
        return Factors(scales[rows], np.int16(HALF), None if minima is None else minima[rows])

    return Grouped(
        codes.name,
        "torchao's int4",
        (rows, width),
        4,
        width // groups,
        lambda first, last: unpack(stored[first:last], 4) ^ np.uint8(HALF),
        factors,
    ).tensor()

"""Reads compressed-tensors: packed or unpacked integers, and floats of 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.config_reader import SIZES, ConfigReader
from penstock.model.formats.fp4 import mxfp4, mxfp8, nvfp4
from penstock.model.formats.fp8_checkpoint import Fp8Scheme
from penstock.model.formats.gptq import check_places, group_size, places_of
from penstock.model.formats.grouped import Array, Factors, Grouped, plain_values, unpack, unpack_range
from penstock.model.formats.modules import ModuleScheme, ModuleTensors, Scheme, check_shape, integers, matrix_shape
from penstock.model.tensor import Tensor

FP8 = "float-quantized"
MXFP8 = "mxfp8-quantized"
FORMATS = (FP8, "int-quantized", "pack-quantized", "mxfp4-pack-quantized", MXFP8, "nvfp4-pack-quantized")
UNUSED = ("input_scale", "input_zero_point", "input_global_scale", "q_scale", "k_scale", "v_scale")
BITS = (2, 4, 8)
KEYS = {
    "config_groups",
    "format",
    "global_compression_ratio",
    "ignore",
    "kv_cache_scheme",
    "quant_method",
    "quantization_status",
    "sparsity_config",
    "transform_config",
    "version",
}
GROUP_KEYS = {"format", "input_activations", "output_activations", "targets", "weights"}
WEIGHT_KEYS = {
    "actorder",
    "block_structure",
    "dynamic",
    "group_size",
    "num_bits",
    "observer",
    "observer_kwargs",
    "scale_dtype",
    "strategy",
    "symmetric",
    "type",
    "zp_dtype",
}


def packed_weight(bits: int, configured: int, module: str, tensors: ModuleTensors) -> Tensor:
    """Returns a weight packed into words with half of its range added; zero points are packed along the rows.
    `configured` is the config's group size.
    """
    words, scale = tensors["weight_packed"], tensors["weight_scale"]
    check_shape(tensors["weight_shape"], (2,))
    rows, width = (int(size) for size in integers(tensors["weight_shape"], "I32", "I64"))
    check_shape(words, (rows, -(-width * bits // 32)))
    groups = check_scale(scale, rows)
    group = group_size(module, configured, width, groups)
    places = places_of({"g_idx": tensors["weight_g_idx"]}) if "weight_g_idx" in tensors else None
    places = check_places(module, places, width, group, groups)
    stored, zeros = integers(words, "I32"), zeros_of(tensors.get("weight_zero_point"), bits, rows, groups)
    kind = "pack-quantized" if places is None else "pack-quantized with actorder"

    def codes(first: int, last: int) -> Array:
        return unpack(stored[first:last], bits)[:, :width]

    def factors(first: int, last: int) -> Factors:
        return Factors(scales_of(scale, first, last), zeros(first, last))

    return Grouped(words.name, kind, (rows, width), bits, group, codes, factors, places).tensor()


def check_scale(scale: Tensor, rows: int) -> int:
    """Returns the groups per row; raises if the scales' shape is impossible."""
    groups = scale.shape[-1] if len(scale.shape) == 2 else 1
    check_shape(scale, (rows, groups), (rows,), (1,))
    return groups


def zeros_of(packed: Tensor | None, bits: int, rows: int, groups: int) -> Callable[[int, int], Array]:
    if packed is None:
        return lambda first, last: np.int16(1 << bits - 1)
    check_shape(packed, (-(-rows * bits // 32), groups))
    words = integers(packed, "I32").T
    return lambda first, last: unpack_range(words, bits, first, last).T.astype(np.int16)


def scales_of(scale: Tensor, first: int, last: int) -> Array:
    """Returns the scales of rows `first` to `last`: [rows, groups]."""
    if scale.shape == (1,):
        return np.repeat(plain_values(scale), last - first, axis=0)
    return plain_values(scale, slice(first, last))


def int_weight(bits: int, configured: int, module: str, tensors: ModuleTensors) -> Tensor:
    """Returns a weight of integers with one byte each, regardless of their bits. `configured` is the config's
    group size.
    """
    stored, scale, zero = tensors["weight"], tensors["weight_scale"], tensors.get("weight_zero_point")
    numbers, half = integers(stored, "I8").view(np.uint8), 1 << bits - 1
    rows, width = matrix_shape(stored)
    groups = check_scale(scale, rows)
    zeros: Array = np.int16(half)
    if zero is not None:
        check_shape(zero, scale.shape)
        zeros = zeros + np.broadcast_to(integers(zero, "I8").reshape(-1, groups), (rows, groups))

    def codes(first: int, last: int) -> Array:
        found = numbers[first:last] + np.uint8(half)
        if found.size and found.max() >= 2 * half:
            raise MalformedFile(f"tensor {stored.name!r} holds numbers that need more than {bits} bits")
        return found

    def factors(first: int, last: int) -> Factors:
        return Factors(scales_of(scale, first, last), zeros[first:last] if zeros.ndim else zeros)

    group = group_size(module, configured, width, groups)
    return Grouped(stored.name, "int-quantized", (rows, width), bits, group, codes, factors).tensor()


def mxfp4_weight(module: str, tensors: ModuleTensors) -> Tensor:
    return mxfp4(tensors["weight_packed"], tensors["weight_scale"])


def mxfp8_weight(module: str, tensors: ModuleTensors) -> Tensor:
    return mxfp8(tensors["weight"], tensors["weight_scale"])


def nvfp4_weight(module: str, tensors: ModuleTensors) -> Tensor:
    whole = np.float32(1) / plain_values(tensors["weight_global_scale"])
    return nvfp4(tensors["weight_packed"], tensors["weight_scale"], whole)


SCHEMES = {
    MXFP8: ModuleScheme(mxfp8_weight, "weight_scale", ("weight", "weight_scale"), unused=UNUSED),
    "mxfp4-pack-quantized": ModuleScheme(
        mxfp4_weight, "weight_packed", ("weight_packed", "weight_scale"), unused=UNUSED
    ),
    "nvfp4-pack-quantized": ModuleScheme(
        nvfp4_weight, "weight_packed", ("weight_packed", "weight_scale", "weight_global_scale"), unused=UNUSED
    ),
}


def packed_scheme(bits: int, group: int) -> Scheme:
    """Returns the scheme of packed integers; group 0 means all columns."""
    return ModuleScheme(
        partial(packed_weight, bits, group),
        "weight_packed",
        ("weight_packed", "weight_scale", "weight_shape"),
        optional=("weight_zero_point", "weight_g_idx"),
        unused=UNUSED,
    )


def int_scheme(bits: int, group: int) -> Scheme:
    """Returns the scheme of integers with one byte each; group 0 means all columns."""
    return ModuleScheme(
        partial(int_weight, bits, group),
        "weight_scale",
        ("weight", "weight_scale"),
        optional=("weight_zero_point",),
        unused=UNUSED,
    )


def read(config: ConfigReader) -> Scheme:
    config.require("format", FORMATS)
    format = config.text("format")
    config.refuse_others(KEYS)
    config.require("quantization_status", ("compressed",), "compressed")
    config.table("sparsity_config").require("format", ("dense",), "dense")
    config.table("transform_config").refuse_others(())
    groups = config.table("config_groups")
    found = {read_group(groups.table(name), format) for name in groups.names()}
    if len(found) != 1:
        raise UnsupportedModel(f"config_groups in quantization_config describe {len(found)} ways to quantize, not 1")
    sizes = found.pop()
    if format == FP8:
        return Fp8Scheme(sizes or None)
    if format in SCHEMES:
        return SCHEMES[format]
    return int_scheme(*sizes) if format == "int-quantized" else packed_scheme(*sizes)


def read_group(group: ConfigReader, format: str) -> tuple[int, ...]:
    """Reads a group's weight options. Returns the scale block's rows and columns for FP8 (empty: one scale per row or
    matrix), and else the bits and the group size (0: all columns).
    """
    group.refuse_others(GROUP_KEYS)
    group.require("format", (format,), format)
    weights = group.table("weights")
    weights.refuse_others(WEIGHT_KEYS)
    if format == FP8:
        return read_fp8_weights(weights)
    if "fp" in format:
        weights.require("type", ("float",))
        weights.require("num_bits", (8,) if format == MXFP8 else (4,))
        weights.require("group_size", (32,) if format.startswith("mx") else (16,))
        weights.require("symmetric", (True,), True)
        return weights.size("num_bits"), weights.size("group_size")
    weights.require("type", ("int",), "int")
    weights.require("num_bits", BITS)
    weights.require("strategy", ("tensor", "channel", "group"))
    grouped = weights.text("strategy") == "group"
    return weights.size("num_bits"), weights.size("group_size") if grouped else 0


def read_fp8_weights(weights: ConfigReader) -> tuple[int, ...]:
    """Reads the options of FP8 weights; returns the rows and columns of a block, if scales are per block."""
    weights.require("type", ("float",))
    weights.require("num_bits", (8,))
    weights.require("symmetric", (True,), True)
    weights.require("strategy", ("tensor", "channel", "block"))
    return weights.array("block_structure", SIZES, 2) if weights.text("strategy") == "block" else ()

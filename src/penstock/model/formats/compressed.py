"""compressed-tensors: whole numbers, packed or not, and floats of 4 bits; those of 8 bits are in fp8_checkpoint.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from penstock.errors import UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.formats import fp8_checkpoint
from penstock.model.formats.bits import fields, fields_across
from penstock.model.formats.fp4 import mxfp4, nvfp4
from penstock.model.formats.gptq import check_places, group_size, places_of
from penstock.model.formats.grouped import Array, Factors, Grouped, floats
from penstock.model.formats.modules import Parts, Scheme, check_shape, integers, sizes_of
from penstock.model.tensor import Tensor

FORMATS = ("float-quantized", "int-quantized", "pack-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized")
UNUSED = ("input_scale", "input_zero_point", "input_global_scale", "q_scale", "k_scale", "v_scale")
STRATEGIES = ("tensor", "channel", "group")
BITS = (2, 4, 8)


def packed_weight(bits: int, said: int, module: str, parts: Parts) -> Tensor:
    """Words of whole numbers, each with half their range added; the zero points too, down the rows."""
    words, scale = parts["weight_packed"], parts["weight_scale"]
    check_shape(parts["weight_shape"], (2,))
    rows, width = (int(size) for size in integers(parts["weight_shape"], "I32", "I64"))
    check_shape(words, (rows, -(-width * bits // 32)))
    groups = check_scale(scale, rows)
    group = group_size(module, said, width, groups)
    places = places_of({"g_idx": parts["weight_g_idx"]}) if "weight_g_idx" in parts else None
    places = check_places(module, places, width, group, groups)
    stored, zeros = integers(words, "I32"), zeros_of(parts.get("weight_zero_point"), bits, rows, groups)
    return Grouped(
        words.name,
        "pack-quantized" if places is None else "pack-quantized with actorder",
        (rows, width),
        bits,
        group,
        lambda first, last: fields(stored[first:last], bits)[:, :width],
        lambda first, last: Factors(scales_of(scale, first, last), zeros(first, last)),
        places,
    ).tensor()


def check_scale(scale: Tensor, rows: int) -> int:
    """How many groups a row has."""
    groups = scale.shape[-1] if len(scale.shape) == 2 else 1
    check_shape(scale, (rows, groups), (rows,), (1,))
    return groups


def zeros_of(packed: Tensor | None, bits: int, rows: int, groups: int) -> Callable[[int, int], Array]:
    if packed is None:
        return lambda first, last: np.int16(1 << bits - 1)
    check_shape(packed, (-(-rows * bits // 32), groups))
    words = integers(packed, "I32").T
    return lambda first, last: fields_across(words, bits, first, last).T.astype(np.int16)


def scales_of(scale: Tensor, first: int, last: int) -> Array:
    """[rows, groups], of a scale for each or one for all."""
    if scale.shape == (1,):
        return np.repeat(floats(scale), last - first, axis=0)
    return floats(scale, slice(first, last))


def whole_weight(module: str, parts: Parts) -> Tensor:
    """Bytes as they are."""
    codes, scale, zero = parts["weight"], parts["weight_scale"], parts.get("weight_zero_point")
    stored = integers(codes, "I8").view(np.uint8)
    rows, width = sizes_of(codes)
    groups = check_scale(scale, rows)
    zeros: Array = np.int16(128)
    if zero is not None:
        check_shape(zero, scale.shape)
        zeros = zeros + np.broadcast_to(integers(zero, "I8").reshape(-1, groups), (rows, groups))
    return Grouped(
        codes.name,
        "int-quantized",
        (rows, width),
        8,
        group_size(module, 0, width, groups),
        lambda first, last: stored[first:last] ^ np.uint8(128),
        lambda first, last: Factors(scales_of(scale, first, last), zeros[first:last] if zeros.ndim else zeros),
    ).tensor()


def mxfp4_weight(module: str, parts: Parts) -> Tensor:
    return mxfp4(parts["weight_packed"], parts["weight_scale"])


def nvfp4_weight(module: str, parts: Parts) -> Tensor:
    """The scale of the whole tensor divides."""
    return nvfp4(parts["weight_packed"], parts["weight_scale"], np.float32(1) / floats(parts["weight_global_scale"]))


SCHEMES = {
    "int-quantized": Scheme(
        whole_weight, "weight_scale", ("weight", "weight_scale"), optional=("weight_zero_point",), unused=UNUSED
    ),
    "mxfp4-pack-quantized": Scheme(mxfp4_weight, "weight_packed", ("weight_packed", "weight_scale"), unused=UNUSED),
    "nvfp4-pack-quantized": Scheme(
        nvfp4_weight, "weight_packed", ("weight_packed", "weight_scale", "weight_global_scale"), unused=UNUSED
    ),
}


def packed(bits: int, group: int) -> Scheme:
    return Scheme(
        partial(packed_weight, bits, group),
        "weight_packed",
        ("weight_packed", "weight_scale", "weight_shape"),
        optional=("weight_zero_point", "weight_g_idx"),
        unused=UNUSED,
    )


def read(config: ConfigReader) -> Scheme | fp8_checkpoint.Scheme:
    config.require("format", FORMATS)
    format = config.text("format")
    if format == "float-quantized":
        return fp8_checkpoint.read_compressed(config)
    fp8_checkpoint.read_frame(config)
    found = {read_group(group, format) for group in config.tables("config_groups")}
    if len(found) != 1:
        raise UnsupportedModel(f"config_groups in quantization_config quantize in {len(found)} ways, not 1")
    return SCHEMES[format] if format in SCHEMES else packed(*found.pop())


def read_group(group: ConfigReader, format: str) -> tuple[int, int]:
    """Bits, and columns that share a scale: 0 for all of them."""
    group.refuse_others(fp8_checkpoint.GROUP_KEYS)
    group.require("format", (format,), format)
    weights = group.table("weights")
    weights.refuse_others(fp8_checkpoint.WEIGHT_KEYS)
    if "fp4" in format:
        weights.require("type", ("float",))
        weights.require("num_bits", (4,))
        weights.require("group_size", (32,) if format.startswith("mx") else (16,))
        weights.require("symmetric", (True,), True)
        return 4, weights.size("group_size")
    weights.require("type", ("int",), "int")
    weights.require("num_bits", (8,) if format == "int-quantized" else BITS)
    weights.require("strategy", STRATEGIES)
    grouped = weights.text("strategy") == "group"
    return weights.size("num_bits"), weights.size("group_size") if grouped else 0

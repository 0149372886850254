"""Reads FP8 checkpoints of Hugging Face folders, matching each weight with its scales.

Only weights keep their scales. Activations are scaled per row at run time, and the KV cache scales its own values, so
the checkpoint's settings for both are accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from penstock.errors import MalformedFile
from penstock.model.config_reader import SIZES, ConfigReader
from penstock.model.dequantize import dequantize
from penstock.model.formats.modules import Scheme, drop_unused
from penstock.model.tensor import FP8, Scales, Tensor

SCALE = (".weight_scale", ".weight_scale_inv")  # both multiply: the second is the inverse of the quantization factor
UNUSED = ("input_scale", "q_scale", "k_scale", "v_scale", "kv_scale")
KEYS = {
    "activation_scheme",
    "dequantize",
    "fmt",
    "ignored_layers",
    "kv_cache_scheme",
    "modules_to_not_convert",
    "quant_method",
    "scale_fmt",
    "weight_block_size",
}


class Fp8Scheme(NamedTuple):
    """Reads FP8 weights with separate scale tensors."""

    block: tuple[int, ...] | None  # rows and columns per scale, if scales form a matrix

    def weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = dict(tensors)
        drop_unused(found, UNUSED)
        for name in [name for name in found if name.endswith(SCALE)]:
            weight = f"{name.rpartition('.')[0]}.weight"
            scales = scales_of(found.get(weight), found.pop(name), self.block)
            found[weight] = replace(found[weight], scales=scales)
        return found


def scales_of(weight: Tensor | None, scale: Tensor, block: tuple[int, ...] | None) -> Scales:
    """Returns a matrix's scales: one for all, per row, or per block, by their shape."""
    if weight is None or weight.format.name not in FP8 or len(weight.shape) != 2:
        raise MalformedFile(f"tensor {scale.name!r} holds scales, but its FP8 matrix is missing")
    rows, columns = weight.shape
    values = dequantize(scale)
    if values.size == 1:
        return Scales(values.reshape(1, 1), rows, columns)
    if values.shape in ((rows,), (rows, 1)):
        return Scales(values.reshape(rows, 1), 1, columns)
    if block is not None:
        down, across = block
        if values.shape == (-(-rows // down), -(-columns // across)):
            return Scales(values, down, across)
    raise MalformedFile(
        f"{scale.name!r} has shape {scale.shape}, which fits neither the matrix {weight.shape} nor its rows nor "
        f"blocks of {block}"
    )


def read(config: ConfigReader) -> Scheme:
    """Reads the quantization_config of `fp8`, with a scale per matrix or per block."""
    config.refuse_others(KEYS)
    config.require("activation_scheme", ("dynamic", "static"), "dynamic")
    config.require("fmt", ("e4m3", "e5m2", "float8_e4m3fn"), "e4m3")
    return Fp8Scheme(config.array("weight_block_size", SIZES, 2) if "weight_block_size" in config else None)

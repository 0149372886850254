"""FP8 checkpoints of Hugging Face folders: what quantization_config says, and which scales belong to which weights.

Two ways to write the same thing are read: `fp8` (a scale for each matrix, or for each block of one) and
`compressed-tensors` with `float-quantized` weights (for each matrix, row or block). Only weights keep their scales:
activations are scaled row by row as they come, and the KV cache scales its own, so what a checkpoint says about either
is read and not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.dequantize import dequantize
from penstock.model.tensor import FP8, Scales, Tensor

SCALE = (".weight_scale", ".weight_scale_inv")  # both multiply: the second is the inverse of what quantized
UNUSED = (".input_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale")

FP8_KEYS = {
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
COMPRESSED_KEYS = {
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


class Scheme(NamedTuple):
    block: tuple[int, ...] | None  # rows and columns that share a scale, where scales form a matrix


def read_fp8(fields: ConfigReader) -> Scheme:
    fields.refuse_others(FP8_KEYS)
    fields.require("activation_scheme", ("dynamic", "static"), "dynamic")
    fields.require("fmt", ("e4m3", "e5m2", "float8_e4m3fn"), "e4m3")
    return Scheme(fields.sizes("weight_block_size", 2) if "weight_block_size" in fields else None)


def read_frame(fields: ConfigReader) -> None:
    """What compressed-tensors says of all formats."""
    fields.refuse_others(COMPRESSED_KEYS)
    fields.require("quantization_status", ("compressed",), "compressed")
    fields.table("sparsity_config").require("format", ("dense",), "dense")
    fields.table("transform_config").refuse_others(())


def read_compressed(fields: ConfigReader) -> Scheme:
    read_frame(fields)
    blocks = {read_group(group) for group in fields.tables("config_groups")}
    if len(blocks) != 1:
        raise UnsupportedModel(f"config_groups in quantization_config share scales in {len(blocks)} ways, not 1")
    return Scheme(blocks.pop())


def read_group(group: ConfigReader) -> tuple[int, ...] | None:
    """The block that shares a scale, where the group's scales are those of blocks."""
    group.refuse_others(GROUP_KEYS)
    group.require("format", ("float-quantized",), "float-quantized")
    weights = group.table("weights")
    weights.refuse_others(WEIGHT_KEYS)
    weights.require("type", ("float",))
    weights.require("num_bits", (8,))
    weights.require("symmetric", (True,), True)
    weights.require("strategy", ("tensor", "channel", "block"))
    return weights.sizes("block_structure", 2) if weights.text("strategy") == "block" else None


def with_scales(tensors: Mapping[str, Tensor], scheme: Scheme | None) -> dict[str, Tensor]:
    """The tensors that are weights; those of 8 bits have the scales that lay beside them."""
    found = dict(tensors)
    if scheme is not None:
        drop_unused(found)
        for name in [name for name in found if name.endswith(SCALE)]:
            weight = f"{name.rpartition('.')[0]}.weight"
            scales = scales_of(found.get(weight), found.pop(name), scheme)
            found[weight] = replace(found[weight], scales=scales)
    for tensor in found.values():
        if tensor.format.name in FP8 and tensor.scales is None:
            raise MalformedFile(f"tensor {tensor.name!r} is stored as {tensor.format.name} without a scale")
    return found


def drop_unused(tensors: dict[str, Tensor]) -> None:
    unused = [name for name in tensors if name.endswith(UNUSED)]
    for name in unused:
        del tensors[name]
    if unused:
        import logging  # takes longer than reading most checkpoints

        logging.getLogger(__name__).info(
            "%d static scales of activations are not used: rows are scaled as they come", len(unused)
        )


def scales_of(weight: Tensor | None, scale: Tensor, scheme: Scheme) -> Scales:
    """For the whole matrix, for each row, or for blocks: the shape tells."""
    if weight is None or weight.format.name not in FP8 or len(weight.shape) != 2:
        raise MalformedFile(f"{scale.name!r} scales no matrix of 8 bits")
    rows, columns = weight.shape
    values = dequantize(scale)
    if values.size == 1:
        return Scales(values.reshape(1, 1), rows, columns)
    if values.shape in ((rows,), (rows, 1)):
        return Scales(values.reshape(rows, 1), 1, columns)
    if scheme.block is not None:
        down, across = scheme.block
        if values.shape == (-(-rows // down), -(-columns // across)):
            return Scales(values, down, across)
    raise MalformedFile(
        f"{scale.name!r} has shape {scale.shape}, which fits neither the matrix {weight.shape} nor its rows nor "
        f"blocks of {scheme.block}"
    )

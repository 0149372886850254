"""Reads GPTQ: codes in columns of words, zero points in rows of words; version 1 stores zero points minus 1.

With `desc_act`, g_idx gives each column's group, so groups are not runs of neighbouring columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from penstock.errors import MalformedFile
from penstock.model.config_reader import ConfigReader, size_or_all
from penstock.model.formats.grouped import Array, Factors, Grouped, plain_values, unpack_columns, unpack_range
from penstock.model.formats.modules import ModuleScheme, ModuleTensors, Scheme, check_shape, integers, matrix_shape
from penstock.model.tensor import Tensor

KEYS = {  # unread ones only concern the quantizer or are visible in the tensors
    "act_group_aware",
    "backend",
    "batch_size",
    "bits",
    "block_name_to_quantize",
    "cache_block_outputs",
    "cache_examples_on_gpu",
    "checkpoint_format",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "desc_act",
    "dynamic",
    "exllama_config",
    "format",
    "group_size",
    "hyb_act",
    "is_marlin_format",
    "lm_head",
    "max_input_length",
    "meta",
    "method",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "mse",
    "pack_dtype",
    "pad_token_id",
    "quant_method",
    "static_groups",
    "sym",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
    "v2",
    "v2_alpha",
    "v2_memory_device",
}
BITS = (2, 3, 4, 8)


class GptqPacking(NamedTuple):
    """Describes how a module's tensors are packed."""

    bits: int
    group: int  # 0: all columns
    zero_offset: int  # added to a stored zero point
    needs_g_idx: bool = False  # columns are ordered by activations


def scheme(packing_of: Callable[[str], GptqPacking]) -> Scheme:
    return ModuleScheme(
        lambda module, tensors: weight(module, tensors, packing_of(module)),
        marker="qweight",
        needed=("qweight", "qzeros", "scales"),
        optional=("g_idx",),
    )


def weight(module: str, tensors: ModuleTensors, packing: GptqPacking) -> Tensor:
    words, scales, places = tensors["qweight"], tensors["scales"], places_of(tensors)
    (lines, rows), (groups, _) = matrix_shape(words), matrix_shape(scales)
    bits = packing.bits if places is None else 32 * lines // len(places)  # may differ per module
    if bits not in BITS:
        raise MalformedFile(f"g_idx of {module!r} does not fit its {lines} rows of words")
    width = lines * 32 // bits
    if places is None and packing.needs_g_idx:
        raise MalformedFile(f"{module!r} has no g_idx, but desc_act in quantization_config says that it needs one")
    if rows * bits % 32:
        raise MalformedFile(
            f"{words.name!r} has {rows} columns, whose zero points of {bits} bits do not fill whole words"
        )
    check_shape(scales, (groups, rows))
    check_shape(tensors["qzeros"], (groups, rows * bits // 32))
    group = group_size(module, packing.group, width, groups)
    places = check_places(module, places, width, group, groups)
    stored, zeros = integers(words, "I32", "U32"), integers(tensors["qzeros"], "I32", "U32")

    def factors(first: int, last: int) -> Factors:
        zero = unpack_range(zeros, bits, first, last).T.astype(np.int16)
        return Factors(plain_values(scales, columns=slice(first, last)).T, zero + packing.zero_offset & (1 << bits) - 1)

    return Grouped(
        words.name,
        "GPTQ" if places is None else "GPTQ with desc_act",
        (rows, width),
        bits,
        group,
        lambda first, last: unpack_columns(stored[:, first:last], bits),
        factors,
        places,
    ).tensor()


def places_of(tensors: ModuleTensors) -> Array | None:
    return integers(tensors["g_idx"], "I32", "I64").reshape(-1) if "g_idx" in tensors else None


def check_places(module: str, places: Array | None, width: int, group: int, groups: int) -> Array | None:
    """Returns the group of each column; None if each group is a run of neighbouring columns."""
    if places is None or np.array_equal(places, np.arange(width) // group):
        return None
    if len(places) != width or places.min() < 0 or places.max() >= groups:
        raise MalformedFile(f"g_idx of {module!r} does not name one of {groups} groups for each of {width} columns")
    return places


def group_size(module: str, said: int, width: int, groups: int) -> int:
    for size in (said or width, width // groups):
        if size and -(-width // size) == groups:
            return size
    raise MalformedFile(f"{module}.scales has {groups} groups; a row of {width} columns does not divide evenly")


def read(config: ConfigReader) -> Scheme:
    config.refuse_others(KEYS)
    config.require("bits", BITS)
    config.require("pack_dtype", ("int32",), "int32")
    config.require("is_marlin_format", (False,), False)
    for key in ("checkpoint_format", "format"):
        config.require(key, ("gptq", "gptq_v2"), "gptq")
    version_2 = "gptq_v2" in (config.text("checkpoint_format", ""), config.text("format", ""))
    group, ordered = size_or_all(config, "group_size"), config.flag("desc_act", False)
    packing = GptqPacking(config.size("bits"), group, 0 if version_2 else 1, ordered)
    return scheme(lambda module: packing)

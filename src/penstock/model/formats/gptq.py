"""GPTQ: codes of a column of words, first to last; zero points of a row of words, of which version 1 stored one less.

With `desc_act`, g_idx says which group each column is of: groups are then no runs of columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from penstock.errors import MalformedFile
from penstock.model.config_reader import ConfigReader
from penstock.model.formats.bits import fields_across, fields_down
from penstock.model.formats.grouped import Array, Factors, Grouped, floats
from penstock.model.formats.modules import Parts, Scheme, check_shape, integers, sizes_of
from penstock.model.tensor import Tensor

KEYS = {  # what is not read here was for whoever quantized, or is said again by the tensors themselves
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


class Packing(NamedTuple):
    bits: int
    group: int  # 0: all columns
    less: int  # than the zero point is what is stored
    ordered: bool = False  # by activations: g_idx is needed


def scheme(packing_of: Callable[[str], Packing]) -> Scheme:
    """Of packings that modules may have for themselves."""
    return Scheme(
        lambda module, parts: weight(module, parts, packing_of(module)),
        mark="qweight",
        needed=("qweight", "qzeros", "scales"),
        optional=("g_idx",),
    )


def weight(module: str, parts: Parts, packing: Packing) -> Tensor:
    words, scales, places = parts["qweight"], parts["scales"], places_of(parts)
    (lines, rows), (groups, _) = sizes_of(words), sizes_of(scales)
    bits = packing.bits if places is None else 32 * lines // len(places)  # a module may have its own
    if bits not in BITS:
        raise MalformedFile(f"g_idx of {module!r} does not fit its {lines} rows of words")
    width = lines * 32 // bits
    if places is None and packing.ordered:
        raise MalformedFile(f"{module!r} has no g_idx, and desc_act in quantization_config says that it needs one")
    if rows * bits % 32:
        raise MalformedFile(f"{words.name!r} has {rows} columns, whose zero points of {bits} bits fill no whole words")
    check_shape(scales, (groups, rows))
    check_shape(parts["qzeros"], (groups, rows * bits // 32))
    group = group_size(module, packing.group, width, groups)
    places = check_places(module, places, width, group, groups)
    stored, zeros = integers(words, "I32", "U32"), integers(parts["qzeros"], "I32", "U32")

    def factors(first: int, last: int) -> Factors:
        zero = fields_across(zeros, bits, first, last).T.astype(np.int16)
        return Factors(floats(scales, columns=slice(first, last)).T, zero + packing.less & (1 << bits) - 1)

    return Grouped(
        words.name,
        "GPTQ" if places is None else "GPTQ with desc_act",
        (rows, width),
        bits,
        group,
        lambda first, last: fields_down(stored[:, first:last], bits),
        factors,
        places,
    ).tensor()


def places_of(parts: Parts) -> Array | None:
    return integers(parts["g_idx"], "I32", "I64").reshape(-1) if "g_idx" in parts else None


def check_places(module: str, places: Array | None, width: int, group: int, groups: int) -> Array | None:
    """None where each group is a run of columns."""
    if places is None or np.array_equal(places, np.arange(width) // group):
        return None
    if len(places) != width or places.min() < 0 or places.max() >= groups:
        raise MalformedFile(f"g_idx of {module!r} does not name one of {groups} groups for each of {width} columns")
    return places


def group_size(module: str, said: int, width: int, groups: int) -> int:
    """As the config says, or as a module's own scales do."""
    for size in (said or width, width // groups):
        if size and -(-width // size) == groups:
            return size
    raise MalformedFile(f"{module}.scales has {groups} groups; a row of {width} columns does not fall into so many")


def read(config: ConfigReader) -> Scheme:
    config.refuse_others(KEYS)
    config.require("bits", BITS)
    config.require("pack_dtype", ("int32",), "int32")
    config.require("is_marlin_format", (False,), False)
    for key in ("checkpoint_format", "format"):
        config.require(key, ("gptq", "gptq_v2"), "gptq")
    second = "gptq_v2" in (config.text("checkpoint_format", ""), config.text("format", ""))
    group, ordered = config.size_or_all("group_size"), config.flag("desc_act", False)
    packing = Packing(config.size("bits"), group, 0 if second else 1, ordered)
    return scheme(lambda module: packing)

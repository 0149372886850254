"""MXFP4 as gpt-oss has it: all experts of a layer in one tensor of codes, [experts, rows, groups, 16], and in
one of scales."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from penstock.errors import MalformedFile
from penstock.model.config_reader import ConfigReader
from penstock.model.formats.fp4 import mxfp4
from penstock.model.formats.modules import Parts, Scheme
from penstock.model.tensor import Tensor

PART = re.compile(r"_(blocks|scales)$")
KEYS = {"dequantize", "modules_to_not_convert", "quant_method"}


def read(config: ConfigReader) -> Scheme:
    config.refuse_others(KEYS)
    return Scheme(weight, "blocks", ("blocks", "scales"), named=with_parts)


def with_parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names in which a weight's parts follow a dot, as those of other formats do."""
    return {PART.sub(r".\1", name): tensor for name, tensor in tensors.items()}


def weight(module: str, parts: Parts) -> Tensor:
    blocks, scales = parts["blocks"], parts["scales"]
    if len(blocks.shape) < 3 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise MalformedFile(f"tensors {blocks.name!r} and {scales.name!r} have shapes {blocks.shape}, {scales.shape}")
    *rows, groups = scales.shape
    codes = replace(blocks, shape=(prod(rows), groups * 16))
    return replace(mxfp4(codes, replace(scales, shape=(prod(rows), groups))), shape=(*rows, groups * 32))

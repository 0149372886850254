"""Reads MXFP4 as gpt-oss stores it: all experts of a layer share one tensor of codes, [experts, rows, groups, 16], and
one of scales."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from penstock.errors import MalformedFile
from penstock.model.config_reader import ConfigReader
from penstock.model.formats.fp4 import mxfp4
from penstock.model.formats.modules import ModuleScheme, ModuleTensors, Scheme
from penstock.model.tensor import Tensor

KIND = re.compile(r"_(blocks|scales)$")
KEYS = {"dequantize", "modules_to_not_convert", "quant_method"}


def read(config: ConfigReader) -> Scheme:
    """Reads the quantization_config of MXFP4."""
    config.refuse_others(KEYS)
    return ModuleScheme(weight, "blocks", ("blocks", "scales"), rename=with_dots)


def with_dots(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors with names in which "blocks" and "scales" follow a dot, as in other formats."""
    return {KIND.sub(r".\1", name): tensor for name, tensor in tensors.items()}


def weight(module: str, tensors: ModuleTensors) -> Tensor:
    """Returns the weights of all experts of a layer."""
    blocks, scales = tensors["blocks"], tensors["scales"]
    if len(blocks.shape) < 3 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise MalformedFile(
            f"tensors {blocks.name!r} and {scales.name!r} have shapes {blocks.shape} and {scales.shape}"
        )
    *rows, groups = scales.shape
    codes = replace(blocks, shape=(prod(rows), groups * 16))
    return replace(mxfp4(codes, replace(scales, shape=(prod(rows), groups))), shape=(*rows, groups * 32))

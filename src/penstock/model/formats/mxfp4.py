"""Reads gpt-oss's MXFP4: one tensor has the codes of all experts in a layer, [experts, rows, groups, 16], and another
the scales.
"""

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
    config.refuse_others(KEYS)
    return ModuleScheme(weight, "blocks", ("blocks", "scales"), rename=with_dots)


def with_dots(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {KIND.sub(r".\1", name): tensor for name, tensor in tensors.items()}


def weight(module: str, tensors: ModuleTensors) -> Tensor:
    blocks, scales = tensors["blocks"], tensors["scales"]
    if len(blocks.shape) < 3 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise MalformedFile(
            f"tensors {blocks.name!r} and {scales.name!r} have shapes {blocks.shape} and {scales.shape}"
        )
    *rows, groups = scales.shape
    codes = replace(blocks, shape=(prod(rows), groups * 16))
    return replace(mxfp4(codes, replace(scales, shape=(prod(rows), groups))), shape=(*rows, groups * 32))

"""Reads MLX: the codes of a row are one stream of bits, and each group has a scale and a minimum (`biases`)."""

from __future__ import annotations

from functools import partial

import numpy as np

from penstock.errors import MalformedFile
from penstock.model.config_reader import ConfigReader
from penstock.model.formats.bits import unpack
from penstock.model.formats.grouped import Factors, Grouped, plain_values
from penstock.model.formats.modules import ModuleScheme, ModuleTensors, Scheme, check_shape, integers, matrix_shape
from penstock.model.tensor import Tensor

BITS = (2, 3, 4, 5, 6, 8)


def weight(config: ConfigReader, module: str, tensors: ModuleTensors) -> Tensor:
    """Returns the weight of a module."""
    words, scales, minima = tensors["weight"], tensors["scales"], tensors["biases"]
    bits, group = read_sizes(config, module)
    rows, each = matrix_shape(words)
    width = each * 32 // bits
    if each * 32 % bits or width % group:
        raise MalformedFile(
            f"tensor {words.name!r} has {each} words in a row, which hold no whole groups of {bits} bits"
        )
    for factor in (scales, minima):
        check_shape(factor, (rows, width // group))
    stored = integers(words, "U32")

    def factors(first: int, last: int) -> Factors:
        rows = slice(first, last)
        return Factors(plain_values(scales, rows), np.int16(0), plain_values(minima, rows))

    return Grouped(
        words.name,
        f"MLX of {bits} bits",
        (rows, width),
        bits,
        group,
        lambda first, last: unpack(stored[first:last], bits),
        factors,
    ).tensor()


def read_sizes(config: ConfigReader, module: str) -> tuple[int, int]:
    """Returns the bits and the group size of a module: its own, or those of all."""
    own = config.table(module) if module in config else config
    own.require("bits", BITS)
    own.require("mode", ("affine",), "affine")
    return own.size("bits"), own.size("group_size")


def is_module(name: str) -> bool:
    """Returns whether a key of the config names a module."""
    return "." in name or name == "lm_head"


def read(config: ConfigReader) -> Scheme:
    """Reads the quantization config of MLX."""
    read_sizes(config, "")
    config.refuse_others({"bits", "group_size", "mode", *(name for name in config.names() if is_module(name))})
    return ModuleScheme(partial(weight, config), marker="scales", needed=("weight", "scales", "biases"))

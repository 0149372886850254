"""MLX: codes of a row as one stream of bits, with a scale and a minimum (`biases`) for each group of columns."""

from __future__ import annotations

from functools import partial

import numpy as np

from penstock.errors import MalformedFile
from penstock.model.config_reader import ConfigReader
from penstock.model.formats.bits import fields
from penstock.model.formats.grouped import Factors, Grouped, floats
from penstock.model.formats.modules import Parts, Scheme, check_shape, integers, sizes_of
from penstock.model.tensor import Tensor

BITS = (2, 3, 4, 5, 6, 8)


def weight(config: ConfigReader, module: str, parts: Parts) -> Tensor:
    words, scales, minima = parts["weight"], parts["scales"], parts["biases"]
    bits, group = read_sizes(config, module)
    rows, each = sizes_of(words)
    width = each * 32 // bits
    if each * 32 % bits or width % group:
        raise MalformedFile(f"tensor {words.name!r} has {each} words in a row, which are no groups of {bits} bits")
    for part in (scales, minima):
        check_shape(part, (rows, width // group))
    stored = integers(words, "U32")

    def factors(first: int, last: int) -> Factors:
        some = slice(first, last)
        return Factors(floats(scales, some), np.int16(0), floats(minima, some))

    return Grouped(
        words.name,
        f"MLX of {bits} bits",
        (rows, width),
        bits,
        group,
        lambda first, last: fields(stored[first:last], bits),
        factors,
    ).tensor()


def read_sizes(config: ConfigReader, module: str) -> tuple[int, int]:
    """Bits and columns of a group, of the module itself or of all."""
    own = config.table(module) if module in config else config
    own.require("bits", BITS)
    own.require("mode", ("affine",), "affine")
    return own.size("bits"), own.size("group_size")


def is_module(name: str) -> bool:
    return "." in name or name == "lm_head"


def read(config: ConfigReader) -> Scheme:
    read_sizes(config, "")
    config.refuse_others({"bits", "group_size", "mode", *(name for name in config.names() if is_module(name))})
    return Scheme(partial(weight, config), mark="scales", needed=("weight", "scales", "biases"))

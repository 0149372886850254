"""Reads MLX: a row's codes are one bit stream, and each group has a scale and a minimum (`biases`) or, in float modes,
an 8-bit scale.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from penstock.errors import MalformedFile
from penstock.model.config_reader import ConfigReader
from penstock.model.formats.fp4 import mxfp4, mxfp8, nvfp4
from penstock.model.formats.grouped import Factors, Grouped, plain_values, unpack
from penstock.model.formats.modules import ModuleScheme, ModuleTensors, Scheme, check_shape, integers, matrix_shape
from penstock.model.tensor import FP8, INTEGERS, Tensor

BITS = (2, 3, 4, 5, 6, 8)
AFFINE = "affine"


class MlxModule(NamedTuple):
    """Describes how a module's weight is stored."""

    mode: str
    bits: int
    group: int  # columns per scale


FLOATS = {mode: MlxModule(mode, *sizes) for mode, sizes in (("mxfp4", (4, 32)), ("mxfp8", (8, 32)), ("nvfp4", (4, 16)))}


def weight(config: ConfigReader, module: str, tensors: ModuleTensors) -> Tensor:
    own = read_module(config, module)
    biased = own.mode == AFFINE
    if biased != ("biases" in tensors):
        raise MalformedFile(f"module {module!r} of mode {own.mode} {'lacks' if biased else 'must not have'} biases")
    return affine(own, tensors) if biased else floats(own, tensors["weight"], tensors["scales"])


def floats(own: MlxModule, words: Tensor, scales: Tensor) -> Tensor:
    rows, each = matrix_shape(words)
    integers(words, "U32")
    integers(scales, "U8")
    codes = replace(words, format=INTEGERS["U8"], shape=(rows, 4 * each))
    if own.mode == "mxfp4":
        return mxfp4(codes, scales)
    if own.mode == "mxfp8":
        return mxfp8(replace(codes, format=FP8["F8_E4M3"]), scales)
    return nvfp4(codes, replace(scales, format=FP8["F8_E4M3"]), np.ones(1, np.float32))


def affine(own: MlxModule, tensors: ModuleTensors) -> Tensor:
    words, scales, minima = tensors["weight"], tensors["scales"], tensors["biases"]
    bits, group = own.bits, own.group
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


def read_module(config: ConfigReader, module: str) -> MlxModule:
    """Returns a module's options: its own table or the defaults."""
    own = config.table(module) if module in config else config
    own.require("mode", (AFFINE, *FLOATS), AFFINE)
    mode = own.text("mode", AFFINE)
    own.require("bits", (FLOATS[mode].bits,) if mode in FLOATS else BITS)
    if mode in FLOATS:
        own.require("group_size", (FLOATS[mode].group,))
    return MlxModule(mode, own.size("bits"), own.size("group_size"))


def is_module(name: str) -> bool:
    return "." in name or name == "lm_head"


def read(config: ConfigReader) -> Scheme:
    read_module(config, "")
    config.refuse_others({"bits", "group_size", "mode", *(name for name in config.names() if is_module(name))})
    return ModuleScheme(partial(weight, config), marker="scales", needed=("weight", "scales"), optional=("biases",))

"""Reads AWQ's `gemm` layout: a word holds 8 output columns in a permuted order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.model.config_reader import ConfigReader, size_or_all
from penstock.model.formats.gptq import group_size
from penstock.model.formats.grouped import Factors, Grouped, plain_values
from penstock.model.formats.modules import ModuleScheme, ModuleTensors, Scheme, check_shape, integers, matrix_shape
from penstock.model.tensor import Tensor

KEYS = {
    "backend",
    "bits",
    "do_fuse",
    "exllama_config",
    "fuse_max_seq_len",
    "group_size",
    "modules_to_fuse",
    "modules_to_not_convert",
    "quant_method",
    "version",
    "zero_point",
}
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each 4 bits of a word, lowest bits first


def scheme(group_of: Callable[[str], int]) -> Scheme:
    return ModuleScheme(
        lambda module, tensors: weight(module, tensors, group_of(module)),
        marker="qweight",
        needed=("qweight", "qzeros", "scales"),
    )


def weight(module: str, tensors: ModuleTensors, group: int) -> Tensor:
    words, scales = tensors["qweight"], tensors["scales"]
    (width, each), (groups, _) = matrix_shape(words), matrix_shape(scales)
    rows = 8 * each
    check_shape(scales, (groups, rows))
    check_shape(tensors["qzeros"], (groups, rows // 8))
    stored, zeros = integers(words, "I32", "U32"), integers(tensors["qzeros"], "I32", "U32")

    def factors(first: int, last: int) -> Factors:
        zero = unpack_outputs(zeros, first, last).astype(np.int16)
        return Factors(plain_values(scales, columns=slice(first, last)).T, zero)

    return Grouped(
        words.name,
        "AWQ",
        (rows, width),
        4,
        group_size(module, group, width, groups),
        lambda first, last: unpack_outputs(stored, first, last),
        factors,
    ).tensor()


def unpack_outputs(words: NDArray[Any], first: int, last: int) -> NDArray[np.uint8]:
    """Unpacks output columns `first` to `last` as rows: [n, words] -> [last - first, n]."""
    start, end = first // 8, -(-last // 8)
    transposed = np.ascontiguousarray(words[:, start:end].T).view(np.uint32)  # [words, n]
    codes = np.empty((end - start, 8, transposed.shape[1]), np.uint8)
    for place, column in enumerate(ORDER):
        codes[:, column] = transposed >> np.uint32(4 * place) & 15
    return codes.reshape(-1, transposed.shape[1])[first - 8 * start : last - 8 * start]


def read(config: ConfigReader) -> Scheme:
    config.refuse_others(KEYS)
    config.require("bits", (4,))
    config.require("zero_point", (True,), True)
    if config.text("version", "gemm").lower() != "gemm":
        raise config.unsupported("version", config.text("version"), ("gemm",))
    group = size_or_all(config, "group_size")
    return scheme(lambda module: group)

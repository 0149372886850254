"""AWQ, as its `gemm` version stores it: words of 8 columns of the output, in an order of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.model.config_reader import ConfigReader
from penstock.model.formats.gptq import group_size
from penstock.model.formats.grouped import Factors, Grouped, floats
from penstock.model.formats.modules import Parts, Scheme, check_shape, integers, sizes_of
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
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each four bits of a word are of, lowest first


def scheme(group_of: Callable[[str], int]) -> Scheme:
    """Of groups that modules may have for themselves; 0: all columns."""
    return Scheme(
        lambda module, parts: weight(module, parts, group_of(module)),
        mark="qweight",
        needed=("qweight", "qzeros", "scales"),
    )


def weight(module: str, parts: Parts, group: int) -> Tensor:
    words, scales = parts["qweight"], parts["scales"]
    (width, each), (groups, _) = sizes_of(words), sizes_of(scales)
    rows = 8 * each
    check_shape(scales, (groups, rows))
    check_shape(parts["qzeros"], (groups, rows // 8))
    stored, zeros = integers(words, "I32", "U32"), integers(parts["qzeros"], "I32", "U32")

    def factors(first: int, last: int) -> Factors:
        zero = columns(zeros, first, last).astype(np.int16)
        return Factors(floats(scales, columns=slice(first, last)).T, zero)

    return Grouped(
        words.name,
        "AWQ",
        (rows, width),
        4,
        group_size(module, group, width, groups),
        lambda first, last: columns(stored, first, last),
        factors,
    ).tensor()


def columns(words: NDArray[Any], first: int, last: int) -> NDArray[np.uint8]:
    """Of the output, as rows: [n, words] -> [last - first, n]."""
    start, end = first // 8, -(-last // 8)
    turned = np.ascontiguousarray(words[:, start:end].T).view(np.uint32)  # [words, n]
    codes = np.empty((end - start, 8, turned.shape[1]), np.uint8)
    for place, column in enumerate(ORDER):
        codes[:, column] = turned >> np.uint32(4 * place) & 15
    return codes.reshape(-1, turned.shape[1])[first - 8 * start : last - 8 * start]


def read(config: ConfigReader) -> Scheme:
    config.refuse_others(KEYS)
    config.require("bits", (4,))
    config.require("zero_point", (True,), True)
    if config.text("version", "gemm").lower() != "gemm":
        raise config.unsupported("version", config.text("version"), ("gemm",))
    group = config.size_or_all("group_size")
    return scheme(lambda module: group)

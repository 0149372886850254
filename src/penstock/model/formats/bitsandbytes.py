"""Reads bitsandbytes. 4-bit codes index a table of 16 numbers; a block's scale is its largest value, which may itself
be quantized to 8 bits. 8-bit weights have a scale per row.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from penstock.errors import MalformedFile
from penstock.model.config_reader import MAX_NUMBER, SIZES, ConfigReader
from penstock.model.dequantize import LAYOUTS, NF4_VALUES
from penstock.model.formats.grouped import BLOCK, Floats, plain_values
from penstock.model.formats.modules import ModuleScheme, ModuleTensors, Scheme, check_shape, integers, matrix_shape
from penstock.model.open_files import parse_json
from penstock.model.tensor import NF4, Bytes, Format, Scales, Tensor

KEYS = {  # the relevant ones are repeated next to each weight
    "_load_in_4bit",
    "_load_in_8bit",
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage",
    "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight",
    "llm_int8_skip_modules",
    "llm_int8_threshold",
    "load_in_4bit",
    "load_in_8bit",
    "quant_method",
}
STATES = {kind: f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
STATE_KEYS = {
    "blocksize",
    "dtype",
    "nested_blocksize",
    "nested_dtype",
    "nested_offset",
    "quant_type",
    "shape",
}


def four_bits(module: str, tensors: ModuleTensors) -> Tensor:
    """Returns a 4-bit weight: as NF4 blocks if its table and sizes allow it, else as values."""
    kind, state = read_state(module, tensors)
    (rows, width), block = state.array("shape", SIZES, 2), state.size("blocksize")
    packed, table = tensors["weight"], plain_values(tensors["weight.quant_map"]).reshape(-1)
    stored = integers(packed, "U8", "I8").reshape(-1).view(np.uint8)
    if len(stored) != -(-rows * width // 2) or table.shape != (16,):
        raise MalformedFile(f"tensor {packed.name!r} does not hold {rows} x {width} codes of 4 bits")
    scales = scales_of(tensors, state, -(-rows * width // block))

    if kind == "nf4" and np.array_equal(table, NF4_VALUES) and not (width % BLOCK or block % BLOCK):
        return Tensor(packed.name, NF4, (rows, width), partial(nf4_blocks, stored, scales, width, block))

    def values(first: int, last: int) -> Bytes:
        at = np.arange(first * width, last * width)
        # the first code is in the high half of its byte
        codes = stored[at // 2] >> (4 - at % 2 * 4).astype(np.uint8) & 15
        made: Floats = table[codes] * scales[at // block]
        return made.view(np.uint8)

    return Tensor(packed.name, Format(f"bitsandbytes {kind}", 1, 4), (rows, width), values)


def nf4_blocks(stored: Bytes, scales: Floats, width: int, block: int, first: int, last: int) -> Bytes:
    """Returns rows as storage blocks. bitsandbytes packs neighbours into one byte, the first in the high half; a
    storage block packs values i and i + 16 into one byte.
    """
    out = np.empty((last - first) * width // BLOCK, LAYOUTS["NF4"])
    pairs = stored[first * width // 2 : last * width // 2].reshape(len(out), 2, 8)
    codes = np.stack([pairs >> 4, pairs & 15], -1).reshape(len(out), 2, 16)
    out["d"] = scales[(first * width // BLOCK + np.arange(len(out))) * BLOCK // block]
    out["qs"] = codes[:, 0] | codes[:, 1] << 4
    return out.view(np.uint8)


def read_state(module: str, tensors: ModuleTensors) -> tuple[str, ConfigReader]:
    """Reads the JSON tensor about a weight; returns its table's kind and the rest."""
    kinds = [kind for kind, name in STATES.items() if name in tensors]
    if len(kinds) != 1:
        raise MalformedFile(f"{module}.weight has {len(kinds)} quant_state tensors of bitsandbytes, not 1")
    name = STATES[kinds[0]]
    text = integers(tensors[name], "U8").tobytes()
    state = ConfigReader(parse_json(text, f"{module}.{name}"), f"{module}.{name}")
    state.refuse_others(STATE_KEYS)
    return kinds[0], state


def scales_of(tensors: ModuleTensors, state: ConfigReader, blocks: int) -> Floats:
    largest = tensors["weight.absmax"]
    check_shape(largest, (blocks,))
    if "weight.nested_absmax" not in tensors:
        return plain_values(largest).reshape(-1)
    if "weight.nested_quant_map" not in tensors:
        raise MalformedFile(
            f"{largest.name!r} is quantized, but nested_quant_map, which says how, is missing; fetch it again"
        )
    codes = integers(largest, "U8")
    table, outer = (plain_values(tensors[f"weight.nested_{kind}"]).reshape(-1) for kind in ("quant_map", "absmax"))
    run = state.size("nested_blocksize")
    if len(table) != 256 or len(outer) != -(-blocks // run):
        raise MalformedFile(f"{largest.name!r} has {blocks} codes, and their scales have another number")
    values: Floats = table[codes] * outer[np.arange(blocks) // run] + np.float32(
        state.number("nested_offset", least=-MAX_NUMBER)
    )
    return values


def eight_bits(module: str, tensors: ModuleTensors) -> Tensor:
    codes, largest = tensors["weight"], tensors["SCB"]
    integers(codes, "I8")
    rows, width = matrix_shape(codes)
    check_shape(largest, (rows,))
    check_order(tensors)
    scales: Floats = plain_values(largest).reshape(-1, 1) / np.float32(127)
    return Tensor(codes.name, codes.format, codes.shape, codes.data, Scales(scales, 1, width))


def check_order(tensors: ModuleTensors) -> None:
    """Raises unless the rows are stored in order."""
    if "weight_format" in tensors and integers(tensors["weight_format"], "U8").any():
        raise MalformedFile(f"{tensors['weight_format'].name!r} is not 0: only the row-major order is supported")


FOUR_BITS = ModuleScheme(
    four_bits,
    marker="weight.absmax",
    needed=("weight", "weight.absmax", "weight.quant_map"),
    optional=("weight.nested_absmax", "weight.nested_quant_map", *STATES.values()),
)
EIGHT_BITS = ModuleScheme(eight_bits, marker="SCB", needed=("weight", "SCB"), optional=("weight_format",))


def read(config: ConfigReader) -> Scheme:
    config.refuse_others(KEYS)
    config.require("llm_int8_has_fp16_weight", (False,), False)
    config.require("bnb_4bit_quant_type", tuple(STATES), "nf4")
    config.require("bnb_4bit_quant_storage", ("uint8",), "uint8")
    return EIGHT_BITS if config.flag("load_in_8bit", False) else FOUR_BITS

"""Reads EXL3: tiles of 16 x 16 numbers in a trellis, multiplied by Hadamard matrices on both sides.

A tile of K bits for each number is a ring of 256 * K bits. The 16 bits that end with a number's own bits are its state.
A code book computes the number: a product of the state, whose halves or bytes are added up. The weight is
    W[out, in] = svh[out] * (H @ numbers @ H)[out, in] * suh[in]
with a Hadamard matrix H for 128 values at a time. These products are no codes: they are widened as they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.formats.grouped import Floats, plain_values
from penstock.model.formats.modules import ModuleScheme, ModuleTensors, Scheme, check_shape, integers
from penstock.model.tensor import Bytes, Format, Tensor

KEYS = {  # those that matter are said again beside each weight
    "bits",
    "calibration",
    "codebook",
    "head_bits",
    "original_quantization_config",
    "out_scales",
    "quant_method",
    "tensor_storage",
    "version",
}
TILE, HADAMARD_SIZE = 16, 128
PLAIN, MCG, MUL1 = "3inst", "mcg", "mul1"
FACTORS = {PLAIN: 89226354, MCG: 0xCBAC1FED, MUL1: 0x83DCD12D}

Array = NDArray[Any]


@cache
def code_book(kind: str) -> Floats:
    """Returns the number that each state of 16 bits stands for, all exact in float16: [65536]."""
    products = np.arange(1 << 16, dtype=np.uint32) * np.uint32(FACTORS[kind])
    if kind == MUL1:
        sums = products.view(np.uint8).reshape(-1, 4).sum(1, dtype=np.float32)
        step, middle = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float32)
        numbers: Floats = ((1024 + sums) * step + middle).astype(np.float16).astype(np.float32)
        return numbers
    if kind == PLAIN:
        products += np.uint32(64248484)
    halves = ((products & 0x8FFF8FFF) ^ 0x3B603B60).view(np.float16).reshape(-1, 2)
    return (halves[:, 0] + halves[:, 1]).astype(np.float32)


@cache
def places() -> Array:
    """Returns which number of a tile stands at [in, out]. The eight numbers of a lane lie in rows 2 * (lane % 4) +
    (0, 1, 8, 9) of columns lane // 4 and lane // 4 + 8."""
    lane, own = np.divmod(np.arange(256), 8)
    row = 2 * (lane % 4) + own % 2 + own // 2 % 2 * 8
    column = lane // 4 + own // 4 * 8
    found = np.empty((TILE, TILE), np.intp)
    found[row, column] = np.arange(256)
    return found


@cache
def hadamard() -> Floats:
    """Returns the normalized Hadamard matrix: [128, 128]."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < HADAMARD_SIZE:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(np.sqrt(HADAMARD_SIZE))


def numbers_of(tiles: Array, kind: str) -> Floats:
    """Decodes tiles [down, across, words], with inputs down and outputs across: [16 * across, 16 * down]."""
    words = np.ascontiguousarray(tiles).view(np.uint32)  # the first bit of each is its highest
    count = words.shape[-1]
    ends = (np.arange(256) + 1) * (count // 8)
    last = (ends - 1) // 32
    pairs = words[..., last - 1].astype(np.uint64) << np.uint64(32) | words[..., last]
    states = (pairs >> (32 * (last + 1) - ends).astype(np.uint64)).astype(np.uint16)
    found = code_book(kind)[states[..., places()]]  # [down, across, in, out]
    matrix: Floats = found.transpose(1, 3, 0, 2).reshape(TILE * tiles.shape[1], TILE * tiles.shape[0])
    return matrix


def weight(module: str, tensors: ModuleTensors) -> Tensor:
    """Returns the weight of a module."""
    trellis = tensors["trellis"]
    stored = integers(trellis, "I16")
    if stored.ndim != 3 or stored.shape[2] % TILE or not 0 < stored.shape[2] <= 8 * TILE:
        raise UnsupportedModel(
            f"{trellis.name!r} has shape {trellis.shape}; only tiles of 1 to 8 whole bits are supported"
        )
    width, rows = TILE * stored.shape[0], TILE * stored.shape[1]
    if width % HADAMARD_SIZE or rows % HADAMARD_SIZE:
        raise MalformedFile(f"{trellis.name!r} has {rows} x {width} numbers; both must be multiples of {HADAMARD_SIZE}")
    kind = read_kind(module, tensors)
    left, right = signs(module, tensors, "v", rows), signs(module, tensors, "u", width)
    make: Callable[[int, int], Bytes] = partial(values, stored, kind, left, right)
    return Tensor(trellis.name, Format("EXL3", 1, 4), (rows, width), make)


def values(stored: Array, kind: str, left: Floats, right: Floats, first: int, last: int) -> Bytes:
    """Returns rows `first` to `last` as float32."""
    start, end = first // HADAMARD_SIZE * HADAMARD_SIZE, -(-last // HADAMARD_SIZE) * HADAMARD_SIZE
    h = hadamard()
    found = np.empty((end - start, len(right)), np.float32)
    for row in range(start, end, HADAMARD_SIZE):
        some = numbers_of(stored[:, row // TILE : (row + HADAMARD_SIZE) // TILE], kind)
        blocks = some.reshape(HADAMARD_SIZE, -1, HADAMARD_SIZE).swapaxes(0, 1)  # [blocks of inputs, 128, 128]
        made = (h @ blocks @ h).swapaxes(0, 1).reshape(HADAMARD_SIZE, -1)
        found[row - start : row - start + HADAMARD_SIZE] = made
    found *= left[start:end, None]
    found *= right
    return found[first - start : last - start].reshape(-1).view(np.uint8)


def read_kind(module: str, tensors: ModuleTensors) -> str:
    """Returns the kind of the code book; those other than the default have their factor as a tensor."""
    kinds = [kind for kind in (MCG, MUL1) if kind in tensors]
    for kind in kinds:
        if (
            integers(tensors[kind], "I32", "U32").reshape(-1).view(np.uint32).tolist() != [FACTORS[kind]]
            or len(kinds) > 1
        ):
            raise UnsupportedModel(f"{module!r} has an unknown code book; supported: {', '.join(FACTORS)}")
    return kinds[0] if kinds else PLAIN


def signs(module: str, tensors: ModuleTensors, side: str, count: int) -> Floats:
    """Returns the factors of rows or columns: float16 numbers, or signs, which older files store as bits."""
    plain, packed = tensors.get(f"s{side}h"), tensors.get(f"s{side}")
    if plain is not None:
        check_shape(plain, (count,))
        return plain_values(plain).reshape(-1)
    if packed is None:
        raise MalformedFile(f"the quantized weight of {module!r} lacks s{side}h; fetch the model again")
    check_shape(packed, (count // 16,))
    bits = np.unpackbits(integers(packed, "I16").view(np.uint8), bitorder="little")
    return np.float32(1) - np.float32(2) * bits


def read(config: ConfigReader) -> Scheme:
    """Reads the quantization_config of EXL3."""
    config.refuse_others(KEYS)
    return ModuleScheme(weight, marker="trellis", needed=("trellis",), optional=("suh", "svh", "su", "sv", MCG, MUL1))

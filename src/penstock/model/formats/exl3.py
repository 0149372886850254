"""Reads EXL3; trellis.py defines its weights."""

from __future__ import annotations

import numpy as np

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.formats.grouped import Floats, plain_values
from penstock.model.formats.modules import ModuleScheme, ModuleTensors, Scheme, check_shape, integers
from penstock.model.formats.trellis import FACTORS, HADAMARD_SIZE, MCG, MUL1, NAME, PLAIN, TILE, Trellis
from penstock.model.tensor import Format, Tensor

KEYS = {  # the relevant ones are repeated next to each weight
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
NOT_FETCHED = 0  # placeholder if only a file's header was downloaded, to plan its memory


def weight(module: str, tensors: ModuleTensors) -> Tensor:
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
    return Tensor(trellis.name, Format(NAME, 1, 4), (rows, width), Trellis(stored, kind, left, right))


def read_kind(module: str, tensors: ModuleTensors) -> str:
    """Returns the code book's kind; non-default kinds store their factor as a tensor."""
    kinds = [kind for kind in (MCG, MUL1) if kind in tensors]
    for kind in kinds:
        factor = integers(tensors[kind], "I32", "U32").reshape(-1).view(np.uint32).tolist()
        if factor not in ([FACTORS[kind]], [NOT_FETCHED]) or len(kinds) > 1:
            raise UnsupportedModel(f"{module!r} has an unknown code book; supported: {', '.join(FACTORS)}")
    return kinds[0] if kinds else PLAIN


def signs(module: str, tensors: ModuleTensors, side: str, count: int) -> Floats:
    """Returns the row or column factors: float16 numbers or, in older files, sign bits."""
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
    config.refuse_others(KEYS)
    return ModuleScheme(weight, marker="trellis", needed=("trellis",), optional=("suh", "svh", "su", "sv", MCG, MUL1))

"""Decides the format of each weight when a model is quantized, at load or to a file, on every device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from penstock.model.roles import Role
from penstock.model.tensor import FORMATS, PLAIN, Bytes, Format, Tensor, flat, some_rows


class Precision(Enum):
    """Selects how far quantization may round a tensor."""

    QUANTIZED = "becomes the format that was asked for"
    FINER = "becomes a finer format if 4 or 5 bits were asked for"
    PLAIN = "stays as it is"


PRECISION = {  # the only table, for `--quantize` on all devices and for `penstock quantize`
    Role.EMBEDDING: Precision.FINER,
    Role.POSITIONS: Precision.PLAIN,
    Role.HEAD: Precision.FINER,
    Role.EMBEDDING_PROJECTION: Precision.QUANTIZED,
    Role.ATTENTION_IN: Precision.QUANTIZED,
    Role.ATTENTION_OUT: Precision.QUANTIZED,
    Role.MLA_KV_B: Precision.QUANTIZED,
    Role.MLA_HEADS: Precision.QUANTIZED,
    Role.INDEX: Precision.PLAIN,  # rounding would select other positions
    Role.MLP_IN: Precision.QUANTIZED,
    Role.MLP_OUT: Precision.QUANTIZED,
    Role.EXPERT_IN: Precision.QUANTIZED,
    Role.EXPERT_OUT: Precision.QUANTIZED,
    Role.ROUTER: Precision.PLAIN,  # rounding would select other experts
    Role.SHARED_EXPERT_GATE: Precision.PLAIN,
    Role.DELTA_IN: Precision.QUANTIZED,
    Role.DELTA_OUT: Precision.QUANTIZED,
    Role.DELTA_GATES: Precision.FINER,  # rounding would change how a state decays
    Role.DELTA_NORM: Precision.PLAIN,
    Role.CONV_IN: Precision.QUANTIZED,
    Role.CONV_OUT: Precision.QUANTIZED,
    Role.SSM_IN: Precision.QUANTIZED,
    Role.SSM_OUT: Precision.QUANTIZED,
    Role.SSM_STEP: Precision.FINER,  # rounding would change how a state decays
    Role.SSM_NORM: Precision.PLAIN,
    Role.CONV: Precision.PLAIN,
    Role.NORM: Precision.PLAIN,
    Role.BIAS: Precision.PLAIN,
    Role.ROUTER_BIAS: Precision.PLAIN,
    Role.PER_LAYER_EMBEDDING: Precision.FINER,
    Role.PER_LAYER_IN: Precision.QUANTIZED,
    Role.PER_LAYER_OUT: Precision.QUANTIZED,
    Role.STREAM_PROJECTION: Precision.QUANTIZED,
    Role.STREAM_COEFFICIENTS: Precision.PLAIN,
    Role.LAUREL: Precision.QUANTIZED,
    Role.SCALE: Precision.PLAIN,
    Role.HEAD_PARAMETER: Precision.PLAIN,
}
FINER = dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K"), "Q6_K")
NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # substitutes if the row length is not a multiple of 256

Encode = Callable[[Tensor, Format], Tensor]


class FormatChoice(NamedTuple):
    """Holds the chosen formats and notes for the user."""

    formats: Mapping[str, Format]  # new formats by canonical name
    notes: tuple[str, ...]  # differences from the request, without repetition


def precision_of(tensor: Tensor) -> Precision:
    """Returns the precision for this tensor; without a role it stays as it is."""
    return Precision.PLAIN if tensor.role is None else PRECISION[tensor.role]


def choose(tensors: Mapping[str, Tensor], to: str, again: bool = False) -> FormatChoice:
    """Chooses the format `to`, or the nearest that fits, for each quantizable tensor.

    Unless `again`, quantized tensors keep their formats.
    """
    formats: dict[str, Format] = {}
    notes: dict[str, None] = {}
    for name, tensor in tensors.items():
        precision = precision_of(tensor)
        if precision is Precision.PLAIN or len(tensor.shape) < 2:
            continue
        if tensor.format.name not in PLAIN and not again:
            notes[f"weights in {tensor.format.name} stay as they are: {to} is for plain ones"] = None
            continue
        wanted = FINER.get(to, to) if precision is Precision.FINER else to
        format = fitting(wanted, tensor.shape[-1])
        if format is None:
            notes[f"weights with rows of {tensor.shape[-1]} stay as they are: {to} needs multiples of 32"] = None
            continue
        if format.name != wanted:
            notes[f"weights with rows of {tensor.shape[-1]}, no multiple of 256, become {format.name}"] = None
        formats[name] = format
    return FormatChoice(formats, tuple(notes))


def fitting(name: str, width: int) -> Format | None:
    """Returns the named format or its substitute for narrow rows; None if `width` fits neither."""
    found = next((one for one in (name, NARROW.get(name, "")) if one and width % FORMATS[one].values == 0), None)
    return FORMATS[found] if found else None


def quantized_when_read(tensor: Tensor, format: Format, encode: Encode) -> Tensor:
    """Returns a matrix, or one per head, that is quantized when its bytes are read, so no copy is held twice."""
    matrix = flat(tensor)

    def rows(first: int, last: int) -> Bytes:
        return encode(some_rows(matrix, first, last), format).data

    return replace(tensor, format=format, source=rows, scales=None)

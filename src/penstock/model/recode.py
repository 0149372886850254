"""Which format each weight becomes when a checkpoint is quantized. Norms, biases and routers stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from penstock.model.tensor import FORMATS, PLAIN, Bytes, Format, Tensor, flat, some_rows

ENDS = ("embed", "head")
SMALL = ("delta_ba", "delta_b", "delta_a")  # they decide what a state keeps
PARTS = frozenset((*ENDS, "q", "k", "v", "o", "qkv", "gate", "up", "down", "gate_up"))
PARTS |= {*SMALL, "delta_qkvz", "delta_qkv", "delta_z", "delta_o"}
HEADS = ("kv_b", "k_b", "v_b")  # of latent attention
PARTS |= {"q_a", "q_b", "kv_a", "latent", "turned", *HEADS}
FINER = dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K"), "Q6_K")  # of the ends and of small ones
NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # where rows are no multiple of 256

Encode = Callable[[Tensor, Format], Tensor]


class Choice(NamedTuple):
    formats: Mapping[str, Format]  # of those that change, by canonical name
    notes: tuple[str, ...]  # what is not as was asked for, each once


def choose(tensors: Mapping[str, Tensor], to: str, again: bool = False) -> Choice:
    """What becomes the format `to`, or one near to it. Unless `again`, what is quantized already stays as it is."""
    formats: dict[str, Format] = {}
    notes: dict[str, None] = {}
    for name, tensor in tensors.items():
        part = name.rpartition(".")[2]
        if part not in PARTS or len(tensor.shape) < 2:
            continue
        if tensor.format.name not in PLAIN and not again:
            notes[f"weights in {tensor.format.name} stay as they are: {to} is for plain ones"] = None
            continue
        wanted = FINER.get(to, to) if part in (*ENDS, *SMALL) else to
        format = fitting(wanted, tensor.shape[-1])
        if format is None:
            notes[f"weights with rows of {tensor.shape[-1]} stay as they are: {to} needs multiples of 32"] = None
            continue
        if format.name != wanted:
            notes[f"weights with rows of {tensor.shape[-1]}, no multiple of 256, become {format.name}"] = None
        formats[name] = format
    return Choice(formats, tuple(notes))


def fitting(name: str, width: int) -> Format | None:
    found = next((one for one in (name, NARROW.get(name, "")) if one and width % FORMATS[one].values == 0), None)
    return FORMATS[found] if found else None


def recoded(tensor: Tensor, format: Format, encode: Encode) -> Tensor:
    """A matrix, or one for each head, whose bytes are made when they are asked for: none is held twice."""
    matrix = flat(tensor)

    def rows(first: int, last: int) -> Bytes:
        return encode(some_rows(matrix, first, last), format).data

    return Tensor(tensor.name, format, tensor.shape, rows)

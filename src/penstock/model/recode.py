"""Which format each weight becomes when a checkpoint is quantized. Norms, biases and routers stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import NamedTuple

import numpy as np

from penstock.model.tensor import FORMATS, PLAIN, Format, Tensor

ENDS = ("embed", "head")
PARTS = frozenset((*ENDS, "q", "k", "v", "o", "qkv", "gate", "up", "down", "gate_up"))
FINER = dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K"), "Q6_K")  # of the ends
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
        wanted = FINER.get(to, to) if part in ENDS else to
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


def outline(tensor: Tensor, format: Format) -> Tensor:
    """What the tensor will be, as large as it will be, without its bytes."""
    size = prod(tensor.shape) // format.values * format.bytes
    return Tensor(tensor.name, format, tensor.shape, np.broadcast_to(np.uint8(0), size))


class Recoded(Mapping[str, Tensor]):
    """Tensors of which some take another format when they are asked for: none is held twice."""

    def __init__(self, tensors: Mapping[str, Tensor], formats: Mapping[str, Format], encode: Encode) -> None:
        self._tensors = tensors
        self._formats = formats
        self._encode = encode

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return self._encode(tensor, self._formats[name]) if name in self._formats else tensor

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

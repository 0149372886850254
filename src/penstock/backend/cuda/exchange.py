"""Replaces the weights of a program on a GPU in place, so that captured graphs stay valid.

New weights are packed in host memory by the same functions, without a call to the driver: another thread may be
capturing a graph, which such a call would spoil. Then their bytes are copied over the loaded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from penstock.backend.base import Model
from penstock.backend.cuda.device_properties import DeviceProperties
from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.launchers import CAPABILITIES
from penstock.backend.cuda.packer import CudaPacker
from penstock.backend.cuda.quantized_weights import Workspace
from penstock.backend.cuda.transfer import Transfer
from penstock.backend.weight_exchange import EXPERTS, HEADS, MATRIX, VECTOR, PackedWeight, PairingPacker
from penstock.errors import WeightsError
from penstock.model.program import Program, record

SHARED = (Workspace, Tilings, DeviceProperties)  # parts of weights that are not values


class CudaUpdate:
    """Replaces weights: see WeightUpdate. Everything keeps its place in the device's memory."""

    def __init__(
        self,
        packer: CudaPacker,
        loaded: Iterable[PackedWeight],
        program: Program,
        device: torch.device,
        on_stream: Callable[[], AbstractContextManager[Any]],
        before_exchange: Callable[[], None],
    ) -> None:
        self.packer = PairingPacker(packer, loaded, (MATRIX, VECTOR, EXPERTS, HEADS))
        self._program = program
        self._transfer = Transfer(device)
        self._on_stream = on_stream
        self._before_exchange = before_exchange
        self._copies: list[tuple[Any, Any]] = []

    def prepare(self, model: Model) -> None:
        check_same_program(self._program, record(model, CAPABILITIES))
        self._copies = [copy for pair in self.packer.pairs for copy in copies(*pair)]

    def exchange(self) -> None:
        self._before_exchange()
        with self._on_stream():
            for loaded, new in self._copies:
                self._transfer.send(new.reshape(-1).view(torch.uint8).numpy(), loaded)
            self._transfer.close()


def copies(loaded: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the tensors of two packed weights that are laid out alike, pair by pair. Raises WeightsError if they are
    not, or if they differ in a number, which captured graphs hold."""
    for one, other in zip(leaves(loaded), leaves(new), strict=True):
        if isinstance(one, torch.Tensor):
            if one.shape != other.shape or one.dtype != other.dtype:
                raise WeightsError("a weight would be packed in another layout, which a GPU cannot exchange")
            yield one, other
        elif one != other:
            raise WeightsError(
                f"a weight has the factor {other}; the loaded one has {one}, which a GPU cannot exchange: restart with "
                "the new weights"
            )


def leaves(weight: Any) -> Iterator[Any]:
    """Yields the tensors and numbers that a packed weight is made of."""
    if isinstance(weight, SHARED):
        return
    if isinstance(weight, Mapping):
        weight = [weight[name] for name in sorted(weight)]
    if is_dataclass(weight):
        weight = [getattr(weight, field.name) for field in fields(weight)]
    if isinstance(weight, list | tuple):
        for part in weight:
            yield from leaves(part)
    else:
        yield weight


def check_same_program(loaded: Program, new: Program) -> None:
    """Raises WeightsError if a number in the program would differ: launches that are captured in graphs hold it."""
    for one, other in zip(loaded.nodes, new.nodes, strict=True):
        for name, value in one.attributes.items():
            for mine, theirs in zip(leaves(value), leaves(other.attributes[name]), strict=True):
                if mine is not theirs and (isinstance(mine, torch.Tensor) or mine != theirs):
                    raise WeightsError(
                        f"{name} of {one.op} is {theirs}; the loaded model has {mine}, which a GPU cannot exchange: "
                        "restart with the new weights"
                    )

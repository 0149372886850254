"""Groups the tensors of each quantized weight, and combines them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from penstock.errors import MalformedFile
from penstock.model.tensor import Tensor

ModuleTensors = Mapping[str, Tensor]  # one module's tensors, by the name after the module's and a dot
DTYPES = {"U8": "u1", "I8": "i1", "F8_E8M0": "u1", "I16": "<i2", "I32": "<i4", "U32": "<u4", "I64": "<i8"}


class Scheme(Protocol):
    """Describes how a checkpoint stores its weights."""

    def weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns one tensor per weight, by file name; unquantized tensors are unchanged."""


class ModuleScheme(NamedTuple):
    """Reads formats that store several tensors per quantized module."""

    weight: Callable[[str, ModuleTensors], Tensor]  # combines a module's tensors
    marker: str  # a tensor that only quantized modules have
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    rename: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict  # normalizes names to module.kind
    unused: tuple[str, ...] = ()  # scales of activations or the cache, which Penstock computes itself

    def weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        left = self.rename(tensors)
        drop_unused(left, self.unused)
        found: dict[str, Tensor] = {}
        for name in [name for name in left if name.endswith(f".{self.marker}")]:
            module = name.removesuffix(f".{self.marker}")
            found[f"{module}.weight"] = self.weight(module, self._take(left, module))
        own = {*self.needed, *self.optional} - {"weight"}
        for name in left:
            if any(name.endswith(f".{kind}") for kind in own):
                raise MalformedFile(f"tensor {name!r} belongs to a quantized weight that is not there")
        if both := sorted(found.keys() & left.keys()):
            raise MalformedFile(f"tensor {both[0]!r} is stored twice: quantized, and not")
        return left | found

    def _take(self, left: dict[str, Tensor], module: str) -> ModuleTensors:
        """Removes a module's tensors from `left` and returns them."""
        names = {kind: f"{module}.{kind}" for kind in (*self.needed, *self.optional)}
        for kind in self.needed:
            if names[kind] not in left:
                raise MalformedFile(f"the quantized weight of {module!r} lacks {names[kind]!r}; fetch the model again")
        return {kind: left.pop(name) for kind, name in names.items() if name in left}


class Unquantized:
    """Reads unquantized checkpoints."""

    def weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)


def drop_unused(left: dict[str, Tensor], kinds: Collection[str]) -> None:
    unused = [name for name in left if name.endswith(tuple(f".{kind}" for kind in kinds))]
    for name in unused:
        del left[name]
    if unused:
        import logging  # slow to import

        logging.getLogger(__name__).info(
            "%d static scales of activations are not used: activations are scaled row by row", len(unused)
        )


def integers(tensor: Tensor, *kinds: str) -> NDArray[Any]:
    """Returns the tensor's integers in its own shape; raises for other types."""
    if tensor.format.name not in kinds:
        raise MalformedFile(
            f"tensor {tensor.name!r} is stored as {tensor.format.name}; it must be {' or '.join(kinds)}"
        )
    values: NDArray[Any] = tensor.data.view(DTYPES[tensor.format.name]).reshape(tensor.shape)
    return values


def matrix_shape(tensor: Tensor) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise MalformedFile(f"tensor {tensor.name!r} has shape {tensor.shape}; it must be a matrix")
    return tensor.shape[0], tensor.shape[1]


def check_shape(tensor: Tensor, *shapes: tuple[int, ...]) -> None:
    """Raises unless the tensor has one of these shapes."""
    if tensor.shape not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise MalformedFile(f"tensor {tensor.name!r} has shape {tensor.shape}; its weight and config need {wanted}")

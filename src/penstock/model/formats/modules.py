"""Which tensors of a checkpoint belong to which quantized weight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray

from penstock.errors import MalformedFile
from penstock.model.tensor import Tensor

Parts = Mapping[str, Tensor]  # of one weight, by what follows the module's name
DTYPES = {"U8": "u1", "I8": "i1", "F8_E8M0": "u1", "I16": "<i2", "I32": "<i4", "U32": "<u4", "I64": "<i8"}


class Scheme(NamedTuple):
    """How a format stores a weight."""

    weight: Callable[[str, Parts], Tensor]  # of a module's parts
    mark: str  # the part that only quantized weights have
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    named: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict  # so that parts follow a dot
    unused: tuple[str, ...] = ()  # about activations or the cache, which this engine scales as they come


def put_together(tensors: Mapping[str, Tensor], scheme: Scheme) -> dict[str, Tensor]:
    """The quantized weights as one tensor each, and all others as they are."""
    left = scheme.named(tensors)
    drop_unused(left, scheme.unused)
    found: dict[str, Tensor] = {}
    for name in [name for name in left if name.endswith(f".{scheme.mark}")]:
        module = name.removesuffix(f".{scheme.mark}")
        found[f"{module}.weight"] = scheme.weight(module, take_parts(left, module, scheme))
    own = {*scheme.needed, *scheme.optional} - {"weight"}
    for name in left:
        if any(name.endswith(f".{part}") for part in own):
            raise MalformedFile(f"tensor {name!r} belongs to a quantized weight that is not there")
    if both := sorted(found.keys() & left.keys()):
        raise MalformedFile(f"tensor {both[0]!r} is stored twice: quantized, and not")
    return left | found


def take_parts(left: dict[str, Tensor], module: str, scheme: Scheme) -> Parts:
    names = {part: f"{module}.{part}" for part in (*scheme.needed, *scheme.optional)}
    for part in scheme.needed:
        if names[part] not in left:
            raise MalformedFile(f"the quantized weight of {module!r} lacks {names[part]!r}; fetch the model again")
    return {part: left.pop(name) for part, name in names.items() if name in left}


def drop_unused(left: dict[str, Tensor], endings: Collection[str]) -> None:
    unused = [name for name in left if name.endswith(tuple(f".{ending}" for ending in endings))]
    for name in unused:
        del left[name]
    if unused:
        import logging  # takes longer than reading most checkpoints

        logging.getLogger(__name__).info(
            "%d static scales of activations are not used: rows are scaled as they come", len(unused)
        )


def integers(tensor: Tensor, *kinds: str) -> NDArray[Any]:
    """The tensor as it lies, if it is of one of these types."""
    if tensor.format.name not in kinds:
        raise MalformedFile(
            f"tensor {tensor.name!r} is stored as {tensor.format.name}; it must be {' or '.join(kinds)}"
        )
    values: NDArray[Any] = tensor.data.view(DTYPES[tensor.format.name]).reshape(tensor.shape)
    return values


def sizes_of(tensor: Tensor) -> tuple[int, int]:
    """Of a matrix."""
    if len(tensor.shape) != 2:
        raise MalformedFile(f"tensor {tensor.name!r} has shape {tensor.shape}; it must be a matrix")
    return tensor.shape[0], tensor.shape[1]


def check_shape(tensor: Tensor, *shapes: tuple[int, ...]) -> None:
    if tensor.shape not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise MalformedFile(f"tensor {tensor.name!r} has shape {tensor.shape}; its weight and config need {wanted}")

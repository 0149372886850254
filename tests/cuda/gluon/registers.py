"""Values in registers: blocks of numbers or pointers, and scalars, with Triton's types and arithmetic."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as real

from tests.cuda.gluon.faults import KernelFault

TORCH = {
    real.int1: torch.bool,
    real.int8: torch.int8,
    real.int16: torch.int16,
    real.int32: torch.int32,
    real.int64: torch.int64,
    real.uint8: torch.uint8,
    real.float8e4nv: torch.float8_e4m3fn,
    real.float16: torch.float16,
    real.bfloat16: torch.bfloat16,
    real.float32: torch.float32,
}
TYPES = {theirs: ours for ours, theirs in TORCH.items()}
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers of so many bytes


def torch_type(dtype: Any) -> torch.dtype:
    """Returns what torch holds values of a type in: pointers are addresses."""
    return torch.int64 if dtype.is_ptr() else TORCH[dtype]


def item_bytes(dtype: Any) -> int:
    """Returns the bytes that a value takes in memory."""
    return torch_type(dtype).itemsize


class Type:
    """Says what kernels ask `x.type` for."""

    def __init__(self, layout: Any) -> None:
        self.layout = layout


class Tensor:
    """Holds a scalar (a Python number) or a block (a torch tensor) of one type. A pointer knows its `origin`: the
    memory that it was made for, or None if the address was read from memory."""

    __slots__ = ("data", "dtype", "layout", "origin")

    def __init__(self, data: Any, dtype: Any, layout: Any = None, origin: Any = None) -> None:
        self.data, self.dtype, self.layout, self.origin = data, dtype, layout, origin

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape) if isinstance(self.data, torch.Tensor) else []

    @property
    def type(self) -> Type:
        return Type(self.layout)

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        """Returns the values, or with `bitcast` their bits, as another type."""
        if bitcast:
            return Tensor(self.data.contiguous().view(torch_type(dtype)), dtype, self.layout)
        origin = self.origin if dtype.is_ptr() else None
        return Tensor(converted(self.data, dtype), dtype, self.layout, origin)

    def __getitem__(self, key: Any) -> Tensor:
        keys = key if isinstance(key, tuple) else (key,)
        if any(part not in (None, slice(None)) for part in keys):
            raise KernelFault(f"a block can be indexed with : and None, not with {key}")
        layout = self.layout
        for part in keys:
            layout = getattr(layout, "parent", None) if part is None else layout
        return Tensor(self.data[keys], self.dtype, layout, self.origin)

    def __bool__(self) -> bool:
        if self.shape:
            raise KernelFault(f"a condition must be a scalar, and this is a block {self.shape}")
        return bool(self.data)

    def __index__(self) -> int:
        if self.shape or not self.dtype.is_int():
            raise KernelFault(f"a loop or an index needs an integer, and this is {self.dtype} {self.shape}")
        return int(self.data)

    def __neg__(self) -> Tensor:
        return 0 - self

    def __hash__(self) -> int:
        return id(self)


def converted(data: Any, dtype: Any) -> Any:
    """Returns a number or a block of numbers as a type holds it."""
    if isinstance(data, torch.Tensor):
        return data.to(torch_type(dtype))
    if dtype.is_ptr() or dtype == real.int64:
        return int(data)
    if dtype == real.int1:
        return bool(data)
    if dtype.is_int():
        bits = dtype.primitive_bitwidth
        return (int(data) + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
    return float(torch.tensor(float(data)).to(torch_type(dtype))) if bits_of(dtype) < 32 else float(np.float32(data))


def bits_of(dtype: Any) -> int:
    return int(dtype.primitive_bitwidth)


def wrapped(value: Any, beside: Tensor | None = None) -> Tensor:
    """Returns a Python number as the scalar that Triton makes of it beside another operand."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool):
        return Tensor(value, real.int1)
    if isinstance(value, int):
        fits = -(2**31) <= value < 2**31
        kind = beside.dtype if beside is not None and not beside.dtype.is_ptr() and beside.dtype != real.int1 else None
        return Tensor(value, kind or (real.int32 if fits else real.int64))
    if isinstance(value, float):
        floating = beside is not None and beside.dtype.is_floating()
        return Tensor(value, beside.dtype if floating else real.float32)
    raise KernelFault(f"a kernel cannot compute with {value!r}: an asynchronous product has to be waited for first")


def promoted(a: Any, b: Any) -> Any:
    """Returns the type that both operands are computed in."""
    if a == b:
        return a
    floats = [dtype for dtype in (a, b) if dtype.is_floating()]
    if len(floats) == 1:
        return floats[0]
    if bits_of(a) == bits_of(b):
        return real.float32 if floats else a
    return max(a, b, key=bits_of)


def layout_of(*values: Tensor) -> Any:
    return next((value.layout for value in values if value.shape and value.layout is not None), None)


def truncated_quotient(a: Any, b: Any) -> Any:
    """Returns the quotient of integers rounded to zero, as C does."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return torch.div(torch.as_tensor(a), b, rounding_mode="trunc")
    return math.trunc(a / b) if abs(a) < 2**52 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a: Any, b: Any) -> Any:
    """Returns the remainder of integers, with the sign of the first, as C does."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return torch.fmod(torch.as_tensor(a), b)
    return a - truncated_quotient(a, b) * b


def binary(compute: Callable[[Any, Any], Any], result: Any = None, floating: bool = False) -> Callable[..., Any]:
    """Returns an operation on two values; `result` is its type if it is not that of the operands."""

    def operation(a: Any, b: Any) -> Tensor:
        a = wrapped(a, b if isinstance(b, Tensor) else None)
        b = wrapped(b, a)
        if a.dtype.is_ptr() or b.dtype.is_ptr():
            return with_pointer(compute, a, b)
        kind = promoted(a.dtype, b.dtype)
        if floating and not kind.is_floating():
            kind = real.float32
        dtype = result or kind
        data = compute(converted(a.data, kind), converted(b.data, kind))
        return Tensor(converted(data, dtype), dtype, layout_of(a, b))

    return operation


def with_pointer(compute: Callable[[Any, Any], Any], a: Tensor, b: Tensor) -> Tensor:
    """Returns a pointer moved by some of its elements, or a comparison of two."""
    if a.dtype.is_ptr() and b.dtype.is_ptr():
        return Tensor(compute(a.data, b.data), real.int1, layout_of(a, b))
    pointer, offset = (a, b) if a.dtype.is_ptr() else (b, a)
    size = item_bytes(pointer.dtype.element_ty)
    data = compute(pointer.data, converted(offset.data, real.int64) * size)
    return Tensor(data, pointer.dtype, layout_of(a, b), pointer.origin)


def either(of_tensors: Callable[..., Any], of_numbers: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that takes torch tensors and Python numbers."""

    def compute(*values: Any) -> Any:
        if any(isinstance(value, torch.Tensor) for value in values):
            return of_tensors(*[torch.as_tensor(value) for value in values])
        return of_numbers(*values)

    return compute


OPERATORS = {
    "add": binary(operator.add),
    "sub": binary(operator.sub),
    "mul": binary(operator.mul),
    "floordiv": binary(truncated_quotient),
    "mod": binary(remainder),
    "truediv": binary(operator.truediv, floating=True),
    "and": binary(operator.and_),
    "or": binary(operator.or_),
    "xor": binary(operator.xor),
    "lshift": binary(operator.lshift),
    "rshift": binary(operator.rshift),
}
COMPARISONS = {name: binary(getattr(operator, name), real.int1) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
for _name, _operation in OPERATORS.items():
    setattr(Tensor, f"__{_name}__", _operation)
    setattr(Tensor, f"__r{_name}__", lambda a, b, operation=_operation: operation(b, a))
for _name, _operation in COMPARISONS.items():
    setattr(Tensor, f"__{_name}__", _operation)

maximum = binary(either(torch.maximum, max))
minimum = binary(either(torch.minimum, min))


def unary(of_tensors: Callable[..., Any], of_numbers: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an operation on each value."""
    compute = either(of_tensors, of_numbers)

    def operation(value: Tensor) -> Tensor:
        return Tensor(compute(value.data), value.dtype, value.layout)

    return operation


exp = unary(torch.exp, math.exp)
exp2 = unary(torch.exp2, math.exp2)


def where(condition: Any, a: Any, b: Any) -> Tensor:
    """Returns `a` where the condition holds, else `b`."""
    a = wrapped(a, b if isinstance(b, Tensor) else None)
    b, condition = wrapped(b, a), wrapped(condition)
    kind = promoted(a.dtype, b.dtype)
    if not (condition.shape or a.shape or b.shape):
        return Tensor(converted(a.data if condition.data else b.data, kind), kind)
    data = torch.where(*(torch.as_tensor(value.data) for value in (condition, a, b)))
    return Tensor(converted(data, kind), kind, layout_of(condition, a, b))


def arange(start: int, end: int, layout: Any = None) -> Tensor:
    return Tensor(torch.arange(start, end, dtype=torch.int32), real.int32, layout)


def full(shape: Sequence[int], value: Any, dtype: Any, layout: Any = None) -> Tensor:
    return Tensor(torch.full(tuple(shape), wrapped(value).data, dtype=torch_type(dtype)), dtype, layout)


def zeros(shape: Sequence[int], dtype: Any, layout: Any = None) -> Tensor:
    return full(shape, 0, dtype, layout)


def zeros_like(value: Tensor) -> Tensor:
    return zeros(value.shape, value.dtype, value.layout)


def convert_layout(value: Tensor, layout: Any) -> Tensor:
    return Tensor(wrapped(value).data, value.dtype, layout)


def reshape(value: Tensor, shape: Sequence[int]) -> Tensor:
    return Tensor(value.data.reshape(tuple(shape)), value.dtype)


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both halves of a block whose last dimension is 2."""
    left, right = value.data.unbind(-1)
    return Tensor(left, value.dtype), Tensor(right, value.dtype)


def join(a: Tensor, b: Tensor) -> Tensor:
    return Tensor(torch.stack((a.data, b.data), -1), a.dtype)


def sliced(layout: Any, axis: int) -> Any:
    return None if layout is None else real.SliceLayout(axis, layout)


def max_along(value: Tensor, axis: int) -> Tensor:
    return Tensor(value.data.amax(axis), value.dtype, sliced(value.layout, axis))


def sum_along(value: Tensor, axis: int) -> Tensor:
    return Tensor(value.data.sum(axis, dtype=value.data.dtype), value.dtype, sliced(value.layout, axis))


def reduce(value: Tensor, axis: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Returns what is left of a dimension when its halves are combined again and again."""
    while (size := value.shape[axis]) > 1:
        halves = (value.data.narrow(axis, start, size // 2) for start in (0, size // 2))
        value = combine(*(Tensor(half, value.dtype, value.layout) for half in halves))
    data = value.data.squeeze(axis)
    return Tensor(data if data.dim() else data.item(), value.dtype, sliced(value.layout, axis) if data.dim() else None)

"""Launches: runs every program of a kernel, with Triton's names bound to the interpreter's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from triton.experimental.gluon import language as real
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.cuda.gluon.faults import KernelFault
from tests.cuda.gluon.language import Descriptor, Language, range_of
from tests.cuda.gluon.machine import Machine
from tests.cuda.gluon.memory import pointer_to
from tests.cuda.gluon.registers import Tensor

SEED = 0  # of the order of programs and of the turns of partitions


class Interpreter:
    """Runs kernels in Python: their functions, with other globals."""

    def __init__(self) -> None:
        self.language = Language()
        self.names = self.language.names()
        self.functions: dict[int, tuple[Any, Callable[..., Any]]] = {}  # by id, with what has it
        self.globals: dict[int, tuple[Any, dict[str, Any]]] = {}

    def function(self, jitted: Any) -> Callable[..., Any]:
        """Returns a Gluon function as one of Python."""
        if id(jitted) not in self.functions:
            self.functions[id(jitted)] = jitted, self._translated(jitted)
        return self.functions[id(jitted)][1]

    def _translated(self, jitted: Any) -> Callable[..., Any]:
        body = FunctionType(jitted.fn.__code__, self._globals_of(jitted.fn), jitted.fn.__name__, jitted.fn.__defaults__)
        constants = [(place, param.name) for place, param in enumerate(jitted.params) if param.is_constexpr]

        def call(*args: Any, **named: Any) -> Any:
            for place, name in constants:
                value = args[place] if place < len(args) else named[name]
                if isinstance(value, Tensor):
                    raise KernelFault(f"{body.__name__} needs {name} when it is compiled, and gets a value of a run")
            calls = self.language.machine.running.calls
            calls.append(body.__name__)
            try:
                return body(*args, **named)
            finally:
                calls.pop()

        return call

    def _globals_of(self, function: Any) -> dict[str, Any]:
        theirs = function.__globals__
        if id(theirs) not in self.globals:
            ours = {"range": range_of} | {name: self._bound(value) for name, value in theirs.items()}
            self.globals[id(theirs)] = theirs, ours
        return self.globals[id(theirs)][1]

    def _bound(self, value: Any) -> Any:
        """Returns what a name of a kernel's file stands for here."""
        if isinstance(value, GluonJITFunction):
            return self._called(value)
        if isinstance(value, real.constexpr):
            return value.value
        return self.names.get(id(value), value)

    def _called(self, jitted: Any) -> Callable[..., Any]:
        """Returns a function that is translated when it is called: its file may name those that call it."""

        def call(*args: Any, **named: Any) -> Any:
            return self.function(jitted)(*args, **named)

        call.__name__ = jitted.fn.__name__
        return call

    def launch(self, jitted: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Runs all programs of a launch, one after the other in any order."""
        names = {param.name for param in jitted.params}
        constants = {param.name for param in jitted.params if param.is_constexpr}
        passed = dict(zip([param.name for param in jitted.params], args, strict=False))
        passed |= {name: value for name, value in options.items() if name in names}
        known = {name: value if name in constants else argument(value) for name, value in passed.items()}
        programs = list(itertools.product(*(range(size) for size in grid)))
        random.Random(SEED).shuffle(programs)
        for number, program in enumerate(programs):
            machine = Machine(program, grid, options["num_warps"], SEED + number)
            self.language.machine = machine
            self.function(jitted)(**known)
            machine.finish()


def argument(value: Any) -> Any:
    """Returns what a kernel sees of an argument of a launch."""
    if isinstance(value, torch.Tensor):
        return pointer_to(value)
    if isinstance(value, TensorDescriptor):
        return Descriptor(value)
    if isinstance(value, tuple):
        parts = [argument(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, int):
        return Tensor(value, real.int32 if -(2**31) <= value < 2**31 else real.int64)
    if isinstance(value, float):
        return Tensor(value, real.float32)
    raise KernelFault(f"a kernel cannot be launched with {value!r}")


INTERPRETER = Interpreter()


def run(jitted: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
    """Stands for `GluonJITFunction.run`. Kernels start before the one before them has ended (PDL), as on a GPU that has
    them. More threads would wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        INTERPRETER.launch(jitted, grid, args, options | {"PDL": True})
    finally:
        torch.set_num_threads(threads)

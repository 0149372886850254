"""Every kernel is launched by some test: what no test runs, nobody knows to work."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

import pytest

from penstock.backend.cuda import kernels
from tests.cuda.conftest import FOLDER

COMPILING = "test_compiles.py"  # launches nothing


def entries() -> set[str]:
    """The names of all kernels that are launched: those that take PDL from `launch_options`, unlike what they call."""
    found = set()
    for module in pkgutil.iter_modules(kernels.__path__):
        for name, value in vars(importlib.import_module(f"{kernels.__name__}.{module.name}")).items():
            function: Any = getattr(value, "fn", None)
            if name.startswith("_") and callable(function) and "PDL" in inspect.signature(function).parameters:
                found.add(name)
    return found


def test_kernels_are_found() -> None:
    assert {"_gemv", "_decode_attention", "_quant_gemm", "_hopper_gemm", "_draw"} <= entries()
    assert "_fold" not in entries()


def test_every_kernel_was_launched(launched: set[str], request: pytest.FixtureRequest) -> None:
    collected = {Path(item.path).name for item in request.session.items if FOLDER in item.path.parents}
    launching = {path.name for path in FOLDER.glob("test_*.py")} - {COMPILING}
    if not launching <= collected or request.config.option.keyword:
        pytest.skip("only some of the tests are run")
    never = entries() - launched
    assert not never, f"no test launches {', '.join(sorted(never))}"

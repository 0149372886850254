"""Compiles kernels for a GPU that is not there, and prints what each one takes: `python -m tests.cuda.compile_kernels`.

Triton's wheel brings its own ptxas, so a machine without a GPU can check that every kernel compiles for an
architecture, fits its shared memory, and keeps what its loops need in registers. The interpreter has to be off: it is
chosen when kernels are defined.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from tests.cuda.machine_code import spilled

# bytes that one program may have, by compute capability
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
MOST_SPILLED = 0.25  # of the instructions in a loop (machine_code.py): a kernel that spends more on spills is a fault


class AbsentGpu:
    """Stands where Triton looks for a GPU: one of a given compute capability that runs nothing."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_case(name: str, capability: int) -> list[dict[str, Any]]:
    """Compiles every launch of a case; returns what Triton says of each kernel."""
    from penstock.backend.cuda.device_properties import DeviceProperties
    from penstock.backend.cuda.device_tilings import Tilings
    from penstock.backend.cuda.kernels import pdl
    from tests.cuda.compile_cases import CASES

    gpu = DeviceProperties(f"sm_{capability}", divmod(capability, 10), 100, SHARED_MEMORY[capability], 40 << 20)
    driver.set_active(AbsentGpu(capability))
    pdl.enabled = capability >= 90
    run, found = JITFunction.run, []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        about = {"kernel": self._fn_name, "shared": kernel.metadata.shared, "ptx": kernel.asm["ptx"]}
        found.append(about | {"spilled": spilled(kernel.asm["cubin"])})
        return kernel

    JITFunction.run = compile_only
    try:
        CASES[name](Tilings(gpu))
    finally:
        JITFunction.run = run
    return found


def chosen(capability: int, sample: bool) -> list[str]:
    """Returns the names of the cases for an architecture; of a sample, those that need most shared memory and a share
    of the others, so that every case is compiled for some architecture."""
    from tests.cuda.compile_cases import CASES, HOPPER, LARGE, NEEDS_FP8

    order = list(SHARED_MEMORY).index(capability)
    runs = [name for name in CASES if not (name in HOPPER and capability != 90)]
    runs = [name for name in runs if not (name in NEEDS_FP8 and capability < 89)]
    others = [name for name in CASES if name not in LARGE and name not in HOPPER and name not in NEEDS_FP8]
    share = {*others[order :: len(SHARED_MEMORY)], *LARGE}
    share |= HOPPER if capability == 90 else set()
    share |= NEEDS_FP8 if capability == 89 else set()
    return [name for name in runs if name in share] if sample else runs


def told_of(name: str, capability: int, ptx: Path | None) -> dict[str, Any]:
    """Compiles a case; returns how long it took, what its kernels take, and what went wrong."""
    start = time.monotonic()
    found: list[dict[str, Any]] = []
    error = ""
    try:
        found = compile_case(name, capability)
    except Exception as failure:
        error = str(failure).strip()[-500:] or repr(failure)
    if ptx:
        ptx.mkdir(parents=True, exist_ok=True)
        for index, kernel in enumerate(found):
            (ptx / f"{capability}-{name}-{index}.ptx").write_text(kernel["ptx"])
    return {
        "sm": capability,
        "case": name,
        "kernels": len(found),
        "seconds": round(time.monotonic() - start, 1),
        "shared": [kernel["shared"] for kernel in found],
        "over": [kernel["kernel"] for kernel in found if kernel["shared"] > SHARED_MEMORY[capability]],
        "spills": {kernel["kernel"]: kernel["spilled"] for kernel in found if kernel["spilled"] > MOST_SPILLED},
        "error": error,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, action="append", choices=SHARED_MEMORY, help="default: all")
    parser.add_argument("--case", action="append", help="default: all")
    parser.add_argument("--sample", action="store_true", help="a share of the cases for each architecture")
    parser.add_argument("--ptx", type=Path, help="folder to write each kernel's PTX to")
    options = parser.parse_args()
    failed = False
    for capability in options.capability or SHARED_MEMORY:
        for name in options.case or chosen(capability, options.sample):
            told = told_of(name, capability, options.ptx)
            failed = failed or bool(told["error"] or told["over"] or told["spills"])
            print(json.dumps(told), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

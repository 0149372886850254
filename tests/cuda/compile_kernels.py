"""Compiles kernels for a GPU that is not there, and prints what each one takes: `python -m tests.cuda.compile_kernels`.

Triton's wheel brings its own ptxas, so a machine without a GPU can check that every kernel compiles for an
architecture and fits its shared memory. The interpreter has to be off: it is chosen when kernels are defined.
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

SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes that one program may have


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
    from penstock.backend.cuda.kernels import pdl
    from tests.cuda.compile_cases import CASES

    driver.set_active(AbsentGpu(capability))
    pdl.enabled = capability >= 90
    run, found = JITFunction.run, []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if "INTERPRET" in options:
            options["INTERPRET"] = False
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append({"kernel": self._fn_name, "shared": kernel.metadata.shared, "ptx": kernel.asm["ptx"]})
        return kernel

    JITFunction.run = compile_only
    try:
        CASES[name]()
    finally:
        JITFunction.run = run
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, action="append", choices=SHARED_MEMORY, help="default: all")
    parser.add_argument("--case", action="append", help="default: all")
    parser.add_argument("--ptx", type=Path, help="folder to write each kernel's PTX to")
    options = parser.parse_args()
    from tests.cuda.compile_cases import CASES, HOPPER, NEEDS_FP8

    failed = 0
    for capability in options.capability or SHARED_MEMORY:
        for name in options.case or CASES:
            if (name in HOPPER and capability != 90) or (name in NEEDS_FP8 and capability < 89):
                continue
            start = time.monotonic()
            try:
                found = compile_case(name, capability)
                error = ""
            except Exception as failure:
                found, error = [], str(failure).strip()[-300:]
            over = [one["kernel"] for one in found if one["shared"] > SHARED_MEMORY[capability]]
            failed += bool(error or over)
            if options.ptx:
                for index, one in enumerate(found):
                    options.ptx.mkdir(parents=True, exist_ok=True)
                    (options.ptx / f"{capability}-{name}-{index}.ptx").write_text(one["ptx"])
            told = {
                "sm": capability,
                "case": name,
                "kernels": len(found),
                "seconds": round(time.monotonic() - start, 1),
            }
            told |= {"shared": max([one["shared"] for one in found], default=0), "over": over, "error": error}
            print(json.dumps(told), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

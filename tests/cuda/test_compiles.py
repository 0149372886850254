"""Kernels compile for GPUs that are not here, fit their shared memory and need few spills: sm_80, 89, 90 and 100.

Kernels are compiled in another process, since this one may interpret them. A sample of the launches is compiled; all of
them with PENSTOCK_CUDA_TESTS=all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.compile_kernels import SHARED_MEMORY

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_kernels_compile_and_fit(capability: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    amount = [] if os.environ.get("PENSTOCK_CUDA_TESTS") == "all" else ["--sample"]
    command = [sys.executable, "-m", "tests.cuda.compile_kernels", "--capability", str(capability), *amount]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert [case for case in cases if case["error"] or case["over"] or case["spills"]] == []
    assert done.returncode == 0, done.stderr[-2000:]
    assert sum(case["kernels"] for case in cases) > 20

"""Native code is called in threads that compute beside others, and that a process may leave behind."""

from __future__ import annotations

import subprocess
import sys

LEAVES_THREADS = """
import threading
import numpy as np
from penstock.backend.cpu import _native

data = np.zeros(1 << 24, np.uint8)

def compute(begun):
    while True:
        _native.crc32(data)
        begun.set()

computing = [threading.Event() for _ in range(4)]
for begun in computing:
    threading.Thread(target=compute, args=[begun], daemon=True).start()
for begun in computing:
    begun.wait()
"""


def test_a_process_ends_well_while_threads_are_in_native_code() -> None:
    """A program need not close its engine before it ends. Python unwinds the stacks of such threads when they come
    back, and the process was aborted by that."""
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES_THREADS], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")

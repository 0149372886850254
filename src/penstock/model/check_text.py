"""Reads a model file's tokenizer in a process with limits, because an untrusted file may exhaust memory or crash the
tokenizer library.

`python -m penstock.model.check_text FILE` prints the error, if any, and exits with 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from penstock.errors import MalformedFile, ModelError

MEMORY = 768 * 2**20  # bytes; Gemma's 262,144 tokens take half of it
CPU_SECONDS = 20
WALL_SECONDS = 120.0
LAST_WORDS = 2000  # characters of the process's output that an error quotes


def check_text(path: Path) -> None:
    """Raises ModelError unless a process within the limits can read the file's tokenizer."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = (sys.executable, "-m", __name__, str(path))
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WALL_SECONDS)
    except subprocess.TimeoutExpired:
        raise _too_large() from None
    if done.returncode == 1 and done.stdout:
        raise MalformedFile(done.stdout.strip()[-LAST_WORDS:])
    if done.returncode:
        raise _too_large()


def _too_large() -> MalformedFile:
    return MalformedFile(
        f"its tokenizer cannot be read within {CPU_SECONDS} seconds and {MEMORY >> 20} MiB: make its vocabulary smaller"
    )


def main(path: str) -> int:
    from penstock.model.load import load_text

    _limit()
    try:
        load_text(Path(path))
    except ModelError as error:
        print(error)
        return 1
    return 0


def _limit() -> None:
    """Sets this process's resource limits where the system supports them. Windows has only the timeout."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

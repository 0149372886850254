"""Reads the tokenizer of a model file in a process with limits: a file of strangers may have a vocabulary of millions,
or one that the tokenizer library does not survive.

`python -m penstock.model.check_text FILE` prints what is wrong with the file, if anything is, and exits with 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from penstock.errors import MalformedFile, ModelError

MEMORY = 768 * 2**20  # bytes: Gemma's vocabulary of 262,144 tokens takes half of it, one of 3 million does not fit
CPU_SECONDS = 20
WALL_SECONDS = 120.0
LAST_WORDS = 2000  # characters of what a process printed


def check_text(path: Path) -> None:
    """Raises ModelError unless the file has a tokenizer that can be read within the limits."""
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
    """Limits what this process may take, where the system has such limits; on Windows only its time is limited."""
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

"""Locks files between processes, and creates folders and files that only this user can read, for prompts and keys.

The system releases a lock when its holder closes the file or dies.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

FOLDER, FILE = 0o700, 0o600  # modes

if sys.platform == "win32":
    import msvcrt

    def try_lock(fd: int) -> bool:
        """Locks an open file; returns False if another process has it."""
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def try_lock(fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def make_private_folder(path: Path) -> None:
    """Creates a folder that only this user can enter. An existing folder keeps its mode, because the user may
    share it.
    """
    path.mkdir(mode=FOLDER, parents=True, exist_ok=True)


def make_private_file(path: Path) -> None:
    """Creates an empty file that only this user can read. An existing one keeps its content and becomes private. SQLite
    gives its auxiliary files the database's mode.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, FILE))
    with suppress(OSError):  # another user's file keeps its mode
        os.chmod(path, FILE)

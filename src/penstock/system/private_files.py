"""Makes folders and files that are for this user alone: prompts, keys and who used how much."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

FOLDER, FILE = 0o700, 0o600  # modes


def make_private_folder(path: Path) -> None:
    """Makes a folder that only this user can enter. One that exists keeps its mode: the user may share it."""
    path.mkdir(mode=FOLDER, parents=True, exist_ok=True)


def make_private_file(path: Path) -> None:
    """Makes an empty file that only this user can read. One that exists keeps its content, and others lose access to
    it. What SQLite writes beside a database has the database's mode."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, FILE))
    with suppress(OSError):  # another user's file stays as its owner wants it
        os.chmod(path, FILE)

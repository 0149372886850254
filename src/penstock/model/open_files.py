"""Opens a checkpoint's files; reports missing, unreadable and absurd ones."""

from __future__ import annotations

import json
import mmap
import os
import stat
from pathlib import Path
from typing import Any

from penstock.errors import MalformedFile, ModelError, ModelNotFound

MAX_JSON = 100 << 20  # bytes


def map_file(path: Path) -> mmap.mmap:
    """Maps a file read-only. Raises MalformedFile for a pipe or device."""
    try:
        _check_regular(path, path.stat().st_mode)  # opening a device may already have an effect
        with open(path, "rb", opener=_open_at_once) as file:
            _check_regular(path, os.fstat(file.fileno()).st_mode)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelNotFound(f"there is no file {path}") from error
    except ValueError as error:
        raise MalformedFile(f"{path.name} is empty; fetch it again") from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def _open_at_once(path: str, flags: int) -> int:
    """Opens without waiting for a pipe's writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise MalformedFile(f"{path} is not a regular file but a folder, a pipe or a device: give a file")


def read_json(path: Path, most: int = MAX_JSON) -> dict[str, Any]:
    """Reads a JSON object of at most `most` bytes."""
    return parse_json(_small(path, most), path.name)


def read_list(path: Path) -> list[Any]:
    value = _parse(_small(path, MAX_JSON), path.name)
    if not isinstance(value, list):
        raise MalformedFile(f"{path.name} holds {type(value).__name__} instead of a list")
    return value


def parse_json(text: bytes, source: str) -> dict[str, Any]:
    """Parses a JSON object; errors name the file `source`."""
    value = _parse(text, source)
    if not isinstance(value, dict):
        raise MalformedFile(f"{source} holds {type(value).__name__} instead of an object")
    return value


def _small(path: Path, most: int) -> bytes:
    with map_file(path) as data:
        if len(data) > most:
            raise MalformedFile(f"{path.name} has {len(data)} bytes; it may have at most {most}")
        return data[:]


def _parse(text: bytes, source: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedFile(f"{source} is not JSON: {error}") from error

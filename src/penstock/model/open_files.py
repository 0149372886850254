"""Opens the files of a checkpoint, and says what is wrong if one is missing, unreadable or absurd."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

from penstock.errors import MalformedFile, ModelError, ModelNotFound

MAX_JSON = 100 << 20  # bytes


def map_file(path: Path) -> mmap.mmap:
    """Maps the whole file into memory, read-only."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelNotFound(f"there is no file {path}") from error
    except ValueError as error:
        raise MalformedFile(f"{path.name} is empty; fetch it again") from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object."""
    return parse_json(_small(path), path.name)


def read_list(path: Path) -> list[Any]:
    """Reads a JSON file that holds a list."""
    value = _parse(_small(path), path.name)
    if not isinstance(value, list):
        raise MalformedFile(f"{path.name} holds {type(value).__name__} instead of a list")
    return value


def parse_json(text: bytes, source: str) -> dict[str, Any]:
    """Parses a JSON object; damaged or absurdly nested text is an error of the file `source`."""
    value = _parse(text, source)
    if not isinstance(value, dict):
        raise MalformedFile(f"{source} holds {type(value).__name__} instead of an object")
    return value


def _small(path: Path) -> bytes:
    with map_file(path) as data:
        if len(data) > MAX_JSON:
            raise MalformedFile(f"{path.name} has {len(data)} bytes; a JSON file may have at most {MAX_JSON}")
        return data[:]


def _parse(text: bytes, source: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedFile(f"{source} is not JSON: {error}") from error

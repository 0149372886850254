"""Opening a checkpoint's files: what is missing, unreadable or absurd is said here, once."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

from penstock.errors import MalformedFile, ModelError, ModelNotFound

MAX_JSON = 100 << 20


def map_file(path: Path) -> mmap.mmap:
    """The whole file as read-only memory."""
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
    return parse_json(_small(path), path.name)


def read_list(path: Path) -> list[Any]:
    value = _parse(_small(path), path.name)
    if not isinstance(value, list):
        raise MalformedFile(f"{path.name} holds {type(value).__name__} instead of a list")
    return value


def parse_json(text: bytes, source: str) -> dict[str, Any]:
    """An object; damaged or absurdly nested text is the file's fault."""
    value = _parse(text, source)
    if not isinstance(value, dict):
        raise MalformedFile(f"{source} holds {type(value).__name__} instead of an object")
    return value


def _small(path: Path) -> bytes:
    with map_file(path) as data:
        if len(data) > MAX_JSON:
            raise MalformedFile(f"{path.name} has {len(data)} bytes; a config has at most {MAX_JSON}")
        return data[:]


def _parse(text: bytes, source: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedFile(f"{source} is not JSON: {error}") from error

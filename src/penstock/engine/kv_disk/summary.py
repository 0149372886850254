"""Counts the contents of the folder of --kv-disk for all models, without opening any of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from penstock.engine.kv_disk.segment import BadSegment, BlockRecord, Segment, read_layout
from penstock.engine.kv_disk.store import SUFFIX


class DiskSummary(NamedTuple):
    """Counts the contents of a folder."""

    bytes: int = 0  # sum over all files
    tokens: int = 0  # whose KV is there
    prompts: int = 0  # maximal chains of blocks, prompts with their answers
    models: int = 0  # folders: of models, and of ways to load them
    unusable: int = 0  # files


def summarize(folder: Path) -> DiskSummary:
    """Counts the contents of a folder and its subfolders; zeros if it does not exist. Raises OSError if it cannot be
    read."""
    if not folder.exists():
        return DiskSummary()
    found = DiskSummary()
    for each in sorted(folder.iterdir()):
        files = sorted(each.glob(f"*{SUFFIX}")) if each.is_dir() else []
        if files:
            found = _add(found, files)
    return found


def _add(found: DiskSummary, files: list[Path]) -> DiskSummary:
    parents, hashes, tokens, unusable = set[bytes](), set[bytes](), 0, 0
    for path in files:
        try:
            for record in _records(path):
                tokens += len(record.tokens) // 4 * (record.hash not in hashes)
                hashes.add(record.hash)
                parents.add(record.parent)
        except (BadSegment, OSError):
            unusable += 1
    size = sum(_size(path) for path in files)
    return DiskSummary(
        found.bytes + size,
        found.tokens + tokens,
        found.prompts + len(hashes - parents),
        found.models + 1,
        found.unusable + unusable,
    )


def _records(path: Path) -> Iterator[BlockRecord]:
    """Yields the blocks of a file that can be used; raises BadSegment or OSError if the file cannot be."""
    segment = Segment.open(path, read_layout(path), writable=False)
    yield from (record for _, record in segment.records() if isinstance(record, BlockRecord))


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):  # a server may drop it meanwhile
        return path.stat().st_size
    return 0


def described(folder: str, limit: int) -> str:
    """Returns a line about a folder in which at most `limit` bytes are kept. Raises OSError if it cannot be read."""
    found = summarize(Path(folder).expanduser())
    if not found.models:
        return f"nothing yet in {folder}; at most {limit / 1e9:.2f} GB"
    line = f"{found.prompts:,} prompts of {found.tokens:,} tokens in {found.bytes / 1e9:.2f} GB of {limit / 1e9:.2f} GB"
    line += f", {found.models} {'model' if found.models == 1 else 'models'}, in {folder}"
    return line + (f"; {found.unusable} files cannot be used" if found.unusable else "")

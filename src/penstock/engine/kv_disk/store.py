"""Keeps KV blocks in segment files of a folder, bounded in bytes, for this server and for those after it.

<folder>/<fingerprint>/lock           is locked by the process that writes here
<folder>/<fingerprint>/<number>.kv    a segment: segment.py

Blocks are found by chain hash, and count only if their tokens and their parent are those that were asked for. What
cannot be used, of a file or of a disk, is skipped and counted; it never raises. Segments go as a whole, the least
recently used first, whichever model they belong to.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from penstock.engine.kv_disk.segment import BadSegment, BlockLayout, BlockRecord, Segment, block_crc
from penstock.system.files import make_private_folder, try_lock

SUFFIX = ".kv"
LOCK = "lock"
FEW, MANY = 8, 64  # segments that the folder's bytes are divided into: many, unless they would be small
LARGE = 256 << 20  # bytes of a segment that is not small
FREE = 1 << 30  # bytes that are left free on the disk
RETRY = 30.0  # seconds, after writing was not possible
TOUCH = 60.0  # seconds between two notes on disk that a segment was used

LINES = {
    "cut": "a segment ends before its last block: a crash or a full disk has cut it",
    "damaged": "a checksum does not match: the disk or a program has changed the file",
    "foreign": "a file has another format, or blocks of another model or layout",
    "unreadable": "a file cannot be read",
    "full": "the disk has no room for more blocks",
    "locked": "another process writes to this folder: its blocks are used, and none are added",
    "unwritable": "the folder cannot be written to: its blocks are used, and none are added",
}


class StoredBlock(NamedTuple):
    """Says where the KV of a block of tokens is."""

    record: BlockRecord
    segment: Segment
    slot: int


class Skipped(Counter[str]):
    """Counts files, blocks and writes that were skipped, by reason. The first of each reason is logged."""

    def add(self, reason: str, about: object) -> None:
        self[reason] += 1
        if self[reason] == 1:
            import logging  # takes longer than reading the rest

            log = logging.getLogger(__name__)
            log.warning("KV on disk: %s (%s); further ones are counted as %s", LINES[reason], about, reason)


class WriteLock:
    """Makes this process the only one that writes to a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: int | None = None

    @property
    def held(self) -> bool:
        return self._file is not None

    def take(self) -> None:
        """Takes the lock; raises OSError if that is not possible."""
        if self._file is None:
            make_private_folder(self._folder)
            self._file = _lock(self._folder / LOCK)

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None


class SegmentStore:
    """Finds, reads and writes blocks of one layout in a folder where all files together take at most `limit` bytes. It
    may be used by several threads. `now` is the clock of the file system, `free` returns the bytes that its disk has
    left."""

    def __init__(
        self,
        folder: Path,
        layout: BlockLayout,
        limit: int,
        *,
        now: Callable[[], float] = time.time,
        free: Callable[[Path], int] | None = None,
    ) -> None:
        self.layout = layout
        self.skipped = Skipped()
        self.written = self.dropped = 0  # blocks
        self.folder = folder / layout.fingerprint.hex()  # segments of this layout only
        self._limit = limit
        self._now = now
        self._free = free or _free_bytes
        segment = max(limit // MANY, min(LARGE, limit // FEW))  # bytes
        self._slots = max(segment // (layout.record_bytes + layout.slot.size), layout.fewest_slots)
        self._blocks: dict[bytes, StoredBlock] = {}
        self._segments: list[Segment] = []
        self._active: Segment | None = None
        self._write_lock = WriteLock(self.folder)
        self._retry_at = 0.0
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, hash: bytes) -> bool:
        return hash in self._blocks

    @property
    def writable(self) -> bool:
        return self._write_lock.held

    @property
    def stored_bytes(self) -> int:
        size = len(self._blocks) * self.layout.record_bytes
        if self.layout.state_bytes:
            size += self.layout.state_bytes * sum(self.has_state(hash) for hash in list(self._blocks))
        return size

    def has_state(self, hash: bytes) -> bool:
        block = self._blocks.get(hash)
        return block is not None and block.record.has(self.layout.groups)

    def open(self) -> None:
        with self._lock:
            self._try_lock()
            self._open_segments()

    def find(self, root: bytes, hashes: Sequence[bytes], tokens: Sequence[bytes]) -> list[StoredBlock]:
        """Returns the blocks that are known of a chain below `root`, from its first block on, up to the first that is
        not. `hashes` are their chain hashes, `tokens` their tokens as little-endian 32-bit integers."""
        chain: list[StoredBlock] = []
        parent = root
        for hash, wanted in zip(hashes, tokens, strict=True):
            block = self._blocks.get(hash)
            if block is None or block.record.tokens != wanted or block.record.parent != parent:
                break
            chain.append(block)
            parent = hash
        return chain

    def read(self, block: StoredBlock, targets: Sequence[memoryview | None]) -> bool:
        """Reads the contents of a block into memory, by part; None: that part is not wanted. Returns whether they are
        valid. A block that cannot be used is forgotten."""
        record, segment, _ = block
        try:
            for part, target in enumerate(targets):
                if target is None:
                    continue
                read = segment.read_into(record, part, target)
                if read < len(target):
                    return self._forget(block, "cut")
                if not record.has(part) or block_crc(record.hash, target) != record.crcs[part]:
                    return self._forget(block, "damaged")
            self._touch(segment)
        except OSError as error:
            return self._forget(block, "unreadable", error)
        return True

    def append(self, hash: bytes, parent: bytes, tokens: bytes, contents: Sequence[bytes | None]) -> bool:
        """Writes a block, by part; None: a windowed group's block that is gone, or a state that is not there. Returns
        whether it is there. One that is known is written again if it has a state now."""
        with self._lock:
            if hash in self._blocks and (len(contents) == self.layout.groups or contents[-1] is None):
                return True
            if self._now() < self._retry_at:
                return False
            try:
                segment = self._segment_with_room()
                record = BlockRecord.of(hash, parent, tokens, contents)
                slot, record = segment.append(record, contents)
            except OSError as error:
                return self._stop_writing(error)
            segment.used = self._now()
            self._blocks[hash] = StoredBlock(record, segment, slot)
            self.written += 1
            return True

    def forget(self, hashes: Sequence[bytes]) -> None:
        with self._lock:
            for block in [self._blocks.pop(hash) for hash in hashes if hash in self._blocks]:
                with suppress(OSError):  # read-only: it will be found again
                    block.segment.erase(block.slot)

    def clear(self) -> None:
        with self._lock:
            if self._try_lock():
                for segment in list(self._segments):
                    self._drop(segment)

    def close(self) -> None:
        with self._lock:
            self._write_lock.release()
            self._active = None
            self._retry_at = float("inf")

    # -- reading -------------------------------------------------------------------------------------------------

    def _open_segments(self) -> None:
        self._blocks, self._segments, self._active = {}, [], None
        for file in sorted(_files(self.folder)):
            self._open_segment(file.path)

    def _open_segment(self, path: Path) -> None:
        try:
            segment = Segment.open(path, self.layout, self.writable)
            for slot, record in segment.records():
                if isinstance(record, BlockRecord):
                    if not self.has_state(record.hash):  # one that was written again with a state is better
                        self._blocks[record.hash] = StoredBlock(record, segment, slot)
                else:
                    self.skipped.add(record, path)
        except BadSegment as error:
            return self.skipped.add(str(error), path)
        except OSError as error:
            return self.skipped.add("unreadable", error)
        self._segments.append(segment)

    def _forget(self, block: StoredBlock, reason: str, about: object = "") -> bool:
        self.skipped.add(reason, about or block.segment.path)
        self.forget([block.record.hash])
        return False

    def _touch(self, segment: Segment) -> None:
        now = self._now()
        if now - segment.used > TOUCH:
            with suppress(OSError):  # another user's file, or read-only
                segment.touch(now)
            segment.used = now

    # -- writing -------------------------------------------------------------------------------------------------

    def _segment_with_room(self) -> Segment:
        """Returns the segment to write to; raises OSError if there is none."""
        if not self._write_lock.held:
            self._write_lock.take()
            self._open_segments()  # the previous writer may have added some
        if self._active is None or self._active.full or not self._active.path.exists():
            self._active = self._begun_segment() or self._new_segment()
        return self._active

    def _begun_segment(self) -> Segment | None:
        for segment in reversed(self._segments):
            if not segment.full and segment.path.exists():
                self._make_room(segment.size - segment.path.stat().st_size)
                return segment if segment in self._segments else None
        return None

    def _new_segment(self) -> Segment:
        self._make_room(self.layout.segment_bytes(self._slots))
        segment = Segment.create(_new_path(self.folder), self.layout, self._slots)
        self._segments.append(segment)
        return segment

    def _make_room(self, size: int) -> None:
        """Deletes segments, the least recently used first, until `size` more bytes are within the limit; raises OSError
        if there cannot be room."""
        ours = {segment.path: segment for segment in self._segments}
        files = [each for folder in self.folder.parent.iterdir() for each in _files(folder)]
        total = size + sum(file.size for file in files)
        for file in sorted(each._replace(used=ours[each.path].used) if each.path in ours else each for each in files):
            if total <= self._limit:
                break
            if file.path in ours:
                self._drop(ours[file.path])
            elif not _delete_unlocked(file.path):
                continue
            total -= file.size
        if total > self._limit or self._free(self.folder.parent) < size + FREE:
            raise OSError(errno.ENOSPC, f"{self.folder.parent} has no room for {size:,} bytes")

    def _drop(self, segment: Segment) -> None:
        """Deletes a segment. Reads from it can finish."""
        segment.path.unlink(missing_ok=True)
        self._segments.remove(segment)
        self._active = None if self._active is segment else self._active
        gone = [hash for hash, block in self._blocks.items() if block.segment is segment]
        for hash in gone:
            del self._blocks[hash]
        self.dropped += len(gone)

    def _try_lock(self) -> bool:
        try:
            self._write_lock.take()
        except OSError as error:
            self.skipped.add(_reason(error), error)
        return self.writable

    def _stop_writing(self, error: OSError) -> bool:
        """Writes nothing for a while. Returns False."""
        self.skipped.add(_reason(error), error)
        self._retry_at = self._now() + RETRY
        return False


class SegmentFile(NamedTuple):
    """Describes a segment file; the one that was not used for the longest time is the smallest."""

    used: float
    size: int
    path: Path


def _new_path(folder: Path) -> Path:
    taken = {path.name for path in folder.iterdir()}
    return folder / next(name for n in count() if (name := f"{n:08}{SUFFIX}") not in taken)


def _files(folder: Path) -> Iterator[SegmentFile]:
    with suppress(OSError):
        for path in folder.iterdir():
            if path.suffix == SUFFIX:
                with suppress(FileNotFoundError):
                    found = path.stat()
                    yield SegmentFile(found.st_mtime, found.st_size, path)


def _delete_unlocked(path: Path) -> bool:
    """Deletes a segment of another layout, unless a process writes to its folder; returns whether it is gone."""
    try:
        with _locked(path.parent / LOCK):
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    file = _lock(path)
    try:
        yield
    finally:
        os.close(file)


def _lock(path: Path) -> int:
    """Returns the open lock file; raises OSError if another process has it. Closing it unlocks it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if not try_lock(file):
        os.close(file)
        raise BlockingIOError(errno.EWOULDBLOCK, "another process has locked it", str(path))
    return file


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "full"
    return "locked" if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN) else "unwritable"


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free

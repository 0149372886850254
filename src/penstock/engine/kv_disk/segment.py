"""Defines the file format of KV blocks on disk, and reads and writes one such file.

A segment has a header, a table of slots and, after the table, room for the contents of each slot: one KV block for each
layer group and, of models with recurrent layers, the state at the block's end if that was saved. Contents are written
before their slot, one after the other, and slots are filled in order, so a file that a crash has cut has whole records
and then nothing. Opening a segment reads only its table; contents are checked when they are read.

header  magic, fingerprint of what computed the blocks, tokens of a block, layer groups, bytes of a block and of a state
        (0: there are none), slots, CRC
slot    magic, CRC of the rest, a bit for each part that is there, where its contents begin, chain hash, the parent's
        chain hash, tokens, CRC of each part: the layer groups' blocks and, last, the state
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import NamedTuple, Self
from zlib import crc32

HEADER = Struct("<8s16sIIQQII")
MAGIC = b"PENSTKV2"  # the last character is the version of the format
SLOT_MAGIC = b"slot"
CHECKED = 8  # bytes that a slot's CRC does not cover: the magic and the CRC itself
PAGE = 4096
MODE = 0o600  # prompts are private


class BadSegment(Exception):
    """Names the reason why a segment cannot be used: foreign, damaged or cut."""


class BlockLayout(NamedTuple):
    """Describes the records of one folder."""

    fingerprint: bytes  # 16 bytes: a digest of all that the contents of blocks depend on
    block_size: int  # tokens of a block
    groups: int  # layer groups, each with a block of its own
    block_bytes: int  # size of one group's block
    state_bytes: int = 0  # size of a recurrent state; 0: none

    @property
    def parts(self) -> int:
        """Returns of how many parts a record may consist: the layer groups' blocks and a state."""
        return self.groups + (self.state_bytes > 0)

    @property
    def slot(self) -> Struct:
        return Struct(f"<4sIIQ16s16s{4 * self.block_size}s{self.parts}I")

    @property
    def record_bytes(self) -> int:
        return self.groups * self.block_bytes

    @property
    def fewest_slots(self) -> int:
        return -(-(self.record_bytes + self.state_bytes) // self.record_bytes)

    def part_end(self, part: int) -> int:
        return (part + 1) * self.block_bytes if part < self.groups else self.record_bytes + self.state_bytes

    def data_start(self, slots: int) -> int:
        return -(-(HEADER.size + slots * self.slot.size) // PAGE) * PAGE

    def segment_bytes(self, slots: int) -> int:
        """Returns the size of a full segment: `slots` records without a state, or fewer with some."""
        return self.data_start(slots) + slots * self.record_bytes


class BlockRecord(NamedTuple):
    """Describes a block of tokens whose KV is in a slot."""

    hash: bytes  # the chain hash, 16 bytes: of its tokens and of all before them
    parent: bytes  # the chain hash of the block before, or the root of its salt
    tokens: bytes  # as little-endian 32-bit integers
    present: int  # a bit for each part that is there
    crcs: tuple[int, ...]  # CRC of each part
    at: int = 0  # offset of its contents within the contents of the segment

    @classmethod
    def of(cls, hash: bytes, parent: bytes, tokens: bytes, contents: Sequence[bytes | None]) -> Self:
        present = sum(1 << part for part, data in enumerate(contents) if data is not None)
        return cls(hash, parent, tokens, present, tuple(block_crc(hash, data or b"") for data in contents))

    def has(self, part: int) -> bool:
        return bool(self.present >> part & 1)


def block_crc(hash: bytes, data: bytes | memoryview) -> int:
    """Returns the CRC of a block's contents. It begins with the chain hash, so that no block passes for another."""
    return _contents_crc(data, crc32(hash))


def _fastest_crc32() -> Callable[[bytes | memoryview, int], int]:
    """Returns zlib's function, or a native one where that is faster: checking blocks takes as long as reading them."""
    try:
        from penstock.backend.cpu import _native
    except ImportError:
        return crc32
    return _native.crc32 if _native.has_fast_crc32() else crc32


_contents_crc = _fastest_crc32()


class Segment:
    """Is an open segment file. The file is closed with the last reference to the segment, so that reads from a deleted
    segment can finish."""

    def __init__(self, path: Path, fd: int, layout: BlockLayout, slots: int) -> None:
        self.path = path
        self.slots = slots
        self.filled = 0  # slots
        self.used = 0.0  # when a block was read or written last
        self._end = 0  # end of the written contents
        self._layout = layout
        self._slot = layout.slot
        self._data_start = layout.data_start(slots)
        self._fd = fd
        weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, path: Path, layout: BlockLayout, slots: int) -> Self:
        """Creates a file with an empty table; raises OSError if that is not possible."""
        segment = cls(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, MODE), layout, slots)
        head = HEADER.pack(MAGIC, *layout, slots, 0)[:-4]
        segment._write(head + crc32(head).to_bytes(4, "little"), 0)
        return segment

    @classmethod
    def open(cls, path: Path, layout: BlockLayout, writable: bool) -> Self:
        """Opens a file; raises BadSegment if its blocks are of another kind or its header is damaged, and OSError if it
        cannot be read."""
        fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            slots, found = _read_header(os.pread(fd, HEADER.size, 0), layout), os.fstat(fd)
        except (BadSegment, OSError):
            os.close(fd)
            raise
        segment = cls(path, fd, layout, slots)
        segment.used = found.st_mtime
        segment._end = max(found.st_size - segment._data_start, 0)
        return segment

    @property
    def size(self) -> int:
        return self._layout.segment_bytes(self.slots)

    @property
    def full(self) -> bool:
        most = self._layout.part_end(self._layout.parts - 1)
        return self.filled >= self.slots or self._end + most > self.slots * self._layout.record_bytes

    def records(self) -> Iterator[tuple[int, BlockRecord | str]]:
        """Yields each slot that was written: its record, or in one word why it cannot be used."""
        size, end = self._slot.size, os.fstat(self._fd).st_size
        table = os.pread(self._fd, self.slots * size, HEADER.size)
        for slot in range(-(-len(table) // size)):
            entry = table[slot * size : (slot + 1) * size]
            if any(entry):
                self.filled = slot + 1
                yield slot, self._read_slot(entry, end)

    def append(self, record: BlockRecord, contents: Sequence[bytes | None]) -> tuple[int, BlockRecord]:
        """Fills the next slot; returns its number, and the record as it is there. Raises OSError if that is not
        possible."""
        slot, size, record = self.filled, self._slot.size, record._replace(at=self._end)
        for part, data in enumerate(contents):
            if data is not None:
                self._write(data, self._place(record, part))
        entry = self._slot.pack(
            SLOT_MAGIC, 0, record.present, record.at, record.hash, record.parent, record.tokens, *record.crcs
        )[CHECKED:]
        self._write(SLOT_MAGIC + crc32(entry).to_bytes(4, "little") + entry, HEADER.size + slot * size)
        self.filled = slot + 1
        self._end = record.at + self._layout.part_end(record.present.bit_length() - 1)
        return slot, record

    def erase(self, slot: int) -> None:
        """Erases a slot's record for later opens; raises OSError if that is not possible."""
        self._write(bytes(self._slot.size), HEADER.size + slot * self._slot.size)

    def read_into(self, record: BlockRecord, part: int, target: memoryview) -> int:
        """Reads a part of a record, which may be damaged; returns how many bytes there were. Raises OSError."""
        return os.preadv(self._fd, [target], self._place(record, part))

    def touch(self, now: float) -> None:
        """Records when the segment was used, to find the least recently used one; raises OSError."""
        self.used = now
        os.utime(self._fd, (now, now))

    def _place(self, record: BlockRecord, part: int) -> int:
        return self._data_start + record.at + part * self._layout.block_bytes

    def _read_slot(self, entry: bytes, end: int) -> BlockRecord | str:
        if len(entry) < self._slot.size:
            return "cut"
        magic, crc, present, at, hash, parent, tokens, *crcs = self._slot.unpack(entry)
        if magic != SLOT_MAGIC or crc32(entry[CHECKED:]) != crc:
            return "damaged"
        if self._data_start + at + self._layout.part_end(present.bit_length() - 1) > end:
            return "cut"
        return BlockRecord(hash, parent, tokens, present, tuple(crcs), at)

    def _write(self, data: bytes, at: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, at)
            view, at = view[written:], at + written


def read_layout(path: Path) -> BlockLayout:
    """Returns the layout of a file's records; raises BadSegment if the file is not a segment, and OSError if it cannot
    be read."""
    with path.open("rb") as file:
        return _unpack_header(file.read(HEADER.size))[0]


def _read_header(head: bytes, layout: BlockLayout) -> int:
    """Returns the slots of a segment with this header; raises BadSegment if it is not of this layout."""
    found, slots = _unpack_header(head)
    if found != layout:
        raise BadSegment("foreign")
    return slots


def _unpack_header(head: bytes) -> tuple[BlockLayout, int]:
    """Returns the layout and the slots of a segment with this header; raises BadSegment if it is damaged or none."""
    if len(head) < HEADER.size:
        raise BadSegment("cut")
    magic, *found, slots, crc = HEADER.unpack(head)
    if magic != MAGIC:
        raise BadSegment("foreign")
    if crc32(head[:-4]) != crc:
        raise BadSegment("damaged")
    return BlockLayout(*found), int(slots)


def pack(tokens: Sequence[int]) -> bytes:
    """Returns tokens as little-endian 32-bit integers."""
    return struct.pack(f"<{len(tokens)}i", *tokens)

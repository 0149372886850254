"""Sends a recurrent state like blocks: in parts of a block's size, after the block at whose end it was saved.

A part has the chain hash of that block, its own number instead of a parent's hash, and no tokens. It is staged as the
block of the first layer group. The last part may be longer than the rest of the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.engine.kv_disk.loading import Targets
from penstock.engine.kv_transfer.reader import WantedBlock

NUMBER = 16  # bytes, like a chain hash


def part_count(state_bytes: int, block_bytes: int) -> int:
    return -(-state_bytes // block_bytes)


def names(hash: bytes, count: int, token_bytes: int) -> Iterator[WantedBlock]:
    for number in range(count):
        yield WantedBlock(hash, number.to_bytes(NUMBER, "little"), bytes(token_bytes))


def cut(state: bytes, block_bytes: int) -> Iterator[bytes]:
    for at in range(0, len(state), block_bytes):
        yield state[at : at + block_bytes].ljust(block_bytes, b"\0")


def part_targets(state: memoryview, block_bytes: int, groups: int) -> Sequence[Targets]:
    rest = [None] * (groups - 1)
    return [[state[at : at + block_bytes], *rest] for at in range(0, len(state), block_bytes)]

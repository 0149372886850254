"""Chain hashes: one number for a block of tokens and everything before it. Stable across processes and machines."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def root(salt: str) -> int:
    """Where a chain begins: prompts share cached blocks only under the same salt (tenant, adapter)."""
    return _digest(salt.encode())


def extend(parent: int, tokens: Sequence[int]) -> int:
    return _digest(parent.to_bytes(8, "little") + array("i", tokens).tobytes())


def chain(salt: str, tokens: Sequence[int], block_size: int) -> list[int]:
    """The hash of every full block of `tokens`."""
    hashes, parent = [], root(salt)
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = extend(parent, tokens[end - block_size : end])
        hashes.append(parent)
    return hashes


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")

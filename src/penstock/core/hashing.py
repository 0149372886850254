"""Computes chain hashes: 16 bytes for a block of tokens and everything before it, the same on all machines.

The hash of a block is BLAKE2b of its parent's hash and its tokens as little-endian 32-bit integers. A chain begins at
the hash of a salt (tenant, adapter), so that prompts share cached blocks only under the same salt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from struct import pack

SIZE = 16  # bytes

Chain = Callable[[str, Sequence[int], int], list[bytes]]


def root(salt: str) -> bytes:
    return blake2b(salt.encode(), digest_size=SIZE).digest()


def extend(parent: bytes, tokens: Sequence[int]) -> bytes:
    return blake2b(parent + pack(f"<{len(tokens)}i", *tokens), digest_size=SIZE).digest()


def chain(salt: str, tokens: Sequence[int], block_size: int) -> list[bytes]:
    full, stride = len(tokens) // block_size, 4 * block_size
    data = pack(f"<{full * block_size}i", *tokens[: full * block_size])
    hashes, parent = [], root(salt)
    for at in range(0, full * stride, stride):
        parent = blake2b(parent + data[at : at + stride], digest_size=SIZE).digest()
        hashes.append(parent)
    return hashes

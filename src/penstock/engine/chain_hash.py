"""Finds the fastest way to compute chain hashes, and to look blocks up by them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core import hashing

if TYPE_CHECKING:
    from penstock.backend.cpu._native import BlockTable


def chain_hash() -> hashing.Chain:
    """Returns the native function that computes chain hashes, or Python's if the extension is not built."""
    try:
        from penstock.backend.cpu._native import chain_hashes
    except ImportError:
        return hashing.chain
    return lambda salt, tokens, block_size: chain_hashes(hashing.root(salt), tokens, block_size)


def native_block_table() -> BlockTable | None:
    """Returns an empty table of blocks and the replicas that hold them, in native code; None where the extension is
    not built."""
    try:
        from penstock.backend.cpu._native import BlockTable
    except ImportError:
        return None
    return BlockTable()

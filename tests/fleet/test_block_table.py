"""Tests the native table of blocks against the one in Python."""

from __future__ import annotations

from random import Random

import pytest

from penstock.fleet.holders import BITS, DEVICE, HOST, REMOVED, PythonBlockTable, chain_hash_table

native = pytest.importorskip("penstock.backend.cpu._native")


def test_chain_hashes_have_the_native_table() -> None:
    assert isinstance(chain_hash_table(), native.BlockTable)


@pytest.mark.parametrize("seed", range(8))
def test_the_native_table_says_what_the_one_in_python_says(seed: int) -> None:
    """Blocks whose hashes begin alike lie in one another's way; tables grow in blocks and in replicas."""
    random = Random(seed)
    ours, reference = native.BlockTable(), PythonBlockTable()
    starts = [random.randbytes(8) for _ in range(20)]
    blocks = [
        random.choice(starts) + random.randbytes(8) if random.random() < 0.5 else random.randbytes(16)
        for _ in range(3000)
    ]
    for most in (4, 40, 70, 300):
        for _ in range(60):
            replica = random.randrange(most)
            tiers = [REMOVED, HOST, DEVICE, DEVICE] if random.random() < 0.7 else [REMOVED]
            changes = [(random.choice(tiers), random.choice(blocks)) for _ in range(random.randrange(200))]
            for table in (ours, reference):
                table.write(replica, changes, BITS)
            if random.random() < 0.1:
                gone = random.randrange(most + 100)
                ours.clear(gone)
                reference.clear(gone)
        assert len(ours) == len(reference)
        assert [ours.get(block, -1) for block in blocks] == [reference.get(block, -1) for block in blocks]
        for replica in range(0, most + 40, 7):
            assert sorted(ours.held_by(replica)) == sorted(reference.held_by(replica))


def test_what_is_no_chain_hash_is_refused() -> None:
    table = native.BlockTable()
    for block in (b"short", b"seventeen bytes..", "sixteen letters.", 7):
        with pytest.raises((ValueError, TypeError), match="16 bytes"):
            table.get(block, 0)
        with pytest.raises((ValueError, TypeError), match="16 bytes"):
            table.write(0, [(DEVICE, block)], BITS)
    with pytest.raises((IndexError, ValueError, TypeError)):
        table.write(0, [(3, bytes(16))], BITS)
    assert len(table) == 0

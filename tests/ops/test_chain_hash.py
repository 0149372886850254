"""The native chain hash against hashlib."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backend.cpu._native import chain_hashes

ROOT = blake2b(b"a salt", digest_size=16).digest()


def wanted(parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Returns what the hashes are defined to be."""
    found = []
    for end in range(block_size, len(tokens) + 1, block_size):
        block = array("i", tokens[end - block_size : end])
        parent = blake2b(parent + block.tobytes(), digest_size=16).digest()
        found.append(parent)
    return found


@given(
    st.binary(min_size=16, max_size=16), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=300), st.integers(1, 100)
)
def test_hashes_are_those_of_hashlib(parent: bytes, tokens: list[int], block_size: int) -> None:
    expected = wanted(parent, tokens, block_size)
    assert chain_hashes(parent, tokens, block_size) == expected
    assert chain_hashes(parent, tuple(tokens), block_size) == expected
    assert chain_hashes(parent, np.array(tokens, np.int32), block_size) == expected


def test_a_long_prompt_is_hashed_in_one_call() -> None:
    tokens = np.random.default_rng(0).integers(0, 200_000, 8192, np.int32).tolist()
    assert chain_hashes(ROOT, tokens, 16) == wanted(ROOT, tokens, 16)
    assert chain_hashes(ROOT, array("i", tokens), 16) == wanted(ROOT, tokens, 16)


def test_a_chain_goes_on_from_any_of_its_hashes() -> None:
    tokens = list(range(64))
    whole = chain_hashes(ROOT, tokens, 16)
    assert chain_hashes(whole[1], tokens[32:], 16) == whole[2:]


def test_what_cannot_be_hashed_is_refused() -> None:
    for parent, tokens, block_size in (
        (b"short", [1], 1),
        (ROOT, [1], 0),
        (ROOT, [2**31], 1),
        (ROOT, [-(2**31) - 1], 1),
    ):
        with pytest.raises(ValueError, match=r"16 bytes|at least one|32 bits"):
            chain_hashes(parent, tokens, block_size)
    with pytest.raises((TypeError, OverflowError)):
        chain_hashes(ROOT, ["1"], 1)
    with pytest.raises((TypeError, OverflowError)):
        chain_hashes(ROOT, [2**80], 1)

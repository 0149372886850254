"""Tests the native CRC-32 against zlib's."""

from __future__ import annotations

import zlib
from random import Random

import numpy as np
import pytest

from penstock.backend.cpu._native import crc32, has_fast_crc32


@pytest.mark.parametrize("start", [0, 1, 0x80000000, 0xFFFFFFFF])
def test_it_is_that_of_zlib_at_every_length_and_offset(start: int) -> None:
    data = Random(1).randbytes(400)
    for size in range(300):
        piece = memoryview(data)[size % 17 : size % 17 + size]
        assert crc32(piece, start) == zlib.crc32(piece, start), size


def test_a_long_buffer_can_be_given_in_pieces() -> None:
    data = Random(2).randbytes(1 << 20)
    assert crc32(data) == zlib.crc32(data)
    assert crc32(data[70_001:], crc32(data[:70_001])) == zlib.crc32(data)


def test_it_reads_arrays_that_are_contiguous_and_refuses_others() -> None:
    array = np.arange(1000, dtype=np.uint8)
    assert crc32(array) == zlib.crc32(array)
    with pytest.raises(BufferError):
        crc32(memoryview(array)[::2])
    with pytest.raises(TypeError):
        crc32("text")  # type: ignore[arg-type]


def test_one_changed_bit_is_found() -> None:
    data = bytearray(Random(3).randbytes(4096))
    whole = crc32(data)
    for at in Random(4).sample(range(len(data)), 50):
        data[at] ^= 1 << at % 8
        assert crc32(data) != whole
        data[at] ^= 1 << at % 8
    assert isinstance(has_fast_crc32(), bool)

"""Defines the seam for copying KV blocks straight to and from rows of host memory that others may have mapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.uint8]  # [places, bytes of a block]


@runtime_checkable
class BlockRows(Protocol):
    """Copies blocks to and from any rows. Given a CRC for each block, it continues them with the bytes that arrive.
    Every call happens after all launched steps."""

    def copy_out(self, blocks: Sequence[int], rows: Rows, places: Sequence[int], crcs: Sequence[int] = ()) -> list[int]:
        """Copies blocks to the rows at some places; returns the CRC of each row."""

    def copy_in(self, blocks: Sequence[int], rows: Rows, places: Sequence[int], crcs: Sequence[int] = ()) -> list[int]:
        """Copies rows to blocks; returns the CRC of what each block has got."""

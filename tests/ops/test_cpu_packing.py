"""What packed weights take, and what is said about it."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backend.cpu import CpuBackend
from penstock.model.gguf.iquants import LAYOUTS
from penstock.model.random_tensor import random_tensor
from penstock.model.tensor import STORAGE

WIDER = {"Q2_K", *LAYOUTS}


@pytest.mark.parametrize("format", STORAGE)
def test_packed_weights_take_what_is_said_before(format: str):
    tensor = random_tensor(np.random.default_rng(0), format, 64, 512)
    backend = CpuBackend(1)
    assert backend.pack_matrix([tensor], [None]).nbytes == backend.stored_as(tensor).bytes(tensor)


@pytest.mark.parametrize("format", STORAGE)
def test_formats_that_grow_are_told(format: str, caplog: pytest.LogCaptureFixture):
    backend = CpuBackend(1)
    for _ in range(2):
        backend.pack_matrix([random_tensor(np.random.default_rng(0), format, 16, 256)], [None])
    backend._packing.log_growth()
    assert len(caplog.messages) == (format in WIDER)


def test_what_is_told_are_megabytes(caplog: pytest.LogCaptureFixture):
    backend = CpuBackend(1)
    tensor = random_tensor(np.random.default_rng(0), "IQ2_XXS", 4096, 2048)
    backend.pack_matrix([tensor], [None])
    backend._packing.log_growth()
    assert caplog.messages == ["weights in IQ2_XXS take 3 MB in memory, 2 MB in the file"]

"""Weights that have every scale of 8 bits."""

from __future__ import annotations

import numpy as np

from penstock.model.dequantize import LAYOUTS
from penstock.model.tensor import FORMATS, Tensor

# Of e4m3 127 is 0, and signs do not count. Of e8m0 255 is no number, and some before that make sums infinite.
CODES = {"NVFP4": np.arange(256, dtype=np.uint8), "MXFP4": np.arange(244, dtype=np.uint8)}
SCALES = {"NVFP4": "scales", "MXFP4": "e"}
WIDTH = 320  # no whole number of runs of MXFP4


def weight_of_every_scale(format: str) -> Tensor:
    """Returns a weight whose row i has scale i alone, and positive values."""
    codes = CODES[format]
    blocks = np.zeros((len(codes), WIDTH // FORMATS[format].values), LAYOUTS[format])
    blocks["qs"] = np.random.default_rng(0).choice([0x23, 0x51, 0x64, 0x77], blocks["qs"].shape)
    scales = blocks[SCALES[format]]
    blocks[SCALES[format]] = np.broadcast_to(codes.reshape(-1, *[1] * (scales.ndim - 1)), scales.shape)
    return Tensor("weight", FORMATS[format], (len(codes), WIDTH), blocks.reshape(-1).view(np.uint8))

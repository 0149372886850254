"""Makes the weights of the goldens in tests/models/odd out of the names and shapes of their tensors, so that none are
stored. Uses raw random bits only, which NumPy promises never to change."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any
from zlib import crc32

import numpy as np

GAINS = re.compile(r"(norm|ln_)[^.]*(\.\w+)?$", re.IGNORECASE)  # ends of the names of norms' gains
LESS_ONE = re.compile(r"gemma(?!3n|4)|qwen3_next|qwen3_5")
EMBEDDINGS = re.compile(r"embed|wte|wpe")
SCALES = ("layer_scalar", "scale", "per_expert_scale", "correct_output_scale")
FADING = "A_log"  # its middle makes states fade slowly enough to reach back far
MIDDLES = {FADING: -3.0, **dict.fromkeys(SCALES, 1.0)}  # by the ends of names


def random_weights(config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Returns the tensors of a checkpoint with that config.json. Some store the gains of norms less one."""
    less = 1.0 if LESS_ONE.search(config["model_type"]) else 0.0
    return {
        name: random_weight(name, shape, 1.0 if "linear_attn" in name else 1.0 - less) for name, shape in shapes.items()
    }


def random_weight(name: str, shape: Sequence[int], gain: float = 1.0) -> np.ndarray:
    """Returns a tensor that depends on its name and shape alone: matrices that lengthen what they multiply by 1.6,
    gains around `gain`, and biases."""
    bits = np.random.PCG64(crc32(name.encode())).random_raw(prod(shape)) >> 40  # type: ignore[operator]
    noise = ((bits.astype(np.float64) / 2**24 - 0.5) * 12**0.5).reshape(shape)
    end = name.rpartition(".")[2]
    if prod(shape) > max(shape) or (len(shape) > 1 and end != FADING):
        return (noise * (0.4 if EMBEDDINGS.search(name) else 1.6 * shape[-1] ** -0.5)).astype(np.float32)
    middle = gain if GAINS.search(name) and not name.endswith("bias") else MIDDLES.get(end, 0.0)
    return (middle + 0.2 * noise).astype(np.float32)

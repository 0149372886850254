"""Mamba2 in chunks gives what it gives token by token, saved states among it."""

from __future__ import annotations

import pytest
import torch

from penstock.backend.base import StateMove
from penstock.backend.cuda.kernels.mamba2 import CHUNK, LEAST_CHUNKED, PART, Mamba2Scratch, mamba2
from penstock.model.ops import Mamba2Weights
from penstock.model.recurrence import Mamba2Spec
from tests.cuda.device import DEVICE, close, normal
from tests.cuda.test_delta_chunks import STATES, TOKENS, described, step_of


@pytest.mark.parametrize("state_dim", [7, PART, 2 * PART + 3], ids=["small", "one part", "three parts"])
def test_rows_of_every_length(state_dim: int) -> None:
    """One row is long and saves a state within a chunk, one has a chunk that is not full, one has too few tokens."""
    moves = StateMove(0, -1, 4, CHUNK + 9), StateMove(1, 5, -1, 0)
    rows = described(step_of((2 * CHUNK + 5, 3), (LEAST_CHUNKED + 1, 0), (LEAST_CHUNKED - 1, 8), moves=moves))
    spec = Mamba2Spec(2, 24, state_dim, 1, 4)
    sizes = spec.width * 4, spec.width, spec.heads, spec.heads, spec.heads
    conv, bias, decay, dt_bias, skip = (normal(size, seed=seed) for seed, size in enumerate(sizes))
    weights = Mamba2Weights(conv, bias, -torch.exp(decay - 2), dt_bias, skip, None)
    x = normal(TOKENS, spec.in_width, seed=9)
    found = []
    for prompts in (False, True):
        states, out = normal(STATES, spec.state_floats, seed=8), torch.zeros(TOKENS, spec.inner, device=DEVICE)
        widths = spec.width, spec.inner
        scratch = Mamba2Scratch(*(torch.zeros(TOKENS, width, device=DEVICE) for width in widths))
        mamba2(x, weights, spec, states, rows, scratch, out, prompts)
        found.append((out, states))
    for by_token, in_chunks in zip(*found, strict=True):
        assert close(in_chunks, by_token)
        assert by_token.abs().max() > 0.1

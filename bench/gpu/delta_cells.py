"""The cell of `cuda.py` that looks at the delta rule: token by token and in chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from kernel_cells import Figures, bf16, error, measure, on_device, say

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import recurrent_states
from penstock.backend.cuda.kernels.causal_conv import StateRows
from penstock.backend.cuda.kernels.delta_chunk import delta_chunks
from penstock.backend.cuda.kernels.delta_rule import Gates, HeadSizes, delta_rule
from penstock.model.recurrence import CHUNK, DeltaSpec

QWEN3_NEXT = DeltaSpec(16, 32, 128, 128, 4)
TOKENS = (2048, 16384)


def delta(_: Any) -> Figures:
    """The delta rule over prompts, token by token and in chunks."""
    found: Figures = {}
    for tokens in TOKENS:
        run = delta_prompt(QWEN3_NEXT, tokens)
        wanted, got = (run(chunked).clone() for chunked in (False, True))
        spent = {kind: measure([partial(run, kind == "chunks")] * 3) * 1e6 for kind in ("tokens", "chunks")}
        found[f"{tokens}"] = {"error": error(got, wanted), **{f"{kind} us": us for kind, us in spent.items()}}
        say(f"delta rule of Qwen3-Next, {tokens} tokens: {found[f'{tokens}']}")
    return found


def delta_prompt(spec: DeltaSpec, tokens: int) -> Callable[[bool], torch.Tensor]:
    """Computes one row of so many tokens, in chunks or not; returns what is read from its states."""
    numbers = np.zeros(recurrent_states.words(1, tokens), np.int32)
    recurrent_states.fill(numbers, greedy_batch([Chunk([1] * tokens, 0, [0] * -(-tokens // 16))]), 1, tokens)
    rows = StateRows(*recurrent_states.split(on_device(numbers), 1, tokens))
    on = {"device": "cuda"}
    mixed = torch.randn((tokens, spec.width), **on)
    keys = mixed[:, : 2 * spec.k_width].view(tokens, -1, spec.k_dim)
    keys /= keys.norm(dim=-1, keepdim=True)
    gates = Gates(
        *(bf16(tokens, spec.v_heads), bf16(tokens, spec.decay_width)),
        *(-torch.rand(spec.v_heads, **on), torch.randn(spec.decay_width, **on)),
    )
    states, out = torch.zeros((1, spec.state_floats), **on), torch.empty((tokens, spec.v_width), **on)
    solved = [torch.empty((tokens, CHUNK * spec.v_heads), **on) for _ in range(2)]
    sizes = HeadSizes.of(spec)

    def run(chunked: bool) -> torch.Tensor:
        delta_rule(mixed, gates, sizes, states, rows, out, leave_chunks=chunked)
        if chunked:
            delta_chunks(mixed, gates, sizes, states, rows, *solved, out)
        return out

    return run


DELTA_CELLS = {"delta": delta}

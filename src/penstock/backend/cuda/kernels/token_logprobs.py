"""Computes the logprobs of sampled tokens in one pass over their logits."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous

CHUNK = 8192


@triton.jit
def _token_logprobs(logits, tokens, out, vocab, CHUNK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    highest = tl.full((CHUNK,), -float("inf"), tl.float32)
    total = tl.zeros((CHUNK,), tl.float32)  # sum of e^(logit - highest) in each lane
    wait_for_previous(PDL)
    for first in range(0, vocab, CHUNK):
        value = tl.load(logits + row * vocab + first + lane, first + lane < vocab, -float("inf")).to(tl.float32)
        peak = tl.maximum(highest, value)
        base = tl.where(peak == -float("inf"), 0.0, peak)
        total = total * tl.exp(highest - base) + tl.exp(value - base)
        highest = peak
    peak = tl.max(highest, 0)
    norm = peak + tl.log(tl.sum(total * tl.exp(highest - peak), 0))
    token = tl.maximum(tl.load(tokens + row), 0)  # a row that is not finite has none
    logprob = tl.load(logits + row * vocab + token).to(tl.float32) - norm
    tl.store(out + row * 2, token)
    tl.store(out + row * 2 + 1, logprob.to(tl.int32, bitcast=True))


def token_logprobs(logits: Any, tokens: Any, out: Any) -> None:
    """Writes each row's token and the bits of its logprob, a float32, to `out` [S, 2]."""
    rows, vocab = len(out), logits.shape[1]
    chunk = min(triton.next_power_of_2(vocab), CHUNK)
    _token_logprobs[(rows,)](logits, tokens, out, vocab, CHUNK=chunk, **launch_options(16))

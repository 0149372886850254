"""Masks logits by the bitmasks of grammars."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.pdl import launch_options

CHUNK = 4096


@triton.jit
def _apply_bitmask(logits, rows, words, vocab, width, CHUNK: tl.constexpr, PDL: tl.constexpr):
    mask = tl.program_id(0)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab
    row = tl.load(rows + mask).to(tl.int64)
    bits = tl.load(words + mask * width + token // 32, inside, 0)
    banned = (bits >> (token % 32) & 1) == 0
    tl.store(logits + row * vocab + token, -float("inf"), inside & banned)


def apply_bitmask(logits: Any, rows: Any, words: Any) -> None:
    """Sets logits[rows[i], t] = -inf for every token t whose bit is not set in words[i]."""
    vocab = logits.shape[1]
    count, width = words.shape
    _apply_bitmask[(count, triton.cdiv(vocab, CHUNK))](
        logits, rows, words, vocab, width, CHUNK=CHUNK, **launch_options(8, early=False)
    )

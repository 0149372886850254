"""A cell of `cuda.py`: prefill attention of ours beside that of libraries, each on the same prompts.

Libraries get keys and values in one piece, which is easier than blocks. Those that cannot be imported are named:

    flash_attn_interface    FlashAttention-3, from its own wheel
    flashinfer              FlashInfer, with FlashAttention-2's and -3's kernels
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from kernel_cells import Call, Context, Figures, attempt, bf16, error, measure, say
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, KV_HEADS = 32, 8
TOKENS = (4096, 16000)
DIMS = (64, 128, 256)
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of [tokens, heads, dims]


def torch_kernel(kind: SDPBackend) -> Attention:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x[None].transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(kind):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


def flash_attention_3() -> Attention:
    from flash_attn_interface import flash_attn_func

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flash_attn_func(q[None], k[None], v[None], causal=True)
        return (out[0] if isinstance(out, tuple) else out)[0]  # some versions return their sums, too

    return attend


def flashinfer(backend: str) -> Attention:
    from flashinfer import single_prefill_with_kv_cache

    return partial(single_prefill_with_kv_cache, causal=True, backend=backend)


LIBRARIES: dict[str, Callable[[], Attention]] = {
    "torch, FlashAttention-2": partial(torch_kernel, SDPBackend.FLASH_ATTENTION),
    "torch, cuDNN": partial(torch_kernel, SDPBackend.CUDNN_ATTENTION),
    "FlashAttention-3": flash_attention_3,
    "FlashInfer, fa2": partial(flashinfer, "fa2"),
    "FlashInfer, fa3": partial(flashinfer, "fa3"),
}


def library_attention(_: Any) -> Figures:
    """Returns the speed of every library and of ours, in TFLOP/s, for each head size and length of a prompt."""
    libraries: dict[str, Attention] = {}
    for name, load in LIBRARIES.items():
        try:
            libraries[name] = load()
        except ImportError as missing:
            say(f"{name} is not measured: {missing}")
    return {f"{dims} dims, {tokens} tokens": compare(libraries, dims, tokens) for dims in DIMS for tokens in TOKENS}


def compare(libraries: dict[str, Attention], dims: int, tokens: int) -> Figures:
    """Returns the TFLOP/s of one prompt, causal. Every library is checked against torch's plain kernel."""
    q, k, v = (bf16(tokens, heads, dims) for heads in (HEADS, KV_HEADS, KV_HEADS))
    wanted = torch_kernel(SDPBackend.MATH)(q[:512], k[:512], v[:512])  # later tokens do not change it
    calls: dict[str, Call] = {name: partial(attend, q, k, v) for name, attend in libraries.items()}
    context = Context([(tokens, 0)], HEADS, KV_HEADS, dims)
    calls["ours"] = partial(context.prefill, context.caches[0])
    if hopper := context.tilings.hopper_attention(dims):
        calls["ours, Hopper"] = partial(context.prefill, context.caches[0], hopper=hopper)
    found: Figures = {}
    for name, call in calls.items():
        spent = attempt(partial(measure, [call] * 4))
        found[name] = 2 * HEADS * dims * tokens * (tokens + 1) / spent / 1e12 if isinstance(spent, float) else spent
        if name in libraries and isinstance(spent, float):
            found[f"{name}, error"] = error(call()[:512], wanted)
    say(f"{dims} dims, {tokens} tokens, TFLOP/s: " + ", ".join(f"{k} {v:.4g}" for k, v in speeds(found)))
    return found


def speeds(found: Figures) -> list[tuple[str, float]]:
    return [(name, value) for name, value in found.items() if isinstance(value, float)]

"""The cell of `cuda.py` for prompts over a KV cache of 8 bits: attended to as it is, and as a copy in 16 bits that
Hopper's kernel reads. It says from how many tokens a copy pays, which backend/cuda/kv_expansion.py estimates."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from kernel_cells import Context, Figures, attempt, error, measure, on_device, say

from penstock.backend.cuda.contexts import BLOCK, PromptSizes, place_contexts
from penstock.backend.cuda.kernels.expand_kv import expand_kv
from penstock.backend.cuda.kernels.kv8 import LARGEST
from penstock.backend.cuda.kernels.prefill_attention import prefill_attention, queries_per_tile
from penstock.backend.cuda.kv_expansion import KvExpansion

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
PROMPTS = {
    "512": (512, 0),
    "1024": (1024, 0),
    "2048": (2048, 0),
    "16384": (16384, 0),
    "64 after 16320": (64, 16320),
    "128 after 16256": (128, 16256),
    "256 after 16128": (256, 16128),
    "2048 after 14336": (2048, 14336),
}


def kv8_prefill(_: Any) -> Figures:
    """Prompts of Llama-3.1-8B's heads over both kinds of 8 bits."""
    return {
        f"{kind}, {name}": attempt(partial(prompt, f"prefill over {kind}, {name}", KINDS[kind], chunk))
        for kind in KINDS
        for name, chunk in PROMPTS.items()
    }


def prompt(name: str, dtype: torch.dtype, chunk: tuple[int, int]) -> Figures:
    """Times the plain kernel over 8 bits, the copy, and both kernels over the copy."""
    context, (count, start) = Context([chunk]), chunk
    values = context.caches[0].float()
    scales = values.abs().amax(-1).clamp(min=1e-12) / LARGEST[dtype]
    codes = values / scales[..., None]
    cache = (codes.round() if dtype == torch.int8 else codes).to(dtype)
    sizes, row = PromptSizes(np.array([count]), np.array([count + start])), np.zeros(1, np.int32)
    placed = place_contexts(context.batch, row, sizes, 0)
    expansion = KvExpansion(32, 8, 128, len(placed.blocks) * BLOCK)
    room = torch.empty((expansion.room, expansion.width), dtype=torch.bfloat16, device="cuda")
    copies = expansion.copies_within(room, torch.zeros_like(context.tables))
    where = on_device(placed.blocks), context.tables, context.header
    tiling, hopper = (
        context.tilings.prefill_attention(queries_per_tile(4), 128, 2),
        context.tilings.hopper_attention(128),
    )

    def attend(kv: Any, by: Any, tables: Any, with_hopper: bool) -> None:
        how = {"scales": by, "tiling": tiling, "hopper": hopper if with_hopper else None}
        prefill_attention(context.qkv, kv, context.tiles, tables, context.header, context.out, 128**-0.5, 0, **how)

    runs = {
        "8 bits": partial(attend, cache, scales, context.tables, False),
        "copy": partial(expand_kv, cache, scales, *where, *copies),
        "16 bits": partial(attend, copies.lines, None, copies.tables, False),
        "16 bits, Hopper": partial(attend, copies.lines, None, copies.tables, True),
    }
    found: Figures = {"a copy is made": expansion.pays(sizes)}
    results = {}
    for form, run in runs.items():
        run()
        results[form] = context.out.clone()
        found[f"{form} us"] = measure([run] * 4) * 1e6
    found["copy TB/s"] = (count + start) * (3 * expansion.width) / found["copy us"] / 1e6
    found["times as fast"] = found["8 bits us"] / (found["copy us"] + found["16 bits, Hopper us"])
    found["error"] = error(results["16 bits, Hopper"], results["8 bits"])
    say(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()))
    return found

"""The cell of `cuda.py` for MLA: prompts in both forms, absorbed and expanded, and decoding, with the heads of
DeepSeek V2 Lite (16) and V3 (128)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from kernel_cells import Figures, attempt, bf16, error, fastest, measure, on_device, say

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import inputs
from penstock.backend.cuda.contexts import BLOCK, CONTEXT_COLUMNS, PromptSizes
from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.devices import device_properties
from penstock.backend.cuda.kernels.kv_tile import SplitKV
from penstock.backend.cuda.kernels.mla_attention import MlaTiling, mla_decode
from penstock.backend.cuda.kernels.prefill_attention import tokens_per_tile
from penstock.backend.cuda.kv_cache import LayerCache
from penstock.backend.cuda.launch_mla import MlaLayer, MlaScratch, attend_absorbed, attend_expanded
from penstock.backend.cuda.mla_expansion import MlaDims, MlaExpansion
from penstock.backend.cuda.tilings import MLA_DECODE_TILINGS
from penstock.model.ops import MlaWeights
from penstock.model.spec import AttentionSpec, RopeSpec

HEADS = 16, 128
PROMPTS = {"2048": (2048, 0), "16384": (16384, 0), "2048 after 14336": (2048, 14336), "64 after 4032": (64, 4032)}
DECODES = {
    "64 x 4096": [4096] * 64,
    "64 x 2731..5461": np.linspace(2731, 5461, 64).astype(int).tolist(),
    "1 x 16384": [16384],
}


class MlaContext:
    """A layer of MLA over a random cache, and rows of (tokens, positions before them)."""

    def __init__(self, heads: int, chunks: list[tuple[int, int]]) -> None:
        self.dims = MlaDims(heads, nope=128, rope=64, rank=512, v_dim=128)
        widths = [-(-(start + count) // 16) for count, start in chunks]
        blocks = np.split(np.random.default_rng(0).permutation(sum(widths)), np.cumsum(widths)[:-1])
        rows = zip(chunks, blocks, strict=True)
        self.batch = greedy_batch([Chunk([1] * count, start, table.tolist()) for (count, start), table in rows])
        tokens = len(self.batch.tokens)
        spec = AttentionSpec(heads, 1, 576, RopeSpec((), interleaved=False), multiplier=192**-0.5, v_dim=512)
        weights = MlaWeights(None, bf16(heads, 512, 128) * 128**-0.5, bf16(heads, 128, 512) * 512**-0.5)
        self.layer = MlaLayer(weights, spec, LayerCache(bf16(sum(widths), 16, 576), None))
        self.q, self.out = bf16(tokens, heads * 192), bf16(tokens, heads * 128)
        self.scratch = MlaScratch(bf16(tokens, self.dims.absorbed_width), bf16(tokens, self.dims.found_width))
        position = heads * (self.dims.nope + self.dims.v_dim) + self.dims.rope
        room = tokens * self.dims.absorbed_width // position // BLOCK * BLOCK
        self.expansion = MlaExpansion(self.dims, room)
        self.tilings = Tilings(device_properties(self.q.device))
        self.spare = inputs.spare_splits(1 if heads <= 64 else 8)
        self.context: Any = SimpleNamespace(
            tilings=self.tilings, memory=SimpleNamespace(expansion=self.expansion, split_kv=None)
        )

    def step(self, expanded: bool) -> Any:
        """What a plan of the batch in this form has on the device."""
        how = tokens_per_tile(self.dims.heads), lambda shape: shape
        plan = inputs.plan_attention(self.batch, *how, spare=self.spare)
        step = SimpleNamespace(splits=on_device(plan.splits), tiles=on_device(plan.tiles), run=0)
        step.tables = on_device(self.batch.tables.ravel())
        step.header = on_device(np.array([self.batch.tables.shape[2]] * 4))
        if expanded:
            rows = np.arange(len(self.batch.row_start) - 1, dtype=np.int32)
            contexts, plan = self.expansion.place(self.batch, rows), inputs.plan_attention(self.batch, 128, how[1])
            blocks = np.full((contexts.room, CONTEXT_COLUMNS), -1, np.int32)
            blocks[: len(contexts.blocks)] = contexts.blocks
            step.expanded, step.tiles = on_device(blocks), on_device(plan.tiles)
            step.tile_contexts = on_device(contexts.starts[plan.tiles[:, inputs.ROW]])
        return step

    def absorbed(self, step: Any) -> None:
        attend_absorbed(self.context, step, self.layer, self.q, self.out, self.scratch, step.tiles, None)

    def expanded(self, step: Any) -> None:
        attend_expanded(self.context, step, self.layer, self.q, self.out, self.scratch)

    def expanded_plain(self, step: Any) -> None:
        """Attends in the expanded form with the kernel that runs on every GPU."""
        plain = Tilings(replace(self.tilings.device, capability=(8, 9)))
        context: Any = SimpleNamespace(tilings=plain, memory=self.context.memory)
        attend_expanded(context, step, self.layer, self.q, self.out, self.scratch)


def mla(_: Any) -> Figures:
    """Prompts in both forms, and decoding with each tiling."""
    found: Figures = {}
    for heads in HEADS:
        for name, chunk in PROMPTS.items():
            found[f"{heads} heads, {name}"] = attempt(partial(prompt, f"MLA of {heads} heads, {name}", heads, chunk))
        for name, lengths in DECODES.items():
            found[f"{heads} heads, decode {name}"] = attempt(
                partial(decode, f"MLA of {heads} heads, {name}", heads, lengths)
            )
    return found


def prompt(name: str, heads: int, chunk: tuple[int, int]) -> Figures:
    """Times both forms of one prompt, with the projections that belong to each."""
    context = MlaContext(heads, [chunk])
    count, start = chunk
    pays = context.expansion.pays(PromptSizes(np.array([count]), np.array([count + start])))
    pairs, projection = count * start + count * (count + 1) / 2, 512 * 256
    expanded = (count + start) * projection + pairs * 320
    macs = {"absorbed": count * projection + pairs * 1088, "expanded": expanded, "expanded_plain": expanded}
    found: Figures = {"expanded is chosen": pays}
    results = {}
    for form in macs if pays else ("absorbed",):
        run = partial(getattr(context, form), context.step(form != "absorbed"))
        run()
        results[form] = context.out.clone()
        found[f"{form} us"] = measure([run] * 4) * 1e6
        found[f"{form} TFLOP/s"] = 2 * heads * macs[form] / found[f"{form} us"] / 1e6
    if pays:
        found["error"] = error(results["expanded"], results["absorbed"])
        found["times as fast"] = found["absorbed us"] / found["expanded us"]
    say(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()))
    return found


def decode(name: str, heads: int, lengths: list[int]) -> Figures:
    """Times the kernel of the absorbed form alone; what it must read is each latent once."""
    context = MlaContext(heads, [(1, length - 1) for length in lengths])
    step, cache = context.step(expanded=False), context.layer.cache.lines
    lines = len(step.splits) * heads
    q, out = (
        context.scratch.absorbed,
        context.scratch.found.view(-1)[: len(lengths) * heads * 512].view(len(lengths), -1),
    )
    sizes = {"device": q.device}
    counts = torch.zeros(lines, dtype=torch.int32, **sizes)
    split_kv = SplitKV(torch.empty(lines * 512, **sizes), torch.empty(lines * 2, **sizes), counts)
    others = MlaTiling(64, 32, 8, 2), MlaTiling(32, 32, 8, 2), MlaTiling(16, 64, 4, 2), MlaTiling(16, 32, 4, 2)
    about = step.splits, step.tables, step.header, out, split_kv, 512, 192**-0.5
    trials = {
        str(tuple(tiling)): [partial(mla_decode, q, cache, *about, tiling=tiling)] * 8
        for tiling in (*MLA_DECODE_TILINGS, *others)
    }
    chosen = context.tilings.mla_decode(heads, 576, 2)
    say(f"{name}: {len(step.splits)} splits; the backend takes {tuple(chosen)}")
    return fastest(name, trials, sum(lengths) * 576 * 2, best=8, threads=1)

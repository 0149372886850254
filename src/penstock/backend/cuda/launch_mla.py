"""Launches MLA: in its absorbed form, or expanded for prompts where that takes less arithmetic (mla_expansion.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.kernels.fixed_gemm import fixed_heads_gemm
from penstock.backend.cuda.kernels.hopper_mla import hopper_mla
from penstock.backend.cuda.kernels.mla_attention import ALL, mla_decode, mla_prefill, mla_selected, store_mla_kv
from penstock.backend.cuda.kernels.mla_expanded import Carry, ExpandedKv, expand_latents, mla_expanded
from penstock.backend.cuda.kernels.prefill_attention import tokens_per_tile
from penstock.backend.cuda.kernels.segmented_mla import segmented_mla
from penstock.backend.cuda.kv_cache import LayerCache
from penstock.backend.cuda.launch_context import Context
from penstock.backend.cuda.mla_expansion import MlaDims, MlaExpansion
from penstock.backend.cuda.step_layout import DeviceInputs
from penstock.model.ops import MlaWeights
from penstock.model.program import Buffer, OpNode
from penstock.model.spec import AttentionSpec

HOPPER_BYTES = 2  # size of the values that hopper_mla.py reads


class MlaScratch(NamedTuple):
    """Holds memory that the forms of MLA use one after the other."""

    absorbed: Any  # queries where the latents are; then expanded keys and values
    found: Any  # results for the queries, then for earlier pieces of a context


class MlaLayer(NamedTuple):
    """Holds the weights, spec and cache of a layer."""

    weights: MlaWeights
    spec: AttentionSpec
    cache: LayerCache


def mla_scratch(node: OpNode) -> tuple[Buffer, Buffer]:
    """Returns the buffers of an attend_mla node: both fit the largest step."""
    dims = MlaDims.of(node)
    return Buffer("N", dims.absorbed_width), Buffer("N", dims.found_width)


def attend_mla(
    context: Context,
    step: DeviceInputs,
    q: Any,
    kv: Any,
    *others: Any,
    layer: int,
    weights: MlaWeights,
    spec: AttentionSpec,
    eps: float,
    frequencies: Any,
) -> None:
    """Attends with a step's tokens. Prompts that are expanded come last: what pads the tokens before them is written
    over their results."""
    out, *buffers = others[-3:]
    selected, scratch = others[0] if len(others) > 3 else None, MlaScratch(*buffers)
    rope, step = spec.rope, step.of(context.memory.kv.groups[layer])
    this = MlaLayer(weights, spec, context.memory.kv.caches[layer])
    store_mla_kv(
        q,
        kv,
        weights.gain,
        eps,
        frequencies,
        rope.scale,
        rope.interleaved,
        step.positions,
        step.places,
        this.cache.lines,
        this.cache.scales,
        heads=spec.heads,
    )
    if not len(step.expanded):
        return attend_absorbed(context, step, this, q, out, scratch, step.tiles, selected)
    if len(step.splits):
        attend_absorbed(context, step, this, q[: step.decodes], out[: step.decodes], scratch, step.tiles[:0], None)
    attend_expanded(context, step, this, q, out, scratch)


def attend_absorbed(
    context: Context,
    step: DeviceInputs,
    layer: MlaLayer,
    q: Any,
    out: Any,
    scratch: MlaScratch,
    tiles: Any,
    selected: Any | None,
) -> None:
    """Attends with the queries of the step's splits and of these tiles where the latents are, which are keys and values
    there."""
    weights, spec, cache = layer
    absorbed = scratch.absorbed[: len(q)]
    found = scratch.found.view(-1)[: len(q) * spec.heads * spec.v_dim].view(len(q), -1)
    multiply_heads(context.tilings, q, weights.k_b, absorbed, spec.head_dim - spec.v_dim)
    tables, how = (step.tables, step.header, found), (spec.v_dim, spec.scale, cache.scales)
    top_k = ALL if selected is None else selected.shape[1]
    sizes = cache.lines.shape[2], q.element_size()
    tiling, run = context.tilings.mla_decode(spec.heads, *sizes), max(step.run, 1)
    if len(tiles):
        of_prompts = context.tilings.mla_prefill(*sizes)
        mla_prefill(absorbed, cache.lines, tiles, *tables, *how, top_k, tiling=of_prompts)
    where = cache.lines, step.splits, *tables, context.memory.split_kv
    if len(step.splits) and context.tilings.fixed:
        segmented = context.tilings.segmented_mla(*sizes)
        segmented_mla(absorbed, *where, *how, top_k, run=run, tiling=segmented)
    elif len(step.splits):
        mla_decode(absorbed, *where, *how, top_k, tiling=tiling)
    for work, tokens in ((tiles, tokens_per_tile(spec.heads)), (step.splits, run)) if selected is not None else ():
        if len(work):
            mla_selected(absorbed, cache.lines, work, *tables, *how, selected, tokens, tiling=tiling)
    multiply_heads(context.tilings, found, weights.v_b, out)


def attend_expanded(
    context: Context, step: DeviceInputs, layer: MlaLayer, q: Any, out: Any, scratch: MlaScratch
) -> None:
    (weights, spec, cache), expansion = layer, context.memory.expansion
    assert isinstance(expansion, MlaExpansion)
    dims, room = expansion.dims, expansion.room
    expanded = ExpandedKv.within(scratch.absorbed.view(-1), dims, room)
    carry = Carry.within(scratch.found.view(-1).view(torch.float32), dims, len(q))
    itemsize = q.element_size()
    stages = context.tilings.expand_latents(dims.nope, dims.v_dim, itemsize)
    hopper = context.tilings.hopper_mla(dims.nope, dims.rope, dims.v_dim) if itemsize == HOPPER_BYTES else None
    tiling = context.tilings.mla_expanded(dims.nope, dims.rope, dims.v_dim, itemsize)
    for piece, blocks in enumerate(step.expanded.split(expansion.piece_blocks)):
        expand_latents(
            cache.lines,
            blocks,
            step.tables,
            step.header,
            weights.k_b,
            weights.v_b,
            expanded,
            cache.scales,
            stages=stages,
        )
        work = step.tiles, step.tile_contexts, out, carry, piece * room
        if hopper:
            hopper_mla(q, expanded, *work, spec.scale, tiling=hopper)
        else:
            mla_expanded(q, expanded, *work, spec.scale, tiling=tiling)


def multiply_heads(tilings: Tilings, x: Any, weight: Any, out: Any, passthrough: int = 0) -> None:
    """Multiplies each head of x by a matrix of its own, weight [heads, b, a]. Per head the input is [a, passthrough]
    and the output is [passthrough, b]: the last values pass through and move to the front."""
    heads, rows, width = weight.shape
    each, to = x.view(len(x), heads, width + passthrough), out.view(len(out), heads, passthrough + rows)
    if tilings.fixed:
        fixed_heads_gemm(
            each[..., :width], weight, to[..., passthrough:], tilings.fixed_heads_gemm(rows, width, x.element_size())
        )
    else:
        torch.bmm(each[..., :width].transpose(0, 1), weight.mT, out=to[..., passthrough:].transpose(0, 1))
    if passthrough:
        to[..., :passthrough].copy_(each[..., width:])

"""Launches MLA: in its absorbed form, or expanded for prompts where that takes less arithmetic (mla_expansion.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from penstock.backend.cuda.inputs import DeviceInputs
from penstock.backend.cuda.kernels.mla_attention import ALL, mla_decode, mla_prefill, mla_selected, store_mla_kv
from penstock.backend.cuda.kernels.mla_expanded import Carry, ExpandedKv, expand_latents, mla_expanded
from penstock.backend.cuda.kernels.prefill_attention import tokens_per_tile
from penstock.backend.cuda.kv_cache import LayerCache
from penstock.backend.cuda.launch_context import Context
from penstock.backend.cuda.mla_expansion import MlaDims
from penstock.model.ops import MlaWeights
from penstock.model.program import Buffer, OpNode
from penstock.model.spec import AttentionSpec


class MlaScratch(NamedTuple):
    """Holds memory that the forms of MLA use one after the other."""

    absorbed: Any  # queries where the latents are; then expanded keys and values
    found: Any  # what the queries find there; then what was found in earlier pieces of a context


class MlaLayer(NamedTuple):
    """Holds what all tokens of a layer are computed with."""

    weights: MlaWeights
    spec: AttentionSpec
    cache: LayerCache


def mla_scratch(node: OpNode) -> tuple[Buffer, Buffer]:
    """Returns the buffers of an attend_mla node: both are as large as for the largest step, whatever the step."""
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
    rope, step = spec.rope, step.of(context.memory.groups[layer])
    this = MlaLayer(weights, spec, context.memory.caches[layer])
    store = step.positions, step.places, this.cache.lines, this.cache.scales
    store_mla_kv(q, kv, weights.gain, eps, frequencies, rope.scale, rope.interleaved, *store, heads=spec.heads)
    if not len(step.expanded):
        return attend_absorbed(context, step, this, q, out, scratch, step.tiles, selected)
    if len(step.splits):
        others_first = q[: step.decodes], out[: step.decodes]
        attend_absorbed(context, step, this, *others_first, scratch, step.tiles[:0], None)
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
    multiply_heads(q, weights.k_b, absorbed, spec.head_dim - spec.v_dim)
    tables, how = (step.tables, step.header, found), (spec.v_dim, spec.scale, cache.scales)
    top_k = ALL if selected is None else selected.shape[1]
    sizes = cache.lines.shape[2], q.element_size()
    tiling = context.tilings.mla_decode(spec.heads, *sizes)
    if len(tiles):
        of_prompts = context.tilings.mla_prefill(*sizes)
        mla_prefill(absorbed, cache.lines, tiles, *tables, *how, top_k, tiling=of_prompts)
    if len(step.splits):
        split_kv = context.memory.split_kv
        mla_decode(absorbed, cache.lines, step.splits, *tables, split_kv, *how, top_k, tiling=tiling)
    for work, tokens in ((tiles, tokens_per_tile(spec.heads)), (step.splits, 1)) if selected is not None else ():
        if len(work):
            mla_selected(absorbed, cache.lines, work, *tables, *how, selected, tokens, tiling=tiling)
    multiply_heads(found, weights.v_b, out)


def attend_expanded(
    context: Context, step: DeviceInputs, layer: MlaLayer, q: Any, out: Any, scratch: MlaScratch
) -> None:
    """Attends with prompts, to one piece of their contexts after the other."""
    (weights, spec, cache), expansion = layer, context.memory.expansion
    assert expansion is not None
    dims, room = expansion.dims, expansion.room
    expanded = ExpandedKv.within(scratch.absorbed.view(-1), dims, room)
    carry = Carry.within(scratch.found.view(-1).view(torch.float32), dims, len(q))
    itemsize = q.element_size()
    stages = context.tilings.expand_latents(dims.nope, dims.v_dim, itemsize)
    tiling = context.tilings.mla_expanded(dims.nope, dims.rope, dims.v_dim, itemsize)
    for piece, blocks in enumerate(step.expanded.split(expansion.piece_blocks)):
        places = blocks, step.tables, step.header
        expand_latents(cache.lines, *places, weights.k_b, weights.v_b, expanded, cache.scales, stages=stages)
        work = step.tiles, step.tile_contexts, out, carry, piece * room
        mla_expanded(q, expanded, *work, spec.scale, tiling=tiling)


def multiply_heads(x: Any, weight: Any, out: Any, passthrough: int = 0) -> None:
    """Multiplies each head of x by a matrix of its own, weight [heads, b, a]. Per head the input is [a, passthrough]
    and the output is [passthrough, b]: the last values pass through and move to the front."""
    heads, rows, width = weight.shape
    each, to = x.view(len(x), heads, width + passthrough), out.view(len(out), heads, passthrough + rows)
    torch.bmm(each[..., :width].transpose(0, 1), weight.mT, out=to[..., passthrough:].transpose(0, 1))
    if passthrough:
        to[..., :passthrough].copy_(each[..., width:])

"""Maps each op of a recorded program (model/program.py) to a function that launches it on the device.

A launcher is called as `launcher(context, step, *buffers, **attributes)`: the buffers of the node's inputs, outputs and
scratch, and the node's attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from penstock.backend.cuda.activations import ACTIVATIONS
from penstock.backend.cuda.adapters import AdaptedProduct
from penstock.backend.cuda.experts import compute_experts
from penstock.backend.cuda.hidden_states import EACH_TOKEN, StoredRows
from penstock.backend.cuda.kernels import delta_net as delta_net_kernel
from penstock.backend.cuda.kernels import mamba2 as mamba2_kernel
from penstock.backend.cuda.kernels import norm, streams
from penstock.backend.cuda.kernels import norm_qk as norm_qk_kernel
from penstock.backend.cuda.kernels import select_positions as select
from penstock.backend.cuda.kernels.causal_conv import ConvSizes, store_conv_state
from penstock.backend.cuda.kernels.causal_conv import causal_conv as convolve
from penstock.backend.cuda.kernels.decode_attention import Rotation, SharedPlaces, decode_attention, queries_of
from penstock.backend.cuda.kernels.expand_kv import expand_kv
from penstock.backend.cuda.kernels.expert_routing import ExpertPermutation
from penstock.backend.cuda.kernels.fp8_activations import Fp8Activations, fp8_view, quantize_activations
from penstock.backend.cuda.kernels.gather_rows import MAX_TOKEN, gather_rows, resolve_tokens, scatter_rows
from penstock.backend.cuda.kernels.kv_sides import is_apart
from penstock.backend.cuda.kernels.prefill_attention import prefill_attention, queries_per_tile, tokens_per_tile
from penstock.backend.cuda.kernels.rope import rope_and_store
from penstock.backend.cuda.kernels.rope_sides import rope_and_store_sides
from penstock.backend.cuda.kernels.segmented_attention import segmented_attention
from penstock.backend.cuda.kernels.selective_scan import selective_scan as scan
from penstock.backend.cuda.kernels.shared_prefix_attention import SharedTiles, shared_prefix_attention
from penstock.backend.cuda.kernels.silu_and_mul import act_and_mul as act_and_mul_kernel
from penstock.backend.cuda.launch_context import Context
from penstock.backend.cuda.launch_mla import attend_mla, mla_scratch
from penstock.backend.cuda.shared_prefixes import tile_tokens
from penstock.backend.cuda.step_layout import DeviceInputs
from penstock.backend.cuda.weights import Weight
from penstock.errors import UnsupportedModel
from penstock.model.ops import (
    ConvWeights,
    DeltaInputs,
    DeltaWeights,
    ExpertWeights,
    Mamba2Weights,
    ScanWeights,
    Vectors,
)
from penstock.model.program import Buffer, Capabilities, OpNode
from penstock.model.recurrence import ConvSpec, DeltaSpec, Mamba2Spec, ScanSpec
from penstock.model.spec import AttentionSpec, ExpertSpec

SUPPORTED_ACTIVATIONS: dict[str, Collection[str]] = {
    "act_and_mul": ("silu", "gelu", "gelu_tanh"),
    "sparse_act_and_mul": ("silu", "gelu", "gelu_tanh"),
    "gate_columns": ("silu", "gelu", "gelu_tanh"),
    "activate": ACTIVATIONS,
}


def bind(node: OpNode, context: Context) -> Callable[..., None]:
    if node.op in SUPPORTED_ACTIVATIONS:
        check_activation(node.attributes["act"], SUPPORTED_ACTIVATIONS[node.op])
    constants: dict[str, Any] = {}
    if node.op in ("attend", "attend_mla"):
        spec = node.attributes["spec"]
        constants["frequencies"] = context.frequencies(spec.rope, spec.head_dim // 2)
    if node.op == "select_positions":
        index = node.attributes["spec"].index
        constants["frequencies"] = context.frequencies(index.rope, index.head_dim // 2)
    if node.op == "attend":
        options = node.attributes["spec"].options | node.attributes["vectors"]
        whole_rows = {"causal", "distance_bias"}  # a row of one token sees only itself
        constants["whole_rows"] = {name: options.pop(name) for name in whole_rows.intersection(options)}
        del options["shares_kv"]  # the width of a row implies it
        constants["options"] = options
    if node.op in ("linear", "gated_linear"):
        sampled, gated = node.inputs[0].symbol == "S", node.op == "gated_linear"
        constants["adapted"] = context.memory.adapters.product(node.weight, gated=gated, sampled=sampled)
    if node.op == "store_hidden":
        constants["sampled"] = node.inputs[0].symbol == "S"
    if node.op == "moe":
        constants["permutation"] = context.permutation(node.attributes["spec"])
    return partial(LAUNCHERS[node.op], context, **node.attributes, **constants)


def check_activation(act: str, supported: Collection[str]) -> None:
    if act not in supported:
        raise UnsupportedModel(f"the activation {act!r} is not computed here; those that are: {', '.join(supported)}")


def scratch(node: OpNode) -> tuple[Buffer, ...]:
    if node.op == "gated_linear":
        return (Buffer(node.outputs[0].symbol, node.attributes["weight"].rows),)  # the product before its gate
    if node.op == "moe":
        spec = node.attributes["spec"]
        widths = spec.up_rows, spec.hidden, node.inputs[0].width
        choice = Buffer("T", spec.top_k, "float32")  # the numbers of each token's experts, and their weights
        return (choice, choice, *(Buffer("T", spec.top_k * width) for width in widths))
    if node.op == "attend_mla":
        return mla_scratch(node)
    if node.op in ("delta_net", "mamba2"):
        spec, read = node.attributes["spec"], node.outputs[0].width
        pairs = [spec.pairs_width] * 2 if isinstance(spec, DeltaSpec) else []  # pairs of tokens of one chunk
        return tuple(Buffer("T", width, "float32") for width in (spec.width, read, *pairs))
    return ()


CAPABILITIES = Capabilities(
    fuses_gate=lambda weight, act: act == "silu",
    produces_prepared=frozenset(("add_norm", "add_layer_norm", "act_and_mul", "gated_linear")),
    scratch=scratch,
)


def fp8_rows(weight: Weight | None, rows: Any) -> Fp8Activations | None:
    return fp8_view(rows) if weight is not None and weight.takes_fp8(len(rows)) else None


def embed(context: Context, step: DeviceInputs, out: Any, *, table: Weight, partial: bool) -> None:
    memory = context.memory
    tokens = memory.tokens[: len(out)]
    vocab = table.rows if partial else MAX_TOKEN
    resolve_tokens(step.tokens, step.token_slots, memory.last, tokens, vocab, memory.token_ids)
    table.gather(tokens, out)


def embed_positions(context: Context, step: DeviceInputs, out: Any, *, table: Weight) -> None:
    table.gather(step.positions, out)


def add_norm(
    context: Context, step: DeviceInputs, x: Any, *others: Any, gain: Any, eps: float, consumer: Weight | None = None
) -> None:
    residual, out, total = others if len(others) == 3 else (None, others[0], None)
    norm.add_norm(x, residual, gain, eps, out, total, fp8_rows(consumer, out))


def add_layer_norm(
    context: Context,
    step: DeviceInputs,
    x: Any,
    *others: Any,
    gain: Any,
    bias: Any,
    eps: float,
    consumer: Weight | None = None,
) -> None:
    residual, out, total = others if len(others) == 3 else (None, others[0], None)
    norm.add_layer_norm(x, residual, gain, bias, eps, out, total, fp8_rows(consumer, out))


def linear(
    context: Context,
    step: DeviceInputs,
    x: Any,
    out: Any,
    *,
    weight: Weight,
    adapted: AdaptedProduct,
    prepared: bool = False,
) -> None:
    rows = (fp8_rows(weight, x) if prepared else None) or x
    has_updates = adapted.shrink(step, rows)
    if has_updates and (updates := adapted.updates(step)) and weight.updated(rows, out, updates):
        return
    weight.product(rows, out)
    if has_updates:
        adapted.expand(step, weight.width, out)


def gated_linear(
    context: Context,
    step: DeviceInputs,
    x: Any,
    out: Any,
    product: Any,
    *,
    weight: Weight,
    act: str,
    adapted: AdaptedProduct,
    prepared: bool = False,
    consumer: Weight | None = None,
) -> None:
    assert act == "silu", "no kernel computes another gate together with its product"
    rows, fp8_out = (fp8_rows(weight, x) if prepared else None) or x, fp8_rows(consumer, out)
    if not adapted.shrink(step, rows):
        weight.gated(rows, out, product, fp8_out)
        return
    if context.tilings.fixed:  # rows without an adapter are computed as in a step without adapters
        weight.product(rows, product)
        adapted.expand(step, weight.width, product)
        return act_and_mul_kernel(product, out, fp8_out)
    gated = product.view(-1)[: out.numel()].view(out.shape) if fp8_out else out
    if (updates := adapted.updates(step)) and weight.updated(rows, gated, updates, gated=True):
        if fp8_out:
            quantize_activations(gated, *fp8_out)
    else:
        weight.product(rows, product)
        adapted.expand_gated(step, weight.width, product, out, fp8_out)


def norm_qk(
    context: Context, step: DeviceInputs, x: Any, out: Any, *, q_gain: Any, k_gain: Any, spec: AttentionSpec, eps: float
) -> None:
    layer_dim = spec.head_dim if spec.qk_norm == "layer" else 0
    v_run = spec.head_dim if spec.v_norm else 0
    norm_qk_kernel.norm_qk(x, q_gain, k_gain, spec.q_width, spec.kv_width, eps, out, layer_dim, v_run)


def norm_runs(context: Context, step: DeviceInputs, x: Any, out: Any, *, gain: Any, eps: float) -> None:
    norm_qk_kernel.norm_runs(x, gain, eps, out)


def attend(
    context: Context,
    step: DeviceInputs,
    qkv: Any,
    out: Any,
    *,
    layer: int,
    spec: AttentionSpec,
    vectors: Vectors,
    frequencies: Any,
    options: dict[str, Any],
    whole_rows: dict[str, Any],
) -> None:
    rope, step = spec.rope, step.of(context.memory.kv.groups[layer])
    (cache, scales, _), rotation = context.memory.kv.caches[layer], None
    sizes, tilings = (spec.head_dim, qkv.element_size()), context.tilings
    rope_options = frequencies, rope.scale, len(rope.inv_freq), rope.interleaved
    if is_apart(cache):
        stores, gain, width = not spec.shares_kv, options.get("q_gain"), out.shape[1]
        rope_and_store_sides(qkv, *rope_options, step.positions, step.places, cache, scales, width, stores, gain)
        options = options | {"q_gain": None}
    elif len(step.tiles) or step.run or len(step.shared_splits):
        rope_and_store(qkv, *rope_options, step.positions, step.places, cache, scales, stores=not spec.shares_kv)
    else:
        rotation = Rotation(frequencies, step.places, rope.scale, len(rope.inv_freq), rope.interleaved)
    if len(step.tiles):
        tiling = tilings.prefill_attention(queries_per_tile(spec.heads // spec.kv_heads), *sizes)
        kv, kv_scales, tables = prompt_kv(context, step, cache, scales)
        places, hopper = (step.tiles, tables, step.header), tilings.hopper_attention(spec.head_dim)
        how = {"scales": kv_scales, "tiling": tiling, "hopper": hopper, **options, **whole_rows}
        prefill_attention(qkv, kv, *places, out, spec.scale, **how)
    if len(step.splits) and tilings.fixed:
        tiling = tilings.segmented_attention(*sizes, queries_of(spec.heads // spec.kv_heads, step.run))
        how = {"scales": scales, "tiling": tiling, **options, **whole_rows}
        segmented_attention(
            qkv,
            cache,
            step.splits,
            step.positions,
            step.tables,
            step.header,
            out,
            context.memory.split_kv,
            spec.scale,
            run=step.run,
            **how,
        )
    elif len(step.splits):
        places = step.splits, step.tables, step.header
        run = max(step.run, 1)
        queries = queries_of(spec.heads // spec.kv_heads, run)
        tiling = tilings.decode_attention(len(out), *sizes, queries)
        shared = attend_shared(context, step, qkv, out, spec, (cache, scales)) if len(step.shared_splits) else None
        how = {"scales": scales, "tiling": tiling, "run": run, "shared": shared, **options}
        decode_attention(qkv, cache, *places, out, context.memory.split_kv, rotation, spec.scale, **how)


def prompt_kv(context: Context, step: DeviceInputs, cache: Any, scales: Any | None) -> tuple[Any, Any | None, Any]:
    """Returns the cache that prompts attend to, its scales and its tables. Where the step expands contexts, that is a
    copy of them in 16 bits."""
    copies = context.memory.copies
    if copies is None or not len(step.expanded):
        return cache, scales, step.tables
    expand_kv(cache, scales, step.expanded, step.tables, step.header, *copies)
    return copies.lines, None, copies.tables


def attend_shared(
    context: Context, step: DeviceInputs, qkv: Any, out: Any, spec: AttentionSpec, kv: tuple[Any, Any]
) -> SharedPlaces:
    cache, scales = kv
    group = spec.heads // spec.kv_heads
    tokens = tile_tokens(group)
    tiles, split_kv = SharedTiles(step.shared_splits, step.shared_tokens), context.memory.split_kv
    shared = SharedPlaces(step.shared_places, len(step.splits), tokens)
    tiling = context.tilings.shared_prefix(spec.head_dim, qkv.element_size(), queries_of(group, tokens))
    places, how = (step.tables, step.header), (spec.scale, scales, spec.soft_cap)
    shared_prefix_attention(qkv, cache, tiles, *places, out, split_kv, shared, *how, tiling=tiling)
    return shared


def select_positions(
    context: Context,
    step: DeviceInputs,
    q: Any,
    k: Any,
    weights: Any,
    out: Any,
    *,
    layer: int,
    spec: AttentionSpec,
    frequencies: Any,
) -> None:
    assert spec.index is not None
    rope, step = spec.index.rope, step.of(context.memory.kv.groups[layer])
    cache, scores = context.memory.kv.caches[layer].index_keys, context.memory.kv.index_scores
    select.store_index(q, k, frequencies, len(rope.inv_freq), rope.scale, rope.interleaved, step, cache)
    for work, tokens in (step.tiles, tokens_per_tile(spec.heads)), (step.splits, max(step.run, 1)):
        if len(work):
            select.select_positions(q, weights, cache, work, step.tables, step.header, tokens, scores, out)


def act_and_mul(
    context: Context, step: DeviceInputs, x: Any, out: Any, *, act: str, consumer: Weight | None = None
) -> None:
    act_and_mul_kernel(x, out, fp8_rows(consumer, out), act)


def sparse_act_and_mul(context: Context, step: DeviceInputs, x: Any, out: Any, *, act: str, cutoff: float) -> None:
    streams.sparse_act_and_mul(x, out, act, cutoff)


def gate_columns(context: Context, step: DeviceInputs, x: Any, y: Any, out: Any, *, first: int, act: str) -> None:
    streams.gate_columns(x, y, out, first, act)


def take_columns(context: Context, step: DeviceInputs, x: Any, out: Any, *, first: int, gain: Any | None) -> None:
    taken = x[:, first : first + out.shape[1]]
    out.copy_(taken) if gain is None else torch.mul(taken, gain, out=out)


def concat(context: Context, step: DeviceInputs, x: Any, y: Any, out: Any) -> None:
    torch.cat((x, y), dim=1, out=out)


def match_rms(context: Context, step: DeviceInputs, x: Any, like: Any, out: Any) -> None:
    streams.match_rms(x, like, out)


def mix_streams(context: Context, step: DeviceInputs, x: Any, coefficients: Any, out: Any) -> None:
    streams.mix_streams(x, coefficients, out)


def correct_streams(
    context: Context, step: DeviceInputs, x: Any, new: Any, coefficients: Any, out: Any, *, active: int
) -> None:
    streams.correct_streams(x, new, coefficients, out, active)


def add_to_streams(context: Context, step: DeviceInputs, x: Any, y: Any, out: Any) -> None:
    streams.add_to_streams(x, y, out)


def activate(context: Context, step: DeviceInputs, x: Any, out: Any, *, act: str) -> None:
    ACTIVATIONS[act](x, out=out)


def sigmoid_mul(context: Context, step: DeviceInputs, x: Any, gate: Any, out: Any) -> None:
    delta_net_kernel.sigmoid_mul(x, gate, out)


def add(context: Context, step: DeviceInputs, x: Any, y: Any, out: Any) -> None:
    torch.add(x, y, out=out)


def scale(context: Context, step: DeviceInputs, x: Any, out: Any, *, factor: float) -> None:
    torch.mul(x, factor, out=out)


def soft_cap(context: Context, step: DeviceInputs, x: Any, out: Any, *, cap: float) -> None:
    torch.div(x, cap, out=out).tanh_().mul_(cap)


def take_sampled(context: Context, step: DeviceInputs, x: Any, out: Any) -> None:
    gather_rows(x, step.sampled, out)


def store_hidden(context: Context, step: DeviceInputs, x: Any, *, number: int, ahead: int, sampled: bool) -> None:
    memory, stored = context.memory, StoredRows(sampled, ahead)
    own = stored == EACH_TOKEN
    places = step.of(memory.kv.hidden_group).places if own else memory.hidden_places.of(stored, len(x))
    scatter_rows(x, places, memory.hidden.rows(number))


def load_hidden(context: Context, step: DeviceInputs, out: Any, *, number: int) -> None:
    memory = context.memory
    gather_rows(memory.hidden.rows(number), step.of(memory.kv.hidden_group).places, out)


def moe(
    context: Context,
    step: DeviceInputs,
    x: Any,
    router_logits: Any,
    out: Any,
    *scratch: Any,
    experts: ExpertWeights,
    spec: ExpertSpec,
    permutation: ExpertPermutation,
) -> None:
    about: dict[str, Any] = {"experts": experts, "spec": spec, "permutation": permutation}
    compute_experts(x, router_logits, out, *scratch, **about, fixed=context.tilings.fixed)


def delta_net(
    context: Context,
    step: DeviceInputs,
    qkv: Any,
    z: Any,
    beta: Any,
    alpha: Any,
    out: Any,
    *scratch: Any,
    layer: int,
    weights: DeltaWeights,
    spec: DeltaSpec,
    eps: float,
) -> None:
    states = context.memory.states
    rows, buffers = states.rows_of(step), delta_net_kernel.DeltaScratch(*scratch)
    inputs, how = DeltaInputs(qkv, z, beta, alpha), (len(step.tiles) > 0, context.tilings.fixed)
    delta_net_kernel.delta_net(inputs, weights, spec, eps, states.layers[layer], rows, buffers, out, *how)


def causal_conv(
    context: Context, step: DeviceInputs, x: Any, out: Any, *, layer: int, weights: ConvWeights, spec: ConvSpec
) -> None:
    states, rows = context.memory.states.layers[layer], context.memory.states.rows_of(step)
    sizes = ConvSizes.of(spec.conv_width, spec.width, stride=x.stride(0), offset=0, gated=spec.gated)
    convolve(x, weights.conv, weights.bias, sizes, states, rows, out, silu=not spec.gated)
    store_conv_state(x, sizes, states, rows)


def selective_scan(
    context: Context,
    step: DeviceInputs,
    x: Any,
    dt: Any,
    b: Any,
    c: Any,
    gate: Any,
    out: Any,
    *,
    layer: int,
    weights: ScanWeights,
    spec: ScanSpec,
) -> None:
    states, rows = context.memory.states.layers[layer], context.memory.states.rows_of(step)
    scan(x, dt, b, c, gate, weights, spec, states, rows, out, fixed=context.tilings.fixed)


def mamba2(
    context: Context,
    step: DeviceInputs,
    zxbcdt: Any,
    out: Any,
    *scratch: Any,
    layer: int,
    weights: Mamba2Weights,
    spec: Mamba2Spec,
) -> None:
    states = context.memory.states
    rows, buffers = states.rows_of(step), mamba2_kernel.Mamba2Scratch(*scratch)
    mamba2_kernel.mamba2(
        zxbcdt, weights, spec, states.layers[layer], rows, buffers, out, len(step.tiles) > 0, context.tilings.fixed
    )


LAUNCHERS: dict[str, Callable[..., None]] = {
    launcher.__name__: launcher
    for launcher in (
        *(embed, embed_positions, add_norm, add_layer_norm, norm_qk, norm_runs),
        *(sparse_act_and_mul, gate_columns, take_columns, concat),
        *(match_rms, mix_streams, correct_streams, add_to_streams),
        *(linear, gated_linear, attend, attend_mla, select_positions),
        *(act_and_mul, activate, sigmoid_mul, add, scale, soft_cap, take_sampled, moe, delta_net, mamba2),
        *(causal_conv, selective_scan, store_hidden, load_hidden),
    )
}

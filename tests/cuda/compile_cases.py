"""Launches every kernel with representative arguments: this is what the compile-only check compiles.

Tensors hold no values and lie in host memory: a launch is compiled, never run.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from penstock.backend.cuda.arena import Arena
from penstock.backend.cuda.contexts import BLOCK
from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.inputs import run_sizes_of
from penstock.backend.cuda.kernels import quant_gemm, quant_gemm_small, quant_gemv, streams
from penstock.backend.cuda.kernels.apply_bitmask import apply_bitmask
from penstock.backend.cuda.kernels.causal_conv import ConvSizes, StateRows, causal_conv, store_conv_state
from penstock.backend.cuda.kernels.decode_attention import (
    Rotation,
    SharedPlaces,
    SplitKV,
    decode_attention,
    queries_of,
)
from penstock.backend.cuda.kernels.delta_net import DeltaScratch, delta_net, sigmoid_mul
from penstock.backend.cuda.kernels.dequantize import dequantize_matrix, dequantize_rows
from penstock.backend.cuda.kernels.expand_kv import expand_kv
from penstock.backend.cuda.kernels.expert_gemm import (
    ExpertRows,
    expert_gemm,
    expert_gemv,
    quant_expert_gemm,
    quant_expert_gemv,
)
from penstock.backend.cuda.kernels.expert_routing import ExpertPermutation, combine_experts, permute_pairs, route
from penstock.backend.cuda.kernels.fixed_gemm import fixed_gemm, fixed_heads_gemm
from penstock.backend.cuda.kernels.fp8 import empty_fp8, fp8_gemm_small, gather_fp8
from penstock.backend.cuda.kernels.fp8_activations import fp8_view, quantize_activations
from penstock.backend.cuda.kernels.fp8_blocks import Fp8BlockWeight, fp8_block_gemm, gather_fp8_blocks
from penstock.backend.cuda.kernels.fp8_gemm import fp8_gemm
from penstock.backend.cuda.kernels.gather_rows import gather_rows, resolve_tokens, scatter_rows
from penstock.backend.cuda.kernels.gemv import gemv
from penstock.backend.cuda.kernels.hopper_attention import hopper_attention
from penstock.backend.cuda.kernels.hopper_gemm import hopper_gemm
from penstock.backend.cuda.kernels.hopper_low_rank import ProductUpdates, shrink_few
from penstock.backend.cuda.kernels.hopper_mla import hopper_mla
from penstock.backend.cuda.kernels.low_rank import AdaptedWeight, RowTiles, expand, shrink
from penstock.backend.cuda.kernels.mamba2 import Mamba2Scratch, mamba2
from penstock.backend.cuda.kernels.mla_attention import mla_decode, mla_prefill, mla_selected, store_mla_kv
from penstock.backend.cuda.kernels.mla_expanded import Carry, ExpandedKv, expand_latents, mla_expanded
from penstock.backend.cuda.kernels.norm import add_layer_norm, add_norm
from penstock.backend.cuda.kernels.norm_qk import norm_qk, norm_runs
from penstock.backend.cuda.kernels.prefill_attention import prefill_attention, queries_per_tile
from penstock.backend.cuda.kernels.rope import rope_and_store
from penstock.backend.cuda.kernels.rope_sides import rope_and_store_sides
from penstock.backend.cuda.kernels.sample_tokens import find_chunk_maxima, sample_tokens
from penstock.backend.cuda.kernels.sampling_threshold import ThresholdScratch, sampling_threshold
from penstock.backend.cuda.kernels.segmented_attention import segmented_attention
from penstock.backend.cuda.kernels.segmented_mla import segmented_mla
from penstock.backend.cuda.kernels.select_positions import select_positions, store_index
from penstock.backend.cuda.kernels.selective_scan import selective_scan
from penstock.backend.cuda.kernels.shared_prefix_attention import SharedTiles, shared_prefix_attention
from penstock.backend.cuda.kernels.silu_and_mul import act_and_mul
from penstock.backend.cuda.kernels.skinny_gemm import skinny_gemm
from penstock.backend.cuda.kernels.split_k import SplitKScratch
from penstock.backend.cuda.kernels.token_logprobs import token_logprobs
from penstock.backend.cuda.kernels.trellis import TrellisWeight, code_book_of, dequantize_trellis
from penstock.backend.cuda.kv_cache import layout_of
from penstock.backend.cuda.mla_expansion import MlaDims
from penstock.backend.cuda.pack_quantized import CODINGS, QuantizedWeight
from penstock.backend.cuda.quantized_weights import Workspace
from penstock.backend.cuda.shared_prefixes import tile_tokens
from penstock.backend.cuda.trellis_weights import TrellisMatrix
from penstock.model.ops import DeltaInputs, DeltaWeights, Mamba2Weights, ScanWeights
from penstock.model.recurrence import CHUNK, DeltaSpec, Mamba2Spec, ScanSpec
from penstock.model.spec import AttentionSpec, ExpertSpec, RopeSpec

HOST = torch.device("cpu")
BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
DIM, HIDDEN, VOCAB = 1024, 2816, 32000
EXPERTS = ExpertSpec(64, 8, 512)
FORMATS = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "IQ4_XS", "MXFP4", "NVFP4", "INT4", "U8_ZERO_32")

Case = Callable[[Tilings], None]
CASES: dict[str, Case] = {}  # by name
HOPPER: set[str] = set()  # names of cases that only compute capability 9.0 runs
NEEDS_FP8: set[str] = set()  # names of cases that need FP8 conversions: compute capability 8.9
LARGE = {  # names of cases that take most shared memory
    "plain_skinny_gemm-gated",
    "many_rows_of_a_quantized_matrix-Q8_0",
    "experts_by_pairs_and_by_blocks-BF16",
    "attention-wide",
    "multi_head_latent_attention-bf16",
    "expanded_multi_head_latent_attention-bf16",
}


def case(*, hopper: bool = False, needs_fp8: bool = False, **variants: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Adds a case for every variant, or one without arguments, under the function's name."""

    def add(run: Any) -> Any:
        for name, arguments in (variants or {"": ()}).items():
            key = f"{run.__name__}-{name}".rstrip("-")
            CASES[key] = lambda tilings, run=run, arguments=arguments: run(tilings, *arguments)
            if hopper:
                HOPPER.add(key)
            if needs_fp8 or "fp8" in name:
                NEEDS_FP8.add(key)
        return run

    return add


def empty(*size: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype)


def ints(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int32)


def scratch() -> SplitKScratch:
    return SplitKScratch(empty(1 << 20, dtype=F32), ints(1 << 12))


def quantized(name: str, rows: int, width: int) -> QuantizedWeight:
    """A weight whose arrays have the right types, and no right sizes: a launch looks at types alone."""
    coding = CODINGS[name]
    high = ints(16) if coding.bits in (5, 6) else None
    return QuantizedWeight(coding, rows, width, ints(16), high, ints(16), ints(16) if coding.bytes else None)


@case()
def tokens_and_rows(tilings: Tilings) -> None:
    resolve_tokens(ints(8), ints(8), ints(8), ints(8))
    resolve_tokens(ints(8), ints(8), ints(8), ints(8), token_ids=ints(8))
    gather_rows(empty(VOCAB, DIM), ints(8), empty(8, DIM))
    scatter_rows(empty(8, DIM), ints(8), empty(VOCAB, DIM))


@case(plain=(None,), fp8=(FP8,))
def norms_and_activations(tilings: Tilings, dtype: torch.dtype | None) -> None:
    x, residual, out = empty(4, DIM), empty(4, DIM), empty(4, DIM)
    gain = empty(DIM, dtype=F32)
    fp8 = None if dtype is None else fp8_view(out)
    add_norm(x, residual, gain, 1e-5, out, empty(4, DIM), fp8)
    add_layer_norm(x, None, gain, gain, 1e-5, out, None, fp8)
    act_and_mul(empty(4, 2 * DIM), out, fp8)
    if dtype is None:
        act_and_mul(empty(4, 2 * DIM), out, act="gelu_tanh")
        act_and_mul(empty(4, 2 * DIM), out, act="clamped")
        norm_qk(empty(4, 12 * 128), gain[:128], gain[:128], 8 * 128, 2 * 128, 1e-5, empty(4, 12 * 128))
        norm_qk(empty(4, 12 * 128), gain[:128], gain[:128], 8 * 128, 2 * 128, 1e-5, empty(4, 12 * 128), v_run=128)
        norm_runs(x, gain[:128], 1e-5, out)
        norm_qk(empty(4, 384), gain[:256], gain[:64], 256, 64, 1e-5, empty(4, 384), layer_dim=64)
        sigmoid_mul(x, empty(4, 1), out)
    else:
        quantize_activations(x, *fp8_view(out))


@case()
def residual_streams(tilings: Tilings) -> None:
    x, one, all_streams = empty(4, 4 * DIM), empty(4, DIM), empty(4, 4 * DIM)
    streams.sparse_act_and_mul(empty(4, 2 * HIDDEN), empty(4, HIDDEN), "gelu_tanh", 1.6)
    streams.gate_columns(empty(4, 256), x, empty(4, 256), 256, "gelu_tanh")
    streams.match_rms(x, one, all_streams)
    streams.mix_streams(x, empty(4, 16, dtype=F32), all_streams)
    streams.correct_streams(x, one, empty(4, 4, dtype=F32), all_streams, 0)
    streams.add_to_streams(x, one, all_streams)


@case(one=(DIM, False), gated=(2 * HIDDEN, True), head=(VOCAB, False))
def plain_gemv(tilings: Tilings, rows: int, gated: bool) -> None:
    weight, out = empty(rows, DIM), empty(1, rows // 2 if gated else rows)
    gemv(empty(1, DIM), weight, None, out, gated=gated, tiling=tilings.gemv(out.shape[1], DIM))


@case()
def products_of_any_number_of_rows(tilings: Tilings) -> None:
    tiling, out = tilings.fixed_gemm(DIM, DIM, 2), empty(100, DIM)
    fixed_gemm(empty(100, DIM), empty(DIM, DIM), empty(DIM, dtype=F32), out, tiling, scratch())
    heads = empty(100, 16, 192)[..., :128], empty(16, 512, 128), empty(100, 16, 576)[..., 64:]
    fixed_heads_gemm(*heads, tilings.fixed_heads_gemm(512, 128, 2))


@case(few=(4, DIM, False), more=(32, DIM, False), gated=(16, 2 * HIDDEN, True))
def plain_skinny_gemm(tilings: Tilings, count: int, rows: int, gated: bool) -> None:
    out = empty(count, rows // 2 if gated else rows)
    tiling = tilings.skinny(count, rows, DIM, 2, gated)
    assert tiling is not None
    skinny_gemm(empty(count, DIM), empty(rows, DIM), empty(rows, dtype=F32), out, tiling, scratch(), gated=gated)


@case(
    hopper=True,
    plain=(128, 4, {}),
    wide=(256, 2, {"window": 128, "sinks": True, "soft_cap": 50.0}),
)
def hopper_prefill_attention(tilings: Tilings, dims: int, shared: int, about: dict[str, Any]) -> None:
    kv_heads = 2
    heads = kv_heads * shared
    qkv, cache = empty(8, (heads + 2 * kv_heads) * dims), empty(4, 2, kv_heads, 16, dims)
    sinks = empty(heads, dtype=F32) if "sinks" in about else None
    how = 0.1, about.get("window", 0), about.get("soft_cap", 0.0), sinks
    tiling = tilings.hopper_attention(dims)
    hopper_attention(qkv, cache, ints(4, 5), ints(64), ints(4), empty(8, heads * dims), *how, tiling=tiling)


@case(hopper=True, bf16=(BF16, 64, False), gated=(BF16, 64, True), fp8=(FP8, 16, False))
def plain_hopper_gemm(tilings: Tilings, dtype: torch.dtype, count: int, gated: bool) -> None:
    out = empty(count, HIDDEN)
    weight = empty(2 * HIDDEN if gated else HIDDEN, DIM, dtype=dtype)
    tiling = tilings.hopper_gemm(count, HIDDEN, DIM, weight.element_size(), gated)
    scales = {}
    if dtype == FP8:
        scales = {"scales": empty(HIDDEN, dtype=F32), "item_scales": empty(count, dtype=F32)}
    hopper_gemm(empty(count, DIM, dtype=dtype), weight, None, out, tiling, scratch(), gated=gated, **scales)


@case(hopper=True, bf16=(BF16, 64, False), gated=(BF16, 64, True), fp8=(FP8, 64, True), few=(FP8, 8, False))
def updated_hopper_gemm(tilings: Tilings, dtype: torch.dtype, count: int, gated: bool) -> None:
    weight, out = empty(2 * HIDDEN if gated else HIDDEN, DIM, dtype=dtype), empty(count, HIDDEN)
    tiling = tilings.hopper_gemm(count, HIDDEN, DIM, weight.element_size(), gated, True)
    scales = {"scales": empty(2 * HIDDEN, dtype=F32), "item_scales": empty(count, dtype=F32)} if dtype == FP8 else {}
    records = torch.empty(4, 8, 8, dtype=torch.int64)
    rows, h = RowTiles(ints(16, 4), ints(count), 16), empty(1 << 20, dtype=F32)
    x = empty(count, DIM) if dtype == BF16 else fp8_view(empty(count, DIM))
    shrink_few(x, rows, AdaptedWeight(records, 3, 3, 24, True, BF16), h)
    how = {"updates": ProductUpdates(ints(16, 4), ints(count), records, h, 8, 3, 1), **scales}
    hopper_gemm(empty(count, DIM, dtype=dtype), weight, None, out, tiling, scratch(), gated=gated, **how)


@case(**{name: (name,) for name in FORMATS})
def one_row_of_a_quantized_matrix(tilings: Tilings, name: str) -> None:
    for rows, gated in ((DIM, False), (2 * HIDDEN, True), (VOCAB, False)):
        weight, out = quantized(name, rows, DIM), empty(1, rows // 2 if gated else rows)
        coding = weight.coding
        if coding.groups > 1:
            tiling = tilings.quant_gemv(coding.groups, rows, DIM, gated, len(coding.table) > 8)
            quant_gemv.quant_gemv(empty(1, DIM), weight, None, out, gated=gated, tiling=tiling)


@case(**{name: (name,) for name in FORMATS})
def some_rows_of_a_quantized_matrix(tilings: Tilings, name: str) -> None:
    weight = quantized(name, DIM, DIM)
    kind = "4 bits" if weight.coding.bits == 4 else "more bits"
    for count, rows, gated in ((3, DIM, False), (16, 2 * HIDDEN, True)):
        weight, out = quantized(name, rows, DIM), empty(count, rows // 2 if gated else rows)
        tiling = tilings.small_gemm(kind, count, rows, DIM, gated)
        quant_gemm_small.quant_gemm_small(empty(count, DIM), weight, None, out, gated=gated, tiling=tiling)


@case(**{name: (name,) for name in FORMATS})
def many_rows_of_a_quantized_matrix(tilings: Tilings, name: str) -> None:
    weight = quantized(name, DIM, DIM)
    for count in (32, 200):
        tiling = tilings.quant_gemm(count, DIM, DIM)
        quant_gemm.quant_gemm(empty(count, DIM), weight, empty(DIM, dtype=F32), empty(count, DIM), tiling, scratch())


@case(**{name: (name,) for name in FORMATS})
def a_dequantized_matrix(tilings: Tilings, name: str) -> None:
    weight = quantized(name, DIM, DIM)
    dequantize_matrix(weight, empty(DIM, DIM))
    dequantize_rows(weight, ints(4), empty(4, DIM))


@case(halves=("mcg", 3), bytes=("mul1", 7))
def an_exl3_matrix(tilings: Tilings, kind: str, bits: int) -> None:
    vector = empty(DIM, dtype=F32)
    weight = TrellisWeight(code_book_of(kind, bits), ints(16), vector, vector)
    matrix = TrellisMatrix((weight,), vector, Workspace(scratch(), 64, tilings))
    for count in (1, 64):
        matrix.product(empty(count, DIM), empty(count, DIM))
    dequantize_trellis(weight, empty(DIM, DIM))


@case(**{name: (name,) for name in ("BF16", *FORMATS)})
def experts_by_pairs_and_by_blocks(tilings: Tilings, name: str) -> None:
    rows, experts = 2 * EXPERTS.hidden, ints(8, EXPERTS.top_k)
    permutation = ExpertPermutation.on(HOST, EXPERTS, 64)
    factors = empty(64 * rows, dtype=F32) if name == "NVFP4" else None
    for gated in (False, True):
        out = empty(64, rows // 2 if gated else rows)
        if name == "BF16":
            tiling = tilings.expert_gemv(2, out.shape[1], DIM, gated)
            expert_gemv(ExpertRows(empty(8, DIM), experts, 8), empty(64 * rows, DIM), None, out, gated, tiling=tiling)
        else:
            weight = quantized(name, 64 * rows, DIM)
            quant_expert_gemv(ExpertRows(empty(8, DIM), experts, 8), weight, None, out, gated, factors)
    for size in (16, 128):
        pairs, out = ExpertRows(empty(64, DIM), ints(64, 8), 8), empty(512, rows)
        if name == "BF16":
            expert_gemm(
                pairs, permutation, size, empty(64 * rows, DIM), empty(64 * rows, dtype=F32), out, tilings.device
            )
        else:
            quant_expert_gemm(pairs, permutation, size, quantized(name, 64 * rows, DIM), None, out, factors)


@case(needs_fp8=True, **{"rows": ((64 * 1024,),), "blocks": ((DIM // 128, 64 * 1024),)})
def fp8_experts(tilings: Tilings, scaled: tuple[int, ...]) -> None:
    rows, weight, scales = 2 * EXPERTS.hidden, empty(64 * 1024, DIM, dtype=FP8), empty(*scaled, dtype=F32)
    permutation = ExpertPermutation.on(HOST, EXPERTS, 64)
    few, many = ExpertRows(empty(8, DIM), ints(8, 8), 8), ExpertRows(empty(64, DIM), ints(64, 8), 8)
    for gated in (False, True):
        tiling = tilings.expert_gemv(1, rows, DIM, gated)
        expert_gemv(few, weight, None, empty(64, rows // 2 if gated else rows), gated, scales, tiling=tiling)
    for size in (16, 128):
        expert_gemm(many, permutation, size, weight, None, empty(512, rows), tilings.device, scales)


@case()
def expert_choice(tilings: Tilings) -> None:
    experts, weights = ints(8, 8), empty(8, 8, dtype=F32)
    grouped = ExpertSpec(64, 8, 512, scoring="sigmoid", choice_bias=True, renormalize=True, groups=8, top_k_groups=4)
    route(empty(8, 64, dtype=F32), None, EXPERTS, experts, weights)
    route(empty(8, 64, dtype=F32), empty(64, dtype=F32), grouped, experts, weights)
    permute_pairs(experts, ExpertPermutation.on(HOST, EXPERTS, 8), 16)
    combine_experts(empty(64, DIM), weights, empty(8, DIM))


@case()
def fp8_matrices_and_few_rows(tilings: Tilings) -> None:
    weight = empty_fp8(2 * HIDDEN, DIM, HOST)
    for count, gated in ((1, False), (16, False), (4, True)):
        tiling = tilings.small_gemm("fp8", count, weight.rows, DIM, gated)
        out = empty(count, HIDDEN if gated else 2 * HIDDEN)
        fp8_gemm_small(empty(count, DIM), weight, None, out, gated=gated, tiling=tiling)


@case(needs_fp8=True)
def fp8_matrices_and_many_rows(tilings: Tilings) -> None:
    weight = empty_fp8(DIM, DIM, HOST)
    blocks = Fp8BlockWeight(weight.values, empty(DIM // 128, DIM, dtype=F32))
    gather_fp8(weight, ints(4), empty(4, DIM))
    gather_fp8_blocks(blocks, ints(4), empty(4, DIM))
    for count in (20, 100):
        tiling = tilings.fp8_gemm(count, DIM, DIM)
        x, scales, out = empty(count, DIM, dtype=FP8), empty(count, dtype=F32), empty(count, DIM)
        fp8_gemm(x, scales, weight, None, out, tiling, scratch())
        fp8_block_gemm(x, scales, blocks, None, out, tilings.fp8_block_gemm(count, DIM, DIM), scratch())
    fp8_block_gemm(empty(4, DIM), None, blocks, None, empty(4, DIM), tilings.fp8_block_gemm(4, DIM, DIM), scratch())


@case(
    bf16=(BF16, 128, 4, {}),
    many_heads=(BF16, 128, 16, {}),
    wide=(BF16, 256, 2, {"soft_cap": 50.0}),
    sinks=(BF16, 64, 8, {"window": 128, "sinks": True}),
    gain=(BF16, 128, 4, {"q_gain": True}),
    bias=(BF16, 64, 1, {"causal": False, "distance_bias": 128}),
    chunks=(BF16, 128, 5, {"chunk": 8192}),
    temperature=(BF16, 128, 5, {"temperature": 0.1, "temperature_span": 8192}),
    int8=(torch.int8, 128, 4, {}),
    fp8=(FP8, 128, 4, {}),
)
def attention(tilings: Tilings, dtype: torch.dtype, dims: int, shared: int, about: dict[str, Any]) -> None:
    kv_heads = 2
    heads = kv_heads * shared
    window, cap = about.get("window", 0), about.get("soft_cap", 0.0)
    sinks = empty(heads, dtype=F32) if "sinks" in about else None
    q_gain = empty(dims, dtype=F32) if "q_gain" in about else None
    qkv, cache = empty(8, (heads + 2 * kv_heads) * dims), empty(4, 2, kv_heads, 16, dims, dtype=dtype)
    scales = None if dtype == BF16 else empty(4, 2, kv_heads, 16, dtype=F32)
    frequencies, out = torch.empty(dims // 2, dtype=torch.float64), empty(8, heads * dims)
    rope_and_store(qkv, frequencies, 1.0, dims // 2, False, ints(8), ints(8), cache, scales)
    tables, header = ints(64), ints(4)
    tiling = tilings.prefill_attention(queries_per_tile(shared), dims, 2)
    others = {key: about[key] for key in ("chunk", "temperature", "temperature_span") if key in about}
    bias = empty(heads * 257, dtype=F32) if "distance_bias" in about else None
    how = 0.1, window, scales, cap, about.get("causal", True), sinks, q_gain, bias
    prefill_attention(qkv, cache, ints(4, 5), tables, header, out, *how, **others, tiling=tiling)
    split_kv = SplitKV(empty(1 << 16, dtype=F32), empty(1 << 12, dtype=F32), ints(64))
    about = 0.1, window, scales, cap, sinks, q_gain
    many, one = (tilings.decode_attention(rows, dims, 2) for rows in (8, 1))
    for rotation in (None, Rotation(frequencies, ints(8), 1.0, dims // 2, False)):
        common = tables, header, out, split_kv, rotation
        decode_attention(qkv, cache, ints(72, 8), *common, *about, **others, tiling=many)
    for run in run_sizes_of(shared):
        tiling = tilings.decode_attention(8, dims, 2, queries_of(shared, run))
        common = tables, header, out, split_kv, None
        decode_attention(qkv, cache, ints(72, 8), *common, *about, **others, run=run, tiling=tiling)
    if together := 0 if others or window or q_gain is not None else tile_tokens(shared):
        places, tiles = SharedPlaces(ints(8, 4), 72, together), SharedTiles(ints(96, 8), ints(8))
        tiling = tilings.shared_prefix(dims, 2, queries_of(shared, together))
        common = tables, header, out, split_kv
        shared_prefix_attention(qkv, cache, tiles, *common, places, 0.1, scales, cap, tiling=tiling)
        decode_attention(qkv, cache, ints(72, 8), *common, None, *about, shared=places, tiling=many)
    alone = tables, header, out[:1], split_kv, rotation
    decode_attention(qkv[:1], cache, ints(65, 8), *alone, *about, **others, tiling=one)


@case(int8=(torch.int8, 128), fp8=(FP8, 64))
def copy_of_contexts(tilings: Tilings, dtype: torch.dtype, dims: int) -> None:
    cache, scales = empty(4, 2, 8, 16, dims, dtype=dtype), empty(4, 2, 8, 16, dtype=F32)
    expand_kv(cache, scales, ints(16, 3), ints(64), ints(4), empty(128, 2, 8, 16, dims), ints(64))


@case(int4=("int4", 128), mixed=("int8:int4", 64))
def attention_over_two_sides(tilings: Tilings, kv: str, dims: int) -> None:
    spec, heads = AttentionSpec(8, 2, dims, RopeSpec((1.0,), False)), 8
    lines, scales, _ = layout_of(kv, BF16).reserve(spec, 4, 16, Arena(HOST))
    qkv, frequencies, out = empty(8, 12 * dims), torch.empty(dims // 2, dtype=torch.float64), empty(8, heads * dims)
    about = frequencies, 1.0, dims // 2, False, ints(8), ints(8), lines, scales, heads * dims
    rope_and_store_sides(qkv, *about, q_gain=empty(dims, dtype=F32) if kv == "int4" else None)
    tables, header = ints(64), ints(4)
    tiling = tilings.prefill_attention(queries_per_tile(4), dims, 2)
    prefill_attention(qkv, lines, ints(4, 5), tables, header, out, 0.1, 0, scales, tiling=tiling)
    split_kv = SplitKV(empty(1 << 16, dtype=F32), empty(1 << 12, dtype=F32), ints(64))
    places, tiles = SharedPlaces(ints(8, 4), 72, tile_tokens(4)), SharedTiles(ints(96, 8), ints(8))
    tiling = tilings.shared_prefix(dims, 2, queries_of(4, places.tile_tokens))
    common = tables, header, out, split_kv
    shared_prefix_attention(qkv, lines, tiles, *common, places, 0.1, scales, tiling=tiling)
    tiling = tilings.decode_attention(8, dims, 2)
    decode_attention(qkv, lines, ints(72, 8), *common, None, 0.1, 0, scales, tiling=tiling)
    tiling = tilings.segmented_attention(dims, 2, queries_of(4, 16))
    segmented_attention(qkv, lines, ints(128, 8), ints(8), *common, 0.1, 0, scales, run=16, tiling=tiling)


@case(
    bf16=(BF16, 128, 4, {}),
    wide=(BF16, 256, 5, {"soft_cap": 50.0, "chunk": 8192, "temperature": 0.1, "temperature_span": 8192}),
    sinks=(BF16, 64, 8, {"window": 128}),
    int8=(torch.int8, 128, 4, {}),
    fp8=(FP8, 128, 4, {}),
    encoder=(BF16, 64, 1, {"causal": False}),
    biases=(BF16, 64, 1, {"causal": False, "distance_bias": empty(2 * 257, dtype=F32)}),
)
def attention_in_segments(tilings: Tilings, dtype: torch.dtype, dims: int, shared: int, about: dict[str, Any]) -> None:
    kv_heads, run = 2, run_sizes_of(shared)[-1]
    heads = kv_heads * shared
    how = {"window": 0, "scales": None if dtype == BF16 else empty(4, 2, kv_heads, 16, dtype=F32), **about}
    vectors = {"sinks": empty(heads, dtype=F32), "q_gain": empty(dims, dtype=F32)} if how["window"] else {}
    qkv, cache = empty(8, (heads + 2 * kv_heads) * dims), empty(4, 2, kv_heads, 16, dims, dtype=dtype)
    split_kv = SplitKV(empty(1 << 16, dtype=F32), empty(1 << 12, dtype=F32), ints(64))
    places = ints(128, 8), ints(8), ints(64), ints(4), empty(8, heads * dims), split_kv
    tiling = tilings.segmented_attention(dims, 2, queries_of(shared, run))
    segmented_attention(qkv, cache, *places, 0.1, **how, **vectors, run=run, tiling=tiling)


@case(bf16=(BF16, 128), int8=(torch.int8, 16), fp8=(FP8, 16))
def multi_head_latent_attention(tilings: Tilings, dtype: torch.dtype, heads: int) -> None:
    dims, v_dim = 576, 512
    q, kv, out = empty(8, heads * dims), empty(8, dims), empty(8, heads * v_dim)
    cache, scales = empty(4, 16, dims, dtype=dtype), None if dtype == BF16 else empty(4, 2, 16, dtype=F32)
    frequencies, gain = torch.empty(32, dtype=torch.float64), empty(v_dim, dtype=F32)
    unabsorbed = empty(8, heads * 192)
    store_mla_kv(unabsorbed, kv, gain, 1e-5, frequencies, 1.0, True, ints(8), ints(8), cache, scales, heads=heads)
    tiling, answers = tilings.mla_prefill(dims, 2), tilings.mla_decode(heads, dims, 2)
    mla_prefill(q, cache, ints(4, 5), ints(64), ints(4), out, v_dim, 0.1, scales, tiling=tiling)
    split_kv = SplitKV(empty(1 << 16, dtype=F32), empty(1 << 12, dtype=F32), ints(64))
    about, selected = (ints(64), ints(4), out), empty(8, 2048, dtype=F32)
    mla_decode(q, cache, ints(72, 8), *about, split_kv, v_dim, 0.1, scales, tiling=answers)
    how = {"run": run_sizes_of(heads)[-1], "tiling": tilings.segmented_mla(dims, 2)}
    segmented_mla(q, cache, ints(72, 8), *about, split_kv, v_dim, 0.1, scales, **how)
    for work, tokens in (ints(4, 5), 8), (ints(72, 8), 1):
        mla_selected(q, cache, work, *about, v_dim, 0.1, scales, selected, tokens, tiling=answers)


@case(bf16=(BF16,), int8=(torch.int8,), fp8=(FP8,))
def expanded_multi_head_latent_attention(tilings: Tilings, dtype: torch.dtype) -> None:
    dims, room = MlaDims(heads=128, nope=128, rope=64, rank=512, v_dim=128), 2 * BLOCK
    cache, scales = empty(4, 16, 576, dtype=dtype), None if dtype == BF16 else empty(4, 2, 16, dtype=F32)
    expanded = ExpandedKv.within(empty(room * (128 * 256 + 64)), dims, room)
    k_b, v_b = empty(128, 512, 128), empty(128, 128, 512)
    stages = tilings.expand_latents(128, 128, 2)
    expand_latents(cache, ints(2, 3), ints(64), ints(4), k_b, v_b, expanded, scales, stages=stages)
    carry = Carry.within(empty(8 * 128 * 130, dtype=F32), dims, 8)
    work, tiling = (ints(4, 5), ints(4), empty(8, 128 * 128), carry, room), tilings.mla_expanded(128, 64, 128, 2)
    mla_expanded(empty(8, 128 * 192), expanded, *work, 0.1, tiling=tiling)


@case(hopper=True, bf16=(BF16,), f16=(torch.float16,))
def hopper_expanded_attention(tilings: Tilings, dtype: torch.dtype) -> None:
    dims, room = MlaDims(heads=128, nope=128, rope=64, rank=512, v_dim=128), 2 * BLOCK
    expanded = ExpandedKv.within(empty(room * (128 * 256 + 64), dtype=dtype), dims, room)
    carry, out = Carry.within(empty(8 * 128 * 130, dtype=F32), dims, 8), empty(8, 128 * 128, dtype=dtype)
    work = ints(4, 5), ints(4), out, carry, room
    hopper_mla(empty(8, 128 * 192, dtype=dtype), expanded, *work, 0.1, tiling=tilings.hopper_mla(128, 64, 128))


@case()
def index_of_sparse_attention(tilings: Tilings) -> None:
    q, k, weights, cache = empty(8, 64 * 128), empty(8, 128), empty(8, 64, dtype=F32), empty(4, 16, 128)
    step = SimpleNamespace(positions=ints(8), places=ints(8))
    for interleaved in (False, True):
        store_index(q, k, torch.empty(32, dtype=torch.float64), 32, 1.0, interleaved, step, cache)
    scores, out = empty(32, 64, dtype=F32), empty(8, 2048, dtype=F32)
    for work, tokens in (ints(4, 5), 8), (ints(72, 8), 1):
        select_positions(q, weights, cache, work, ints(64), ints(4), tokens, scores, out)


@case(
    qwen3_next=(DeltaSpec(4, 8, 128, 128, 4),),
    kimi_linear=(DeltaSpec(8, 8, 128, 128, 4, channel_decay=True, gate="sigmoid"),),
)
def delta_nets(tilings: Tilings, spec: DeltaSpec) -> None:
    weights = DeltaWeights(*[empty(spec.width * 4, dtype=F32) for _ in DeltaWeights._fields])
    qkvz, ba = empty(8, spec.width + spec.v_width), empty(8, spec.v_heads + spec.decay_width)
    states, rows = empty(4, spec.state_floats, dtype=F32), StateRows(ints(4, 8), ints(8), ints(4, 2))
    widths = spec.width, spec.v_width, CHUNK * spec.v_heads, CHUNK * spec.v_heads
    scratch = DeltaScratch(*(empty(8, width, dtype=F32) for width in widths))
    inputs = DeltaInputs(qkvz, qkvz, ba, ba)
    for how in {}, {"prompts": False, "fixed": True}:
        delta_net(inputs, weights, spec, 1e-5, states, rows, scratch, empty(8, spec.v_width), **how)


@case(biased=(True, True), plain=(False, False))
def convolution_over_time(tilings: Tilings, biased: bool, silu: bool) -> None:
    sizes, width = ConvSizes.of(4, 640, stride=1024, offset=64, column=128), 640
    states, rows = empty(4, 64 + 3 * width, dtype=F32), StateRows(ints(4, 8), ints(8), ints(4, 2))
    taps, bias = empty(width * 4, dtype=F32), empty(width, dtype=F32) if biased else None
    causal_conv(empty(8, 1024), taps, bias, sizes, states, rows, empty(8, width, dtype=F32), silu)


@case(normed=(8, 128), plain=(0, 256))
def mamba2_layers(tilings: Tilings, norm_groups: int, state_dim: int) -> None:
    spec = Mamba2Spec(32, 64, state_dim, 8, 4, norm_groups=norm_groups)
    sizes = spec.width * 4, spec.width, spec.heads, spec.heads, spec.heads
    gain = empty(spec.inner, dtype=F32) if norm_groups else None
    weights = Mamba2Weights(*(empty(size, dtype=F32) for size in sizes), gain)
    states, rows = empty(4, spec.state_floats, dtype=F32), StateRows(ints(4, 8), ints(8), ints(4, 2))
    scratch = Mamba2Scratch(empty(8, spec.width, dtype=F32), empty(8, spec.inner, dtype=F32))
    for how in {}, {"prompts": False, "fixed": True}:
        mamba2(empty(8, spec.in_width), weights, spec, states, rows, scratch, empty(8, spec.inner), **how)


@case()
def gated_convolution(tilings: Tilings) -> None:
    sizes = ConvSizes.of(3, 640, stride=1920, offset=0, gated=True)
    states, rows = empty(4, 2 * 640, dtype=F32), StateRows(ints(4, 8), ints(8), ints(4, 2))
    x, taps = empty(8, 1920), empty(640 * 3, dtype=F32)
    causal_conv(x, taps, None, sizes, states, rows, empty(8, 640), silu=False)
    store_conv_state(x, sizes, states, rows)


@case()
def selective_scans(tilings: Tilings) -> None:
    spec = ScanSpec(512, 16)
    x, dt, b, c, gate = empty(8, 512), empty(8, 512), empty(8, 16), empty(8, 16), empty(8, 1024)
    weights = ScanWeights(empty(spec.state_floats, dtype=F32), empty(512, dtype=F32))
    states, rows = empty(4, spec.state_floats, dtype=F32), StateRows(ints(4, 8), ints(8), ints(4, 2))
    for fixed in (False, True):
        selective_scan(x, dt, b, c, gate, weights, spec, states, rows, empty(8, 512), fixed=fixed)


@case(decode=(16, BF16), prompts=(64, BF16), fp8=(16, FP8))
def adapters_of_rows(tilings: Tilings, size: int, dtype: torch.dtype) -> None:
    records, h = torch.empty(4, 8, 8, dtype=torch.int64), empty(1 << 20, dtype=F32)
    weight, rows = AdaptedWeight(records, 3, 3, 24, True, BF16), RowTiles(ints(16, 4), ints(128), size)
    x = empty(128, DIM) if dtype == BF16 else fp8_view(empty(128, DIM))
    shrink(x, rows, weight, h)
    expand(h, DIM, rows, weight, empty(128, DIM), empty(128, DIM))
    expand(h, DIM, rows, weight, empty(128, 2 * HIDDEN), empty(128, HIDDEN), gated=True)
    each, logits = RowTiles(ints(128), None, 16), empty(128, VOCAB, dtype=F32)
    shrink(x, each, weight, h)
    expand(h, DIM, each, weight, logits, logits)


@case()
def sampling(tilings: Tilings) -> None:
    logits, chunks = empty(4, VOCAB, dtype=F32), -(-VOCAB // 4096)
    maxima, where = empty(4, chunks, dtype=F32), ints(4, chunks)
    masses, floats, whole = torch.empty(4, chunks, dtype=torch.int64), empty(4, dtype=F32), ints(4)
    find_chunk_maxima(logits, maxima, where)
    room = ThresholdScratch.on(HOST, 4, VOCAB)
    sampling_threshold(logits, maxima, room, floats, whole, floats, floats, floats)
    arrays = floats, floats, ints(4, 2), whole, whole, whole, whole, (maxima, where, masses)
    sample_tokens(logits, *arrays, draws=True)
    token_logprobs(logits, whole, ints(4, 2))
    apply_bitmask(logits, whole, ints(4, -(-VOCAB // 32)))

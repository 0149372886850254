"""Turns a recorded program (model/program.py) into a native one: a table maps each op to the native call for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from penstock.backend.base import Floats, Model
from penstock.backend.cpu._native import Program as NativeProgram
from penstock.backend.cpu._native import Weight
from penstock.backend.cpu.weights import HeadWeights
from penstock.backend.kv_formats import KvFormats
from penstock.model import program
from penstock.model.ops import (
    ConvWeights,
    DeltaWeights,
    ExpertWeights,
    Mamba2Weights,
    MlaWeights,
    ScanWeights,
    Vectors,
)
from penstock.model.program import TAKES_OVER, Buffer, Capabilities, OpNode, Value
from penstock.model.recurrence import ConvSpec, DeltaSpec, Mamba2Spec, ScanSpec
from penstock.model.spec import SHAPES, AttentionSpec, ExpertSpec, RopeSpec

NO_ROTATION = -1


class Emitter:
    """Adds ops to a native program, and holds what they share: the angles by which RoPE rotates each position."""

    def __init__(self, native: NativeProgram) -> None:
        self.native = native
        self._angles: dict[tuple[tuple[float, ...], float], int] = {}

    def emit(self, recorded: program.Program) -> None:
        for node in recorded.nodes:
            if node.op in ("attend", "attend_mla"):
                self.angles(node.attributes["spec"].rope)  # computed once, before all layers
            if node.op == "select_positions":
                self.angles(node.attributes["spec"].index.rope)
        buffers = [self.native.buffer(symbol, width, prepared) for symbol, width, _, prepared in recorded.buffers]
        for node, places in zip(recorded.nodes, recorded.places, strict=True):
            EMITTERS[node.op](self, *(buffers[place] for place in places), **node.attributes)
        if recorded.pooled_buffer is not None:
            self.native.keep(buffers[recorded.pooled_buffer])
        self.native.answer(buffers[recorded.answer_buffer])

    def angles(self, rope: RopeSpec) -> int:
        if not rope.inv_freq:
            return NO_ROTATION
        key = (rope.inv_freq, rope.scale)
        if key not in self._angles:
            self._angles[key] = self.native.angles(np.array(rope.inv_freq, np.float64), rope.scale)
        return self._angles[key]


def record(model: Model, native: NativeProgram, kv: KvFormats) -> tuple[Value, Value | None]:
    """Adds the model's forward pass to the native program; returns its answer and the pooled hidden states. Raises
    ConfigError if a layer does not fit these KV formats."""
    recorded = program.record(model, capabilities(native))
    for node in recorded.nodes:
        if node.op in ("attend", "attend_mla"):
            kv.check(node.attributes["spec"])
    Emitter(native).emit(recorded)
    return recorded.answer, recorded.pooled


def capabilities(native: NativeProgram) -> Capabilities:
    def prepares(weight: Weight | ExpertWeights | MlaWeights) -> bool:
        return any(map(native.prepares, matrices_of(weight)))

    return Capabilities(
        fuses_gate=fuses_gate,
        prepares=prepares,
        in_place=frozenset(TAKES_OVER),
        scratch=lambda node: scratch(node, prepares),
        uniform=True,
    )


def fuses_gate(weight: Weight, act: str) -> bool:
    return act == "silu" and weight.gateable


def matrices_of(weight: Weight | ExpertWeights | MlaWeights) -> list[Weight]:
    if isinstance(weight, ExpertWeights):
        return list(weight.up)
    return [weight.k_b.weight if isinstance(weight, MlaWeights) else weight]


def scratch(node: OpNode, prepares: Callable[[Any], bool]) -> tuple[Buffer, ...]:
    """Returns the scratch buffers of a node: convolved inputs of a delta net or Mamba2, the inputs of a gated
    convolution, or the absorbed queries of MLA and their results."""
    if node.op == "attend_mla":
        spec, v_b = node.attributes["spec"], node.attributes["weights"].v_b
        latents = Buffer("T", spec.heads * spec.v_dim, prepared=prepares(v_b.weight))
        return Buffer("T", spec.q_width), latents
    needs = node.op in ("delta_net", "mamba2") or (node.op == "causal_conv" and node.attributes["spec"].gated)
    return (Buffer("T", node.attributes["spec"].width),) if needs else ()


def embed(emit: Emitter, out: int, *, table: Weight, partial: bool) -> None:
    emit.native.embed(table, out, partial)


def embed_positions(emit: Emitter, out: int, *, table: Weight) -> None:
    emit.native.embed_positions(table, out)


def add_norm(emit: Emitter, x: int, *others: int, gain: Floats, eps: float) -> None:
    residual, out, total = others if len(others) == 3 else (None, others[0], None)
    emit.native.add_norm(x, residual, gain, eps, out, total)


def add_layer_norm(emit: Emitter, x: int, *others: int, gain: Floats, bias: Floats, eps: float) -> None:
    residual, out, total = others if len(others) == 3 else (None, others[0], None)
    emit.native.add_layer_norm(x, residual, gain, bias, eps, out, total)


def linear(emit: Emitter, x: int, out: int, *, weight: Weight) -> None:
    emit.native.linear(x, weight, out)


def gated_linear(emit: Emitter, x: int, out: int, *, weight: Weight, act: str) -> None:
    assert act == "silu", "no kernel computes another gate together with its product"
    emit.native.linear(x, weight, out, gated=True)


def norm_qk(
    emit: Emitter, x: int, out: int, *, q_gain: Floats, k_gain: Floats, spec: AttentionSpec, eps: float
) -> None:
    if spec.qk_norm == "layer":
        return emit.native.layer_norm_heads(x, q_gain, k_gain, spec.head_dim, eps, out)
    parts = [(q_gain, spec.q_width), (k_gain, spec.kv_width)]
    if spec.v_norm:
        parts.append((np.ones(spec.head_dim, np.float32), spec.kv_width))
    emit.native.norm_runs(x, parts, eps, out)


def norm_runs(emit: Emitter, x: int, out: int, *, gain: Floats, eps: float) -> None:
    emit.native.norm_runs(x, [(gain, 0)], eps, out)  # 0: the whole row


def attend(emit: Emitter, qkv: int, out: int, *, layer: int, spec: AttentionSpec, vectors: Vectors) -> None:
    emit.native.attend(
        qkv, out, layer=layer, angles=emit.angles(spec.rope), numbers=numbers_of(spec), vectors=dict(vectors)
    )


def attend_mla(
    emit: Emitter, q: int, kv: int, *others: int, layer: int, weights: MlaWeights, spec: AttentionSpec, eps: float
) -> None:
    """Attends in the absorbed form, prompts too: a token's sums must not depend on how many there are in its step."""
    out, absorbed, latents = others[-3:]
    selected = others[0] if len(others) > 3 else None
    numbers = numbers_of(spec) | {"eps": eps}
    if spec.index and selected is not None:
        numbers["top_k"] = spec.index.top_k
    about: dict[str, Any] = {"angles": emit.angles(spec.rope), "numbers": numbers, "vectors": {"gain": weights.gain}}
    k_b, v_b = (cast(HeadWeights, each) for each in weights[1:])
    emit.native.per_head_linear(q, k_b.weight, k_b.heads, spec.head_dim - spec.v_dim, absorbed)
    emit.native.attend_mla(absorbed, kv, selected, latents, layer=layer, **about)
    emit.native.per_head_linear(latents, v_b.weight, v_b.heads, 0, out)


def select_positions(emit: Emitter, q: int, k: int, weights: int, out: int, *, layer: int, spec: AttentionSpec) -> None:
    index = spec.index
    assert index is not None
    emit.native.select_positions(
        *(q, k, weights, out),
        layer=layer,
        angles=emit.angles(index.rope),
        interleaved=index.rope.interleaved,
        **picked(index, "heads", "head_dim", "top_k"),
        numbers=numbers_of(spec),
    )


def numbers_of(spec: AttentionSpec) -> dict[str, float]:
    """Returns the named options of the native attention, which refuses unknown ones."""
    named = picked(spec, *SHAPES, "scale", "index_dim")
    return {**named, "interleaved": spec.rope.interleaved, **spec.options}


def picked(spec: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in names}


def act_and_mul(emit: Emitter, x: int, out: int, *, act: str) -> None:
    emit.native.act_and_mul(x, out, act)


def sparse_act_and_mul(emit: Emitter, x: int, out: int, *, act: str, cutoff: float) -> None:
    emit.native.sparse_act_and_mul(x, out, act, cutoff)


def gate_columns(emit: Emitter, x: int, y: int, out: int, *, first: int, act: str) -> None:
    emit.native.gate_columns(x, y, first, out, act)


def take_columns(emit: Emitter, x: int, out: int, *, first: int, gain: Floats | None) -> None:
    emit.native.take_columns(x, first, np.zeros(0, np.float32) if gain is None else gain, out)


def concat(emit: Emitter, x: int, y: int, out: int) -> None:
    emit.native.concat(x, y, out)


def match_rms(emit: Emitter, x: int, like: int, out: int) -> None:
    emit.native.match_rms(x, like, out)


def mix_streams(emit: Emitter, x: int, coefficients: int, out: int) -> None:
    emit.native.mix_streams(x, coefficients, out)


def correct_streams(emit: Emitter, x: int, new: int, coefficients: int, out: int, *, active: int) -> None:
    emit.native.correct_streams(x, new, coefficients, active, out)


def add_to_streams(emit: Emitter, x: int, y: int, out: int) -> None:
    emit.native.add_to_streams(x, y, out)


def activate(emit: Emitter, x: int, out: int, *, act: str) -> None:
    emit.native.activate(x, out, act)


def sigmoid_mul(emit: Emitter, x: int, gate: int, out: int) -> None:
    emit.native.sigmoid_mul(x, gate, out)


def add(emit: Emitter, x: int, y: int, out: int) -> None:
    emit.native.add(x, y, out)


def scale(emit: Emitter, x: int, out: int, *, factor: float) -> None:
    emit.native.scale(x, factor, out)


def soft_cap(emit: Emitter, x: int, out: int, *, cap: float) -> None:
    emit.native.soft_cap(x, cap, out)


def take_sampled(emit: Emitter, x: int, out: int) -> None:
    emit.native.take_sampled(x, out)


def store_hidden(emit: Emitter, x: int, *, number: int, ahead: int) -> None:
    emit.native.store_hidden(number, x, ahead)


def load_hidden(emit: Emitter, out: int, *, number: int) -> None:
    emit.native.load_hidden(number, out)


def moe(emit: Emitter, x: int, router_logits: int, out: int, *, experts: ExpertWeights, spec: ExpertSpec) -> None:
    emit.native.moe(
        x,
        router_logits,
        list(experts.up),
        list(experts.down),
        cast(Floats, experts.choice_bias),
        out,
        expert_scale=experts.scale,
        **picked(spec, "top_k", "act", "scoring", "renormalize", "scale", "groups", "top_k_groups", "group_score"),
        weigh_inputs=spec.weigh_inputs,
    )


def delta_net(
    emit: Emitter,
    qkv: int,
    z: int,
    beta: int,
    alpha: int,
    out: int,
    mixed: int,
    *,
    layer: int,
    weights: DeltaWeights,
    spec: DeltaSpec,
    eps: float,
) -> None:
    emit.native.delta_net(
        qkv,
        z,
        beta,
        alpha,
        mixed,
        out,
        layer=layer,
        **picked(spec, "k_heads", "v_heads", "k_dim", "v_dim", "conv_width", "tiled", "channel_decay", "gate"),
        conv=taps_of(weights.conv, spec.conv_width),
        **picked(weights, "decay", "dt_bias", "gain"),
        eps=eps,
    )


def causal_conv(
    emit: Emitter, x: int, out: int, product: int | None = None, *, layer: int, weights: ConvWeights, spec: ConvSpec
) -> None:
    emit.native.causal_conv(
        x,
        product,
        out,
        layer=layer,
        **picked(spec, "width", "conv_width"),
        conv=taps_of(weights.conv, spec.conv_width),
        bias=or_none(weights.bias),
    )


def selective_scan(
    emit: Emitter,
    x: int,
    dt: int,
    b: int,
    c: int,
    gate: int,
    out: int,
    *,
    layer: int,
    weights: ScanWeights,
    spec: ScanSpec,
) -> None:
    emit.native.selective_scan(
        x,
        dt,
        b,
        c,
        gate,
        out,
        layer=layer,
        **picked(spec, "width", "state_size"),
        **picked(weights, "decay", "skip"),
    )


def mamba2(
    emit: Emitter,
    zxbcdt: int,
    out: int,
    mixed: int,
    *,
    layer: int,
    weights: Mamba2Weights,
    spec: Mamba2Spec,
) -> None:
    emit.native.mamba2(
        zxbcdt,
        mixed,
        out,
        layer=layer,
        **picked(spec, "heads", "head_dim", "state_dim", "groups", "conv_width"),
        **picked(spec, "eps", "z_scale", "dt_scale", "dt_min", "dt_max"),
        norm_groups=spec.norm_groups or 1,
        conv=taps_of(weights.conv, spec.conv_width),
        conv_bias=or_none(weights.conv_bias),
        **picked(weights, "decay", "dt_bias", "skip"),
        gain=or_none(weights.gain),
    )


def taps_of(conv: Floats, conv_width: int) -> Floats:
    """Returns the factors of a convolution position by position: [width, conv_width] -> [conv_width, width]."""
    return np.ascontiguousarray(conv.reshape(-1, conv_width).T).reshape(-1)


def or_none(vector: Floats | None) -> Floats:
    return np.zeros(0, np.float32) if vector is None else vector


EMITTERS: dict[str, Callable[..., Any]] = {
    emitter.__name__: emitter
    for emitter in (
        *(embed, embed_positions, add_norm, add_layer_norm, norm_qk, norm_runs),
        *(sparse_act_and_mul, gate_columns, take_columns, concat),
        *(match_rms, mix_streams, correct_streams, add_to_streams),
        *(linear, gated_linear, attend, attend_mla, select_positions),
        *(act_and_mul, activate, sigmoid_mul, add, scale, soft_cap, take_sampled, moe, delta_net, mamba2),
        *(causal_conv, selective_scan, store_hidden, load_hidden),
    )
}

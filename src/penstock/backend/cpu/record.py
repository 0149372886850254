"""Turns a recorded program (model/program.py) into a native one: a table maps each op to the native call for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from penstock.backend.base import Floats, Model
from penstock.backend.cpu._native import Program as NativeProgram
from penstock.backend.cpu._native import Weight
from penstock.backend.cpu.weights import HeadWeights
from penstock.errors import UnsupportedModel
from penstock.model import program
from penstock.model.ops import DeltaWeights, ExpertWeights, Vectors
from penstock.model.program import TAKES_OVER, Buffer, Capabilities, OpNode, Value
from penstock.model.recurrence import DeltaSpec
from penstock.model.spec import SHAPES, AttentionSpec, ExpertSpec, RopeSpec

NO_ROTATION = -1
MLA_TILE = 16  # dimensions that the native MLA takes together


class Emitter:
    """Adds ops to a native program, and holds what they share: the angles by which RoPE rotates each position."""

    def __init__(self, native: NativeProgram) -> None:
        self.native = native
        self._angles: dict[tuple[tuple[float, ...], float], int] = {}

    def emit(self, recorded: program.Program) -> None:
        """Adds all nodes, and names the buffers that are read after a step."""
        for node in recorded.nodes:
            if node.op in ("attend", "attend_mla"):
                self.angles(node.attributes["spec"].rope)  # computed once, before all layers
        buffers = [self.native.buffer(symbol, width, prepared) for symbol, width, _, prepared in recorded.buffers]
        for node, places in zip(recorded.nodes, recorded.places, strict=True):
            EMITTERS[node.op](self, *(buffers[place] for place in places), **node.attributes)
        if recorded.pooled_buffer is not None:
            self.native.keep(buffers[recorded.pooled_buffer])
        self.native.answer(buffers[recorded.answer_buffer])

    def angles(self, rope: RopeSpec) -> int:
        """Returns the buffer of a rotation's cosines and sines."""
        if not rope.inv_freq:
            return NO_ROTATION
        key = (rope.inv_freq, rope.scale)
        if key not in self._angles:
            self._angles[key] = self.native.angles(np.array(rope.inv_freq, np.float64), rope.scale)
        return self._angles[key]


def record(model: Model, native: NativeProgram) -> tuple[Value, Value | None]:
    """Adds the model's forward pass to the native program; returns its answer and what embeddings are pooled from."""
    recorded = program.record(model, capabilities(native))
    Emitter(native).emit(recorded)
    return recorded.answer, recorded.pooled


def capabilities(native: NativeProgram) -> Capabilities:
    """Returns what the native kernels can do."""
    return Capabilities(
        fuses_gate=fuses_gate,
        prepares=lambda weight: any(map(native.prepares, matrices_of(weight))),
        in_place=frozenset(TAKES_OVER),
        scratch=scratch,
        uniform=True,
    )


def fuses_gate(weight: Weight, act: str) -> bool:
    """Returns whether one kernel computes a product with this weight and the gate after it."""
    return act == "silu" and weight.gateable


def matrices_of(weight: Weight | ExpertWeights | HeadWeights) -> list[Weight]:
    """Returns the matrices that rows are multiplied by first."""
    if isinstance(weight, ExpertWeights):
        return list(weight.up)
    return [weight.weight if isinstance(weight, HeadWeights) else weight]


def scratch(node: OpNode) -> tuple[Buffer, ...]:
    """Returns the buffers that a node needs while it runs: a delta net's convolved q, k and v."""
    return (Buffer("T", node.attributes["spec"].width),) if node.op == "delta_net" else ()


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


def per_head_linear(emit: Emitter, x: int, out: int, *, weight: HeadWeights, passthrough: int) -> None:
    emit.native.per_head_linear(x, weight.weight, weight.heads, passthrough, out)


def norm_qk(
    emit: Emitter, x: int, out: int, *, q_gain: Floats, k_gain: Floats, spec: AttentionSpec, eps: float
) -> None:
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
    emit: Emitter, q: int, kv: int, out: int, *, layer: int, gain: Floats, spec: AttentionSpec, eps: float
) -> None:
    if spec.head_dim % MLA_TILE or spec.v_dim % MLA_TILE:
        raise UnsupportedModel(
            f"MLA on a CPU takes sizes in multiples of {MLA_TILE}; this model has kv_lora_rank = {spec.v_dim} and "
            f"qk_rope_head_dim = {spec.head_dim - spec.v_dim}: use --device cuda, or --device ref for a test"
        )
    numbers = numbers_of(spec) | {"eps": eps}
    emit.native.attend_mla(
        q, kv, out, layer=layer, angles=emit.angles(spec.rope), numbers=numbers, vectors={"gain": gain}
    )


def numbers_of(spec: AttentionSpec) -> dict[str, float]:
    """Returns what the native attention is told by name. It refuses what it does not know."""
    return {**picked(spec, *SHAPES, "scale"), "interleaved": spec.rope.interleaved, **spec.options}


def picked(spec: Any, *names: str) -> dict[str, Any]:
    """Returns these attributes by name."""
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
    )


def delta_net(
    emit: Emitter,
    qkvz: int,
    ba: int,
    out: int,
    mixed: int,
    *,
    layer: int,
    weights: DeltaWeights,
    spec: DeltaSpec,
    eps: float,
) -> None:
    emit.native.delta_net(
        qkvz,
        ba,
        mixed,
        out,
        layer=layer,
        **picked(spec, "k_heads", "v_heads", "k_dim", "v_dim", "conv_width", "tiled"),
        conv=np.ascontiguousarray(weights.conv.reshape(spec.width, spec.conv_width).T).reshape(-1),
        **picked(weights, "decay", "dt_bias", "gain"),
        eps=eps,
    )


EMITTERS: dict[str, Callable[..., Any]] = {
    emitter.__name__: emitter
    for emitter in (
        *(embed, embed_positions, add_norm, add_layer_norm, norm_qk, norm_runs),
        *(sparse_act_and_mul, gate_columns, take_columns, concat),
        *(match_rms, mix_streams, correct_streams, add_to_streams),
        *(linear, gated_linear, per_head_linear, attend, attend_mla),
        *(act_and_mul, activate, sigmoid_mul, add, scale, soft_cap, take_sampled, moe, delta_net),
    )
}

"""Records a model's forward pass and turns it into a native program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from penstock.backend.base import Floats, Model
from penstock.backend.cpu._native import Program, Weight
from penstock.backend.cpu.weights import Bank, Heads
from penstock.model.ops import DeltaWeights
from penstock.model.spec import AttentionSpec, DeltaSpec, ExpertSpec, RopeSpec

NOTHING_TURNS = -1


@dataclass(frozen=True, slots=True)
class Value:
    """What an op returns while recording: rows of T or S, each `width` wide."""

    id: int
    symbol: str
    width: int


@dataclass(frozen=True, slots=True)
class Node:
    """One op: `emit` adds it to a program, given the buffers of its inputs and outputs."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    emit: Callable[..., None]
    in_place: bool = False  # the last output may take the last input's buffer
    emit_gated: Callable[..., None] | None = None  # adds it together with a gate that follows
    gates: bool = False  # by silu: others are not computed together with their product


@dataclass(slots=True)
class Recorder:
    """The ops (model/ops.py) of a program that is yet to be laid out."""

    program: Program
    nodes: list[Node] = field(default_factory=list)
    prepared: set[int] = field(default_factory=set)  # values that a weight takes in another form than floats
    states: Value | None = None  # what embeddings are pooled from
    _values: int = 0
    _angles: dict[tuple[tuple[float, ...], float], int] = field(default_factory=dict)

    def embed(self, table: Weight) -> Value:
        out = self._value("T", table.width)
        self._add((), (out,), lambda out: self.program.embed(table, out))
        return out

    def add_norm(self, x: Value, residual: Value | None, gain: Floats, eps: float) -> tuple[Value, Value]:
        out = self._value(x.symbol, x.width)
        if residual is None:
            self._add((x,), (out,), lambda x, out: self.program.add_norm(x, None, gain, eps, out, None))
            return out, x
        total = self._value(x.symbol, x.width)
        self._add(
            (x, residual),
            (out, total),
            lambda x, residual, out, total: self.program.add_norm(x, residual, gain, eps, out, total),
            in_place=True,
        )
        return out, total

    def linear(self, x: Value, weight: Weight) -> Value:
        out = self._value(x.symbol, weight.rows)
        if self.program.prepares(weight):
            self.prepared.add(x.id)

        def emit(x: int, out: int, gated: bool = False) -> None:
            self.program.linear(x, weight, out, gated)

        emit_gated = partial(emit, gated=True) if weight.gateable else None
        self.nodes.append(Node((x,), (out,), emit, emit_gated=emit_gated))
        return out

    def norm_qk(self, qkv: Value, q_gain: Floats, k_gain: Floats, spec: AttentionSpec, eps: float) -> Value:
        def emit(x: int, out: int) -> None:
            self.program.norm_qk(x, q_gain, spec.q_width, k_gain, spec.kv_width, eps, out)

        return self._in_place((qkv,), emit)

    def attend(self, layer: int, qkv: Value, spec: AttentionSpec, sinks: Floats | None = None) -> Value:
        out = self._value("T", spec.q_width)
        angles = self._angles_of(spec.rope)

        def emit(qkv: int, out: int) -> None:
            self.program.attend(
                qkv,
                out,
                layer=layer,
                heads=spec.heads,
                kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
                window=spec.window,
                angles=angles,
                interleaved=spec.rope.interleaved,
                scale=spec.scale,
                soft_cap=spec.soft_cap,
                causal=spec.causal,
                sinks=sinks,
            )

        self._add((qkv,), (out,), emit)
        return out

    def gated(self, x: Value, act: str) -> Value:
        out = self._value(x.symbol, x.width // 2)
        self.nodes.append(Node((x,), (out,), partial(self.program.gate, act=act), gates=act == "silu"))
        return out

    def add(self, x: Value, y: Value) -> Value:
        return self._in_place((x, y), self.program.add)

    def scale(self, x: Value, factor: float) -> Value:
        return self._in_place((x,), lambda x, out: self.program.scale(x, factor, out))

    def soft_cap(self, x: Value, cap: float) -> Value:
        return self._in_place((x,), lambda x, out: self.program.soft_cap(x, cap, out))

    def take_sampled(self, x: Value) -> Value:
        out = self._value("S", x.width)
        self._add((x,), (out,), lambda x, out: self.program.take_sampled(x, out))
        return out

    def pool(self, x: Value) -> None:
        self.states = x

    def add_layer_norm(
        self, x: Value, residual: Value | None, gain: Floats, bias: Floats, eps: float
    ) -> tuple[Value, Value]:
        out, norm = self._value(x.symbol, x.width), self.program.add_layer_norm
        if residual is None:
            self._add((x,), (out,), lambda x, out: norm(x, None, gain, bias, eps, out, None))
            return out, x
        total = self._value(x.symbol, x.width)
        self._add(
            (x, residual),
            (out, total),
            lambda x, residual, out, total: norm(x, residual, gain, bias, eps, out, total),
            in_place=True,
        )
        return out, total

    def activate(self, x: Value, act: str) -> Value:
        return self._in_place((x,), partial(self.program.activate, act=act))

    def embed_positions(self, table: Weight) -> Value:
        out = self._value("T", table.width)
        self._add((), (out,), lambda out: self.program.embed_positions(table, out))
        return out

    def gate_by(self, x: Value, gate: Value) -> Value:
        out = self._value(x.symbol, x.width)
        self._add((gate, x), (out,), lambda gate, x, out: self.program.gate_by(x, gate, out), in_place=True)
        return out

    def delta_net(
        self, layer: int, qkvz: Value, ba: Value, weights: DeltaWeights, spec: DeltaSpec, eps: float
    ) -> Value:
        mixed, out = self._value("T", spec.width), self._value("T", spec.v_width)
        conv = np.ascontiguousarray(weights.conv.reshape(spec.width, spec.taps).T).reshape(-1)

        def emit(qkvz: int, ba: int, mixed: int, out: int) -> None:
            self.program.delta_net(
                qkvz,
                ba,
                mixed,
                out,
                layer=layer,
                k_heads=spec.k_heads,
                v_heads=spec.v_heads,
                k_dim=spec.k_dim,
                v_dim=spec.v_dim,
                taps=spec.taps,
                tiled=spec.tiled,
                conv=conv,
                decay=weights.decay,
                dt=weights.dt,
                gain=weights.gain,
                eps=eps,
            )

        self._add((qkvz, ba), (mixed, out), emit)
        return out

    def experts(self, x: Value, scores: Value, bank: Bank, spec: ExpertSpec) -> Value:
        out = self._value("T", x.width)
        if any(map(self.program.prepares, bank.up)):
            self.prepared.add(x.id)

        def emit(x: int, scores: int, out: int) -> None:
            self.program.experts(
                x,
                scores,
                *bank,
                out,
                chosen=spec.chosen,
                act=spec.act,
                scoring=spec.scoring,
                renormalize=spec.renormalize,
                scale=spec.scale,
                groups=spec.groups,
                chosen_groups=spec.chosen_groups,
                group_score=spec.group_score,
            )

        self._add((x, scores), (out,), emit)
        return out

    def linear_heads(self, x: Value, weight: Heads, kept: int = 0) -> Value:
        matrices, count = weight
        out = self._value(x.symbol, matrices.rows + count * kept)
        if self.program.prepares(matrices):
            self.prepared.add(x.id)
        self._add((x,), (out,), lambda x, out: self.program.linear_heads(x, matrices, count, kept, out))
        return out

    def attend_latent(self, layer: int, q: Value, kv: Value, gain: Floats, spec: AttentionSpec, eps: float) -> Value:
        out = self._value("T", spec.heads * spec.v_dim)
        angles = self._angles_of(spec.rope)

        def emit(q: int, kv: int, out: int) -> None:
            self.program.attend_latent(
                q,
                kv,
                out,
                layer=layer,
                heads=spec.heads,
                head_dim=spec.head_dim,
                v_dim=spec.v_dim,
                gain=gain,
                eps=eps,
                angles=angles,
                interleaved=spec.rope.interleaved,
                scale=spec.scale,
            )

        self._add((q, kv), (out,), emit)
        return out

    def _value(self, symbol: str, width: int) -> Value:
        self._values += 1
        return Value(self._values, symbol, width)

    def _add(
        self, inputs: tuple[Value, ...], outputs: tuple[Value, ...], emit: Callable[..., None], in_place: bool = False
    ) -> None:
        self.nodes.append(Node(inputs, outputs, emit, in_place))

    def _in_place(self, inputs: tuple[Value, ...], emit: Callable[..., None]) -> Value:
        out = self._value(inputs[-1].symbol, inputs[-1].width)
        self._add(inputs, (out,), emit, in_place=True)
        return out

    def _angles_of(self, rope: RopeSpec) -> int:
        if not rope.inv_freq:
            return NOTHING_TURNS
        key = (rope.inv_freq, rope.scale)
        if key not in self._angles:
            self._angles[key] = self.program.angles(np.array(rope.inv_freq, np.float64), rope.scale)
        return self._angles[key]


class Layout:
    """Gives values buffers; a buffer is free again when nothing will read its value any more."""

    def __init__(self, recorder: Recorder, answer: Value) -> None:
        self._program = recorder.program
        self._prepared = recorder.prepared
        self._last_use = {value.id: i for i, node in enumerate(recorder.nodes) for value in node.inputs}
        for value in (answer, recorder.states):
            if value is not None:
                self._last_use[value.id] = len(recorder.nodes)
        self._buffers: dict[int, int] = {}  # value id -> buffer
        self._free: dict[tuple[str, int, bool], list[int]] = {}

    def emit(self, index: int, node: Node) -> None:
        inputs = [self._buffers[value.id] for value in node.inputs]
        if node.in_place:
            self._take_over(index, node.inputs[-1], node.outputs[-1])
        for value in node.outputs:
            if value.id not in self._buffers:
                self._buffers[value.id] = self._take(value)
        node.emit(*inputs, *(self._buffers[value.id] for value in node.outputs))
        for value in {*node.inputs, *node.outputs}:
            if value.id in self._buffers and self._last_use.get(value.id, index) <= index:
                self._release(value)

    def buffer_of(self, value: Value) -> int:
        return self._buffers[value.id]

    def _take_over(self, index: int, old: Value, new: Value) -> None:
        if self._last_use[old.id] == index and self._kind(old) == self._kind(new):
            self._buffers[new.id] = self._buffers.pop(old.id)

    def _take(self, value: Value) -> int:
        free = self._free.get(self._kind(value))
        return free.pop() if free else self._program.buffer(*self._kind(value))

    def _release(self, value: Value) -> None:
        self._free.setdefault(self._kind(value), []).append(self._buffers.pop(value.id))

    def _kind(self, value: Value) -> tuple[str, int, bool]:
        return value.symbol, value.width, value.id in self._prepared


def gate_products(nodes: list[Node], answer: Value) -> list[Node]:
    """A product that only the gate after it reads is gated at once, and is never written."""
    readers = Counter([answer.id, *(value.id for node in nodes for value in node.inputs)])
    kept: list[Node] = []
    for node in nodes:
        before = kept[-1] if kept else node
        if node.gates and before.emit_gated and before.outputs == node.inputs and readers[node.inputs[0].id] == 1:
            kept[-1] = Node(before.inputs, node.outputs, before.emit_gated)
        else:
            kept.append(node)
    return kept


def record(model: Model, program: Program) -> tuple[Value, Value | None]:
    """Adds the model's forward pass to the program; returns what it answers and what embeddings are pooled from."""
    recorder = Recorder(program)
    answer: Value = model.forward(recorder)
    recorder.nodes = gate_products(recorder.nodes, answer)
    layout = Layout(recorder, answer)
    for index, node in enumerate(recorder.nodes):
        layout.emit(index, node)
    if recorder.states is not None:
        program.keep(layout.buffer_of(recorder.states))
    program.answer(layout.buffer_of(answer))
    return answer, recorder.states

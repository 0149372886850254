"""Records a model's forward pass (model/ops.py) as a list of launches over buffers that are made once.

Nothing is allocated in a step, so the same launches can be run at once or captured in a graph, and steps of every size
share the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from penstock.backend.base import Model
from penstock.backend.cuda.experts import Bank, Mixture
from penstock.backend.cuda.inputs import SPARE_PARTS, Fields
from penstock.backend.cuda.kernels.decode_attention import SplitKV
from penstock.backend.cuda.kernels.delta_rule import sigmoid_mul
from penstock.backend.cuda.kernels.expert_routing import ExpertPermutation
from penstock.backend.cuda.kernels.gather_rows import gather_rows, resolve_tokens
from penstock.backend.cuda.kernels.norm_qk import norm_qk
from penstock.backend.cuda.nodes import (
    AddLayerNorm,
    AddNorm,
    Attend,
    AttendLatent,
    Delta,
    Gate,
    Memory,
    Node,
    Product,
    Value,
    fuse,
)
from penstock.backend.cuda.recurrent_states import RecurrentStates
from penstock.backend.cuda.weights import Weight
from penstock.errors import UnsupportedModel
from penstock.model.ops import DeltaWeights
from penstock.model.spec import AttentionSpec, DeltaSpec, ExpertSpec

GATES = ("silu", "gelu_tanh")
ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "silu": torch.ops.aten.silu.out,
    "gelu": torch.ops.aten.gelu.out,
    "gelu_tanh": partial(torch.ops.aten.gelu.out, approximate="tanh"),
    "relu": partial(torch.ops.aten.clamp_min.out, min=0),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The largest step."""

    tokens: int
    rows: int  # sequences, and positions sampled at once


@dataclass(slots=True)
class Recorder:
    memory: Memory
    device: torch.device
    nodes: list[Node] = field(default_factory=list)
    layers: dict[int, AttentionSpec] = field(default_factory=dict)
    states: Value | None = None  # what embeddings are pooled from
    recurrent: dict[int, DeltaSpec] = field(default_factory=dict)
    _values: int = 0
    _frequencies: dict[tuple[float, ...], Any] = field(default_factory=dict)
    _permutations: dict[tuple[int, int], ExpertPermutation] = field(
        default_factory=dict
    )  # by experts, and how many are chosen

    def embed(self, table: Weight) -> Value:
        def run(step: Fields, out: Any) -> None:
            tokens = self.memory.tokens[: len(out)]
            resolve_tokens(step.tokens, step.token_slots, self.memory.last, tokens)
            table.gather(tokens, out)

        return self._add(run, (), self._value("T", table.width))

    def add_norm(self, x: Value, residual: Value | None, gain: Any, eps: float) -> tuple[Value, Value]:
        return self._norm(AddNorm(gain, eps), x, residual)

    def linear(self, x: Value, weight: Weight) -> Value:
        return self._add(Product(weight), (x,), self._value(x.symbol, weight.rows, wide=x.symbol == "S"))

    def norm_qk(self, qkv: Value, q_gain: Any, k_gain: Any, spec: AttentionSpec, eps: float) -> Value:
        def run(step: Fields, x: Any, out: Any) -> None:
            norm_qk(x, q_gain, k_gain, spec.q_width, spec.kv_width, eps, out)

        return self._add(run, (qkv,), self._value(qkv.symbol, qkv.width))

    def attend(self, layer: int, qkv: Value, spec: AttentionSpec, sinks: Any | None = None) -> Value:
        self.layers[layer] = spec
        op = Attend(layer, spec, self._on_device(spec.rope.inv_freq), self.memory, sinks)
        return self._add(op, (qkv,), self._value("T", spec.q_width))

    def gated(self, x: Value, act: str) -> Value:
        check_activation(act, GATES)
        return self._add(Gate(act), (x,), self._value(x.symbol, x.width // 2))

    def add(self, x: Value, y: Value) -> Value:
        return self._add(lambda step, x, y, out: torch.add(x, y, out=out), (x, y), self._like(x))

    def scale(self, x: Value, factor: float) -> Value:
        return self._add(lambda step, x, out: torch.mul(x, factor, out=out), (x,), self._like(x))

    def soft_cap(self, x: Value, cap: float) -> Value:
        return self._add(lambda step, x, out: torch.div(x, cap, out=out).tanh_().mul_(cap), (x,), self._like(x))

    def take_sampled(self, x: Value) -> Value:
        return self._add(
            lambda step, x, out: gather_rows(x, step.sampled, out), (x,), self._value("S", x.width, wide=x.wide)
        )

    def pool(self, x: Value) -> None:
        self.states = x

    def add_layer_norm(self, x: Value, residual: Value | None, gain: Any, bias: Any, eps: float) -> tuple[Value, Value]:
        return self._norm(AddLayerNorm(gain, bias, eps), x, residual)

    def activate(self, x: Value, act: str) -> Value:
        check_activation(act, ACTIVATIONS)
        compute = ACTIVATIONS[act]
        return self._add(lambda step, x, out: compute(x, out=out), (x,), self._like(x))

    def embed_positions(self, table: Weight) -> Value:
        return self._add(lambda step, out: table.gather(step.positions, out), (), self._value("T", table.width))

    def _norm(self, op: Callable[..., None], x: Value, residual: Value | None) -> tuple[Value, Value]:
        out = self._value(x.symbol, x.width)
        if residual is None:
            return self._add(op, (x,), out), x
        total = self._value(x.symbol, x.width)
        self.nodes.append(Node(op, (x, residual), (out, total)))
        return out, total

    def experts(self, x: Value, scores: Value, bank: Bank, spec: ExpertSpec) -> Value:
        out = self._value("T", x.width)
        choice = [self._value("T", spec.chosen, wide=True) for _ in range(2)]
        pairs = [self._value("T", spec.chosen * width) for width in (2 * spec.hidden, spec.hidden, x.width)]
        inputs = x, self._widened(scores)
        self.nodes.append(Node(Mixture(bank, spec, self._permutation_for(spec)), inputs, (out, *choice, *pairs)))
        return out

    def _widened(self, value: Value) -> Value:
        """What was recorded last comes out as float32: experts whose scores are close must not change places."""
        wide = value._replace(wide=True)
        node = self.nodes[-1]
        if node.outputs != (value,) or not isinstance(node.op, Product):
            return value
        self.nodes[-1] = replace(node, outputs=(wide,))
        return wide

    def _permutation_for(self, spec: ExpertSpec) -> ExpertPermutation:
        key = spec.count, spec.chosen
        if key not in self._permutations:
            self._permutations[key] = ExpertPermutation.on(self.device, spec, len(self.memory.tokens))
        return self._permutations[key]

    def linear_heads(self, x: Value, weight: Any, kept: int = 0) -> Value:
        heads, rows, width = weight.shape

        def run(step: Fields, x: Any, out: Any) -> None:
            each, to = x.view(len(x), heads, width + kept), out.view(len(out), heads, kept + rows)
            torch.bmm(each[..., :width].transpose(0, 1), weight.mT, out=to[..., kept:].transpose(0, 1))
            if kept:
                to[..., :kept].copy_(each[..., width:])

        return self._add(run, (x,), self._value(x.symbol, heads * (kept + rows)))

    def attend_latent(self, layer: int, q: Value, kv: Value, gain: Any, spec: AttentionSpec, eps: float) -> Value:
        self.layers[layer] = spec
        op = AttendLatent(layer, spec, self._on_device(spec.rope.inv_freq), self.memory, gain, eps)
        return self._add(op, (q, kv), self._value("T", spec.heads * spec.v_dim))

    def gate_by(self, x: Value, gate: Value) -> Value:
        return self._add(lambda step, x, gate, out: sigmoid_mul(x, gate, out), (x, gate), self._like(x))

    def delta_net(
        self, layer: int, qkvz: Value, ba: Value, weights: DeltaWeights, spec: DeltaSpec, eps: float
    ) -> Value:
        self.recurrent[layer] = spec
        out = self._value("T", spec.v_width)
        scratch = (self._value("T", width, wide=True) for width in (spec.width, spec.v_width))
        self.nodes.append(Node(Delta(layer, spec, weights, eps, self.memory), (qkvz, ba), (out, *scratch)))
        return out

    def _value(self, symbol: str, width: int, wide: bool = False) -> Value:
        self._values += 1
        return Value(self._values, symbol, width, wide)

    def _like(self, x: Value) -> Value:
        return self._value(x.symbol, x.width, x.wide)

    def _add(self, op: Callable[..., None], inputs: tuple[Value, ...], out: Value) -> Value:
        self.nodes.append(Node(op, inputs, (out,)))
        return out

    def _on_device(self, frequencies: tuple[float, ...]) -> Any:
        if frequencies not in self._frequencies:
            numbers = frequencies or (0.0,)  # kernels are given an address even where nothing is turned
            self._frequencies[frequencies] = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        return self._frequencies[frequencies]


def check_activation(act: str, computed: Collection[str]) -> None:
    if act not in computed:
        raise UnsupportedModel(f"the activation {act!r} is not computed here; those that are: {', '.join(computed)}")


Kind = tuple[str, int, bool]


class Program:
    """The recorded launches with a buffer for each value; a buffer is free again when nothing will read its value."""

    def __init__(self, model: Model, memory: Memory, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        recorder = Recorder(memory, device)
        self.answer: Value = model.forward(recorder)
        self.layers = recorder.layers
        memory.states = RecurrentStates(recorder.recurrent, sizes.rows, sizes.tokens, device)
        self._states = recorder.states
        self._nodes: list[tuple[Node, list[int]]] = []
        self._kinds: list[Kind] = []
        self._assign(fuse(recorder.nodes, self.answer))
        self._buffers = [
            torch.zeros(
                (sizes.tokens if symbol == "T" else sizes.rows, width),
                dtype=torch.float32 if wide else dtype,
                device=device,
            )
            for symbol, width, wide in self._kinds
        ]
        heads = [(spec.heads, spec.head_dim) for spec in self.layers.values()]
        parts = sizes.rows + SPARE_PARTS
        most_heads = max([h for h, _ in heads], default=1)
        memory.split_kv = SplitKV(
            torch.empty(parts * max([h * d for h, d in heads], default=1), device=device),
            torch.empty(parts * most_heads * 2, device=device),
            torch.zeros(sizes.rows * most_heads, dtype=torch.int32, device=device),
        )

    def run_tokens(self, step: Fields) -> None:
        """Everything up to the rows whose logits are wanted."""
        self._run(self._nodes[: self._sampling], step, len(step.tokens), 0)

    def run_sampled(self, step: Fields, count: int) -> Any:
        """The rest, for the `count` positions that step.sampled names; returns the answer, [S, *]."""
        self._run(self._nodes[self._sampling :], step, len(step.tokens), count)
        return self.answer_of(count)

    def answer_of(self, count: int) -> Any:
        """What the last run answered: [S, *]."""
        return self._buffers[self._place][:count]

    def states_of(self, count: int) -> Any:
        """What embeddings are pooled from, as the last run has left it: [T, dim]."""
        return self._buffers[self._states_place][:count]

    def _run(self, nodes: list[tuple[Node, list[int]]], step: Fields, tokens: int, count: int) -> None:
        rows = {"T": tokens, "S": count}
        views = [buffer[: rows[kind[0]]] for buffer, kind in zip(self._buffers, self._kinds, strict=True)]
        for node, places in nodes:
            node.op(step, *[views[place] for place in places])

    def _assign(self, nodes: list[Node]) -> None:
        last_use = {value.id: i for i, node in enumerate(nodes) for value in node.inputs}
        last_use[self.answer.id] = len(nodes)
        if self._states is not None:
            last_use[self._states.id] = len(nodes)
        places: dict[int, int] = {}
        free: dict[Kind, list[int]] = {}
        for index, node in enumerate(nodes):
            for value in node.outputs:
                places[value.id] = self._take(kind_of(value), free)
            self._nodes.append((node, [places[value.id] for value in (*node.inputs, *node.outputs)]))
            for value in {*node.inputs, *node.outputs}:
                if last_use.get(value.id, index) <= index:
                    free.setdefault(kind_of(value), []).append(places.pop(value.id))
        self._sampling = next((i for i, node in enumerate(nodes) if node.outputs[0].symbol == "S"), len(nodes))
        self._place = places[self.answer.id]
        self._states_place = places[self._states.id] if self._states is not None else -1

    def _take(self, kind: Kind, free: dict[Kind, list[int]]) -> int:
        if free.get(kind):
            return free[kind].pop()
        self._kinds.append(kind)
        return len(self._kinds) - 1


def kind_of(value: Value) -> Kind:
    return value.symbol, value.width, value.wide

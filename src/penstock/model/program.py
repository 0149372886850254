"""Records a model's forward pass once, for every backend that runs recorded programs.

A `Recorder` implements the ops of model/ops.py: each call becomes a node. `record` then decides, once for all backends,
which nodes are fused, which rows are prepared for a product, and which buffer holds each value. A backend describes its
launchers (`Capabilities`) and maps op names to functions that launch them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from penstock.model.ops import (
    ConvWeights,
    DeltaInputs,
    DeltaWeights,
    ExpertWeights,
    Mamba2Weights,
    MlaWeights,
    Ops,
    Precision,
    ScanWeights,
    V,
    Vectors,
    Weight,
)
from penstock.model.recurrence import ConvSpec, DeltaSpec, Mamba2Spec, RecurrentSpec, ScanSpec
from penstock.model.spec import AttentionSpec, ExpertSpec

# Ops that multiply the rows of their first input by a weight, and the attribute that holds the weight.
PRODUCTS = {"linear": "weight", "gated_linear": "weight", "attend_mla": "weights", "moe": "experts"}

RECURRENT = ("delta_net", "mamba2", "causal_conv", "selective_scan")  # ops with a state per sequence

# Ops whose launcher may write an output over an input: (output index, input index).
TAKES_OVER = {
    "add_norm": (1, 1),  # the sum replaces the residual
    "add_layer_norm": (1, 1),
    "norm_qk": (0, 0),
    "norm_runs": (0, 0),
    "add": (0, 1),
    "add_to_streams": (0, 0),
    "scale": (0, 0),
    "soft_cap": (0, 0),
    "activate": (0, 0),
    "sigmoid_mul": (0, 0),
}


class Forward(Protocol):
    def forward(self, ops: Ops[V]) -> V:
        """Computes the step's logits, [S, vocab], with the given ops."""


@dataclass(frozen=True, slots=True)
class Value:
    """Stands for an op's result: rows for each token (T) or each sampled position (S)."""

    id: int
    symbol: str  # T or S
    width: int
    precision: Precision = "activation"


@dataclass(frozen=True, slots=True)
class OpNode:
    """Represents one op. Attributes are specs, weights and numbers, named after the op's parameters."""

    op: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attributes: Mapping[str, Any]

    @property
    def weight(self) -> Weight | None:
        """Returns a product's weight; None for other ops."""
        return self.attributes[PRODUCTS[self.op]] if self.op in PRODUCTS else None

    def having(self, **attributes: Any) -> OpNode:
        return replace(self, attributes={**self.attributes, **attributes})


class Buffer(NamedTuple):
    """Describes memory for one value at a time. Values with equal descriptions can share a buffer."""

    symbol: str  # T, S or, for scratch, N: rows for each token of the largest step
    width: int
    precision: Precision = "activation"
    prepared: bool = False  # rows are stored in a product's preferred form


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Describes which ops and fusions a backend's launchers support."""

    fuses_gate: Callable[[Weight, str], bool]  # True if one launch can compute the product and act_and_mul
    prepares: Callable[[Weight], bool] = lambda weight: False  # True if products with this weight read prepared rows
    produces_prepared: frozenset[str] = frozenset()  # ops that can write rows in their only consumer's preferred form
    in_place: frozenset[str] = frozenset()  # the ops of TAKES_OVER that may compute in place
    scratch: Callable[[OpNode], Sequence[Buffer]] = lambda node: ()  # temporary buffers of an op
    uniform: bool = False  # activations are always float32, so precision does not affect buffers


def _line(node: OpNode, places: tuple[int, ...]) -> str:
    names = [f"b{place}" for place in places]
    taken, rest = names[: len(node.inputs)], names[len(node.inputs) :]
    given, scratch = rest[: len(node.outputs)], rest[len(node.outputs) :]
    plain = (f"{name}={value!r}" for name, value in node.attributes.items() if isinstance(value, int | float | str))
    call = f"{node.op}({', '.join(taken)} -> {', '.join(given)})" + f" scratch {', '.join(scratch)}" * bool(scratch)
    return " ".join([call, *plain])


@dataclass(frozen=True, slots=True)
class Program:
    """Holds a recorded forward pass: nodes in execution order, and their buffers."""

    nodes: tuple[OpNode, ...]
    buffers: tuple[Buffer, ...]
    places: tuple[tuple[int, ...], ...]  # per node: buffers of its inputs, outputs and scratch, in this order
    answer: Value  # the forward pass's result
    answer_buffer: int
    pooled: Value | None  # the source of pooled embeddings
    pooled_buffer: int | None

    def __str__(self) -> str:
        """Returns a line for each buffer and each node: `product(b1 -> b2) act='silu'`. Fused ops are single nodes."""
        buffers = [
            f"b{index}: [{buffer.symbol}, {buffer.width}] {buffer.precision}{' prepared' * buffer.prepared}"
            for index, buffer in enumerate(self.buffers)
        ]
        return "\n".join([*buffers, *map(_line, self.nodes, self.places), f"answer: b{self.answer_buffer}"])

    @property
    def attention_layers(self) -> dict[int, AttentionSpec]:
        attending = [node.attributes for node in self.nodes if node.op in ("attend", "attend_mla")]
        return {each["layer"]: each["spec"] for each in attending if not each["spec"].shares_kv}

    @property
    def recurrent_layers(self) -> dict[int, RecurrentSpec]:
        return {n.attributes["layer"]: n.attributes["spec"] for n in self.nodes if n.op in RECURRENT}

    @property
    def hidden_widths(self) -> dict[int, int]:
        rows = [((*n.inputs, *n.outputs)[0], n) for n in self.nodes if n.op in ("store_hidden", "load_hidden")]
        return {node.attributes["number"]: value.width for value, node in rows}

    @property
    def first_sampled(self) -> int:
        """Returns the index of the first node that computes sampled rows; all earlier nodes compute tokens."""
        values = [(*node.outputs, *node.inputs)[0] for node in self.nodes]
        return next((i for i, value in enumerate(values) if value.symbol == "S"), len(self.nodes))


@dataclass(slots=True)
class Recorder:
    """Implements the ops of model/ops.py: each call appends a node and returns its output value."""

    nodes: list[OpNode] = field(default_factory=list)
    pooled: Value | None = None
    _values: int = 0

    def embed(self, table: Weight, partial: bool = False) -> Value:
        return self._add("embed", (), self._value("T", table.width), table=table, partial=partial)

    def embed_positions(self, table: Weight) -> Value:
        return self._add("embed_positions", (), self._value("T", table.width), table=table)

    def add_norm(self, x: Value, residual: Value | None, gain: Weight, eps: float) -> tuple[Value, Value]:
        return self._norm("add_norm", x, residual, gain=gain, eps=eps)

    def add_layer_norm(
        self, x: Value, residual: Value | None, gain: Weight, bias: Weight, eps: float
    ) -> tuple[Value, Value]:
        return self._norm("add_layer_norm", x, residual, gain=gain, bias=bias, eps=eps)

    def linear(self, x: Value, weight: Weight, precision: Precision = "activation") -> Value:
        return self._add("linear", (x,), self._value(x.symbol, weight.rows, precision), weight=weight)

    def norm_qk(self, qkv: Value, q_gain: Weight, k_gain: Weight, spec: AttentionSpec, eps: float) -> Value:
        out = self._value(qkv.symbol, qkv.width)
        return self._add("norm_qk", (qkv,), out, q_gain=q_gain, k_gain=k_gain, spec=spec, eps=eps)

    def norm_runs(self, x: Value, gain: Weight, eps: float) -> Value:
        return self._add("norm_runs", (x,), self._like(x), gain=gain, eps=eps)

    def attend(self, layer: int, qkv: Value, spec: AttentionSpec, vectors: Vectors) -> Value:
        return self._add("attend", (qkv,), self._value("T", spec.q_width), layer=layer, spec=spec, vectors=vectors)

    def attend_mla(
        self,
        layer: int,
        q: Value,
        kv: Value,
        weights: MlaWeights,
        spec: AttentionSpec,
        eps: float,
        selected: Value | None = None,
    ) -> Value:
        out = self._value("T", spec.heads * weights.v_b.shape[1])
        inputs = (q, kv) if selected is None else (q, kv, selected)
        return self._add("attend_mla", inputs, out, layer=layer, weights=weights, spec=spec, eps=eps)

    def select_positions(self, layer: int, q: Value, k: Value, weights: Value, spec: AttentionSpec) -> Value:
        assert spec.index is not None
        out = self._value("T", spec.index.top_k, "float32")
        return self._add("select_positions", (q, k, weights), out, layer=layer, spec=spec)

    def act_and_mul(self, x: Value, act: str) -> Value:
        return self._add("act_and_mul", (x,), self._value(x.symbol, x.width // 2), act=act)

    def sparse_act_and_mul(self, x: Value, act: str, cutoff: float) -> Value:
        out = self._value(x.symbol, x.width // 2)
        return self._add("sparse_act_and_mul", (x,), out, act=act, cutoff=cutoff)

    def gate_columns(self, x: Value, y: Value, first: int, act: str) -> Value:
        return self._add("gate_columns", (x, y), self._like(x), first=first, act=act)

    def activate(self, x: Value, act: str) -> Value:
        return self._add("activate", (x,), self._like(x), act=act)

    def sigmoid_mul(self, x: Value, gate: Value) -> Value:
        return self._add("sigmoid_mul", (x, gate), self._like(x))

    def add(self, x: Value, y: Value) -> Value:
        return self._add("add", (x, y), self._like(x))

    def scale(self, x: Value, factor: float) -> Value:
        return self._add("scale", (x,), self._like(x), factor=factor)

    def soft_cap(self, x: Value, cap: float) -> Value:
        return self._add("soft_cap", (x,), self._like(x), cap=cap)

    def take_columns(self, x: Value, first: int, width: int, gain: Weight | None = None) -> Value:
        return self._add("take_columns", (x,), self._value(x.symbol, width, x.precision), first=first, gain=gain)

    def concat(self, x: Value, y: Value) -> Value:
        return self._add("concat", (x, y), self._value(x.symbol, x.width + y.width, x.precision))

    def match_rms(self, x: Value, like: Value) -> Value:
        return self._add("match_rms", (x, like), self._like(x))

    def mix_streams(self, x: Value, coefficients: Value) -> Value:
        return self._add("mix_streams", (x, coefficients), self._like(x))

    def correct_streams(self, x: Value, new: Value, coefficients: Value, active: int) -> Value:
        return self._add("correct_streams", (x, new, coefficients), self._like(x), active=active)

    def add_to_streams(self, x: Value, y: Value) -> Value:
        return self._add("add_to_streams", (x, y), self._like(x))

    def take_sampled(self, x: Value) -> Value:
        return self._add("take_sampled", (x,), self._value("S", x.width, x.precision))

    def pool(self, x: Value) -> None:
        self.pooled = x

    def store_hidden(self, number: int, x: Value, ahead: int = 0) -> None:
        self.nodes.append(OpNode("store_hidden", (x,), (), {"number": number, "ahead": ahead}))

    def load_hidden(self, number: int, width: int) -> Value:
        return self._add("load_hidden", (), self._value("T", width), number=number)

    def moe(self, x: Value, router_logits: Value, experts: ExpertWeights, spec: ExpertSpec) -> Value:
        return self._add("moe", (x, router_logits), self._value("T", x.width), experts=experts, spec=spec)

    def delta_net(self, layer: int, x: DeltaInputs[Value], weights: DeltaWeights, spec: DeltaSpec, eps: float) -> Value:
        out = self._value("T", spec.v_width)
        return self._add("delta_net", tuple(x), out, layer=layer, weights=weights, spec=spec, eps=eps)

    def causal_conv(self, layer: int, x: Value, weights: ConvWeights, spec: ConvSpec) -> Value:
        return self._add("causal_conv", (x,), self._value("T", spec.width), layer=layer, weights=weights, spec=spec)

    def selective_scan(
        self, layer: int, x: Value, dt: Value, b: Value, c: Value, gate: Value, weights: ScanWeights, spec: ScanSpec
    ) -> Value:
        inputs, out = (x, dt, b, c, gate), self._value("T", spec.width)
        return self._add("selective_scan", inputs, out, layer=layer, weights=weights, spec=spec)

    def mamba2(self, layer: int, zxbcdt: Value, weights: Mamba2Weights, spec: Mamba2Spec) -> Value:
        out = self._value("T", spec.inner)
        return self._add("mamba2", (zxbcdt,), out, layer=layer, weights=weights, spec=spec)

    def _norm(self, op: str, x: Value, residual: Value | None, **attributes: Any) -> tuple[Value, Value]:
        out = self._value(x.symbol, x.width)
        if residual is None:
            return self._add(op, (x,), out, **attributes), x
        total = self._value(x.symbol, x.width)
        self.nodes.append(OpNode(op, (x, residual), (out, total), attributes))
        return out, total

    def _value(self, symbol: str, width: int, precision: Precision = "activation") -> Value:
        self._values += 1
        return Value(self._values, symbol, width, precision)

    def _like(self, x: Value) -> Value:
        return self._value(x.symbol, x.width, x.precision)

    def _add(self, op: str, inputs: tuple[Value, ...], out: Value, **attributes: Any) -> Value:
        self.nodes.append(OpNode(op, inputs, (out,), attributes))
        return out


def record(model: Forward, can: Capabilities) -> Program:
    recorder = Recorder()
    answer = model.forward(recorder)
    held = [value for value in (answer, recorder.pooled) if value is not None]  # read after the last node
    reads = Counter(value.id for value in [*held, *(value for node in recorder.nodes for value in node.inputs)])
    nodes = prepare_rows(fuse_gates(recorder.nodes, reads, can), reads, can)
    layout = BufferLayout(nodes, held, can)
    places = tuple(layout.place(index, node) for index, node in enumerate(nodes))
    return Program(
        nodes=tuple(nodes),
        buffers=tuple(layout.buffers),
        places=places,
        answer=answer,
        answer_buffer=layout.buffer_of(answer),
        pooled=recorder.pooled,
        pooled_buffer=None if recorder.pooled is None else layout.buffer_of(recorder.pooled),
    )


def fuse_gates(nodes: Iterable[OpNode], reads: Counter[int], can: Capabilities) -> list[OpNode]:
    """Joins a product with the act_and_mul that is its only reader, where the backend computes both in one launch."""
    fused: list[OpNode] = []
    for node in nodes:
        before = fused[-1] if fused else node
        if (
            (before.op, node.op) == ("linear", "act_and_mul")
            and reads_alone(before, node, reads)
            and can.fuses_gate(before.attributes["weight"], node.attributes["act"])
        ):
            fused[-1] = OpNode("gated_linear", before.inputs, node.outputs, {**before.attributes, **node.attributes})
        else:
            fused.append(node)
    return fused


def prepare_rows(nodes: Iterable[OpNode], reads: Counter[int], can: Capabilities) -> list[OpNode]:
    """Marks ops whose rows only the next product reads with its weight (`consumer`), so they may write the product's
    preferred form; marks the product as `prepared`.
    """
    found: list[OpNode] = []
    for node in nodes:
        before = found[-1] if found else node
        if (
            node.op in ("linear", "gated_linear")
            and before.op in can.produces_prepared
            and reads_alone(before, node, reads)
        ):
            found[-1] = before.having(consumer=node.weight)
            found.append(node.having(prepared=True))
        else:
            found.append(node)
    return found


def reads_alone(before: OpNode, node: OpNode, reads: Counter[int]) -> bool:
    """Returns True if `node`'s first input is the only reader of `before`'s first output."""
    return node.inputs[:1] == before.outputs[:1] and reads[before.outputs[0].id] == 1


class BufferLayout:
    """Assigns values to buffers. A buffer is free after the last node that reads its value."""

    def __init__(self, nodes: Sequence[OpNode], held: Iterable[Value], can: Capabilities) -> None:
        self.buffers: list[Buffer] = []
        self._can = can
        self._prepared = {n.inputs[0].id for n in nodes if n.op in PRODUCTS and can.prepares(n.weight)}
        self._last_use = {value.id: i for i, node in enumerate(nodes) for value in node.inputs}
        self._last_use |= {value.id: len(nodes) for value in held}
        self._places: dict[int, int] = {}  # value id: buffer
        self._free: dict[Buffer, list[int]] = {}

    def place(self, index: int, node: OpNode) -> tuple[int, ...]:
        """Returns the buffers of the node's inputs, outputs and scratch. Call it in node order."""
        inputs = [self._places[value.id] for value in node.inputs]
        if node.op in self._can.in_place:
            self._take_over(index, node)
        for value in node.outputs:
            if value.id not in self._places:
                self._places[value.id] = self._take(self._buffer(value))
        outputs = [self._places[value.id] for value in node.outputs]
        needed = self._can.scratch(node)
        scratch = [self._take(buffer) for buffer in needed]
        for buffer, place in zip(needed, scratch, strict=True):
            self._free.setdefault(buffer, []).append(place)
        for value in dict.fromkeys((*node.inputs, *node.outputs)):
            if value.id in self._places and self._last_use.get(value.id, index) <= index:
                self._free.setdefault(self._buffer(value), []).append(self._places.pop(value.id))
        return (*inputs, *outputs, *scratch)

    def buffer_of(self, value: Value) -> int:
        return self._places[value.id]

    def _take_over(self, index: int, node: OpNode) -> None:
        """Gives an output the buffer of an input that it may overwrite, if nothing else needs that input."""
        output, source = TAKES_OVER[node.op]
        if output >= len(node.outputs) or source >= len(node.inputs):
            return  # a norm without a residual produces no sum
        new, old = node.outputs[output], node.inputs[source]
        if self._last_use[old.id] == index and self._buffer(old) == self._buffer(new):
            self._places[new.id] = self._places.pop(old.id)

    def _take(self, buffer: Buffer) -> int:
        if self._free.get(buffer):
            return self._free[buffer].pop()
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def _buffer(self, value: Value) -> Buffer:
        precision = "activation" if self._can.uniform else value.precision
        return Buffer(value.symbol, value.width, precision, value.id in self._prepared)

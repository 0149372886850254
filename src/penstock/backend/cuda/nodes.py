"""What a forward pass is recorded as, and how ops that follow each other become one (`fuse`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from penstock.backend.cuda.inputs import Fields
from penstock.backend.cuda.kernels.decode_attention import Rotation, decode_attention
from penstock.backend.cuda.kernels.delta_rule import DeltaScratch, delta_net
from penstock.backend.cuda.kernels.fp8_activations import Fp8Activations, fp8_view
from penstock.backend.cuda.kernels.mla_attention import mla_decode, mla_prefill, store_mla_kv
from penstock.backend.cuda.kernels.norm import add_layer_norm, add_norm
from penstock.backend.cuda.kernels.prefill_attention import prefill_attention
from penstock.backend.cuda.kernels.rope import rope_and_store
from penstock.backend.cuda.kernels.silu_and_mul import act_and_mul
from penstock.backend.cuda.kv_cache import Cache
from penstock.backend.cuda.weights import Weight
from penstock.model.ops import DeltaWeights
from penstock.model.spec import AttentionSpec, DeltaSpec


class Value(NamedTuple):
    """What an op returns while recording: rows of T or S, each `width` wide."""

    id: int
    symbol: str
    width: int
    wide: bool = False  # float32, not the type of activations


def fp8_for(reader: Weight | None, rows: Any) -> Fp8Activations | None:
    """Where the only product that reads these rows wants their codes."""
    return fp8_view(rows) if reader is not None and reader.takes_fp8(len(rows)) else None


@dataclass(frozen=True, slots=True)
class Product:
    weight: Weight
    coded: bool = False  # whoever makes its rows makes codes where the weight takes them

    def __call__(self, step: Fields, x: Any, out: Any) -> None:
        self.weight.product(self.rows(x), out)

    def rows(self, x: Any) -> Any:
        return (fp8_for(self.weight, x) if self.coded else None) or x


@dataclass(frozen=True, slots=True)
class Gate:
    act: str = "silu"
    reader: Weight | None = None

    def __call__(self, step: Fields, x: Any, out: Any) -> None:
        act_and_mul(x, out, fp8_for(self.reader, out), self.act)


@dataclass(frozen=True, slots=True)
class AddNorm:
    gain: Any
    eps: float
    reader: Weight | None = None

    def __call__(self, step: Fields, x: Any, *others: Any) -> None:
        residual, out, total = others if len(others) == 3 else (None, others[0], None)
        add_norm(x, residual, self.gain, self.eps, out, total, fp8_for(self.reader, out))


@dataclass(frozen=True, slots=True)
class AddLayerNorm:
    gain: Any
    bias: Any
    eps: float
    reader: Weight | None = None

    def __call__(self, step: Fields, x: Any, *others: Any) -> None:
        residual, out, total = others if len(others) == 3 else (None, others[0], None)
        add_layer_norm(x, residual, self.gain, self.bias, self.eps, out, total, fp8_for(self.reader, out))


@dataclass(frozen=True, slots=True)
class GatedProduct:
    product: Product
    gate: Gate

    def __call__(self, step: Fields, x: Any, out: Any, scratch: Any) -> None:
        self.product.weight.gated(self.product.rows(x), out, scratch, fp8_for(self.gate.reader, out))


@dataclass(slots=True)
class Memory:
    """What steps leave on the device for later ones, and scratch that every layer split_kv."""

    last: Any  # [slots + 1] the token each slot sampled last
    tokens: Any  # [T] the step's tokens, all known
    split_kv: Any = None  # see decode_attention
    caches: dict[int, Cache] = field(default_factory=dict)  # by layer
    states: Any = None  # see states.py


@dataclass(frozen=True, slots=True)
class Attend:
    layer: int
    spec: AttentionSpec
    frequencies: Any  # of rope
    memory: Memory
    sinks: Any | None = None

    def __call__(self, step: Fields, qkv: Any, out: Any) -> None:
        spec, rope = self.spec, self.spec.rope
        (cache, scales), rotation = self.memory.caches[self.layer], None
        if len(step.tiles):
            places = step.positions, step.places
            turned = self.frequencies, rope.scale, len(rope.inv_freq), rope.interleaved
            rope_and_store(qkv, *turned, *places, cache, scales)
            about = spec.scale, spec.window, scales, spec.soft_cap, spec.causal, self.sinks
            prefill_attention(qkv, cache, step.tiles, step.tables, step.header, out, *about)
        else:
            rotation = Rotation(self.frequencies, step.places, rope.scale, len(rope.inv_freq), rope.interleaved)
        if len(step.parts):
            decode_attention(
                qkv,
                cache,
                step.parts,
                step.tables,
                step.header,
                out,
                self.memory.split_kv,
                rotation,
                spec.scale,
                spec.window,
                scales,
                spec.soft_cap,
                self.sinks,
            )


@dataclass(frozen=True, slots=True)
class AttendLatent:
    layer: int
    spec: AttentionSpec
    frequencies: Any
    memory: Memory
    gain: Any
    eps: float

    def __call__(self, step: Fields, q: Any, kv: Any, out: Any) -> None:
        spec, rope = self.spec, self.spec.rope
        cache, scales = self.memory.caches[self.layer]
        turned = self.frequencies, rope.scale, rope.interleaved
        store_mla_kv(q, kv, self.gain, self.eps, *turned, step.positions, step.places, cache, scales)
        tables = step.tables, step.header, out
        if len(step.tiles):
            mla_prefill(q, cache, step.tiles, *tables, spec.v_dim, spec.scale, scales)
        if len(step.parts):
            split_kv = self.memory.split_kv
            mla_decode(q, cache, step.parts, *tables, split_kv, spec.v_dim, spec.scale, scales)


@dataclass(frozen=True, slots=True)
class Delta:
    layer: int
    spec: DeltaSpec
    weights: DeltaWeights
    eps: float
    memory: Memory

    def __call__(self, step: Fields, qkvz: Any, ba: Any, out: Any, *scratch: Any) -> None:
        states, about = self.memory.states, (self.weights, self.spec, self.eps)
        delta_net(qkvz, ba, *about, states.layers[self.layer], states.rows_of(step), DeltaScratch(*scratch), out)


@dataclass(frozen=True, slots=True)
class Node:
    """One op: `op(step, *inputs, *outputs)`."""

    op: Callable[..., None]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


def fuse(nodes: list[Node], answer: Value) -> list[Node]:
    """A product makes the gate that follows it, where its kernel can; an op whose rows only one product reads makes
    them as that product wants them."""
    readers = Counter([answer.id, *(value.id for node in nodes for value in node.inputs)])
    kept: list[Node] = []
    for node in nodes:
        before = kept[-1] if kept else None
        if before is None or node.inputs[:1] != before.outputs[:1] or readers[node.inputs[0].id] != 1:
            kept.append(node)
        elif isinstance(before.op, Product) and isinstance(node.op, Gate) and node.op.act == "silu":
            kept[-1] = Node(GatedProduct(before.op, node.op), before.inputs, (*node.outputs, *before.outputs))
        else:
            kept[-1], node = agree(before, node)
            kept.append(node)
    return kept


def agree(before: Node, node: Node) -> tuple[Node, Node]:
    """On rows as codes."""
    if not isinstance(node.op, Product):
        return before, node
    op, reader = before.op, node.op.weight
    if isinstance(op, AddNorm | AddLayerNorm | Gate):
        op = replace(op, reader=reader)
    elif isinstance(op, GatedProduct):
        op = replace(op, gate=replace(op.gate, reader=reader))
    else:
        return before, node
    return replace(before, op=op), replace(node, op=replace(node.op, coded=True))

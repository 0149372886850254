"""Defines the inputs and the tolerance with which a backend is compared with the reference, for each op.

A case is a tiny model of one op. Values enter through `embed`, so any backend can run it through its own interface,
given a `logits(batch)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock.backend.base import Backend, Batch, Floats, Pool
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.ref.activations import ACTS
from penstock.backend.ref.random_steps import blocks_for, random_steps
from penstock.model import rope
from penstock.model.ops import Ops
from penstock.model.random_tensor import random_tensor
from penstock.model.spec import AttentionSpec, ExpertSpec, RopeSpec
from penstock.model.tensor import AFFINE, FORMATS, Stack, Tensor

Random = np.random.Generator
BLOCK_SIZE = 16

EXACT = 1e-6
FLOAT = 1e-5  # the same sums in another order
HALF = 5e-3  # 16 bits for activations, keys and values
BYTE = 2e-2  # 8 bits, in blocks, for activations
LINEAR_TOLERANCE = dict.fromkeys((*FORMATS, *AFFINE), BYTE) | {"F32": FLOAT, "F16": HALF, "BF16": HALF}


class Experts(NamedTuple):
    """Holds the experts of a layer before they are packed."""

    up: Sequence[Stack]
    down: Sequence[Stack]
    choice_bias: Tensor | None


class Heads(NamedTuple):
    """Holds a matrix for each head before they are packed."""

    tensor: Tensor


class Trial(NamedTuple):
    """Holds one op on concrete inputs: `forward(ops, *packed weights)` is run over the steps."""

    forward: Callable[..., Any]
    weights: Sequence[Stack | Tensor | Experts | Heads]
    steps: Sequence[Batch]
    num_blocks: int = 1
    states: int = 0


class Case(NamedTuple):
    op: str
    name: str
    format: str  # the tested weight's
    tolerance: float  # largest difference over largest value
    make: Callable[[Random], Trial]


class Shows(Backend, Protocol):
    def logits(self, batch: Batch) -> Floats: ...


@dataclass(frozen=True, slots=True)
class OneOp:
    """Makes a model of a trial's op and packed weights."""

    op: Callable[..., Any]
    weights: Sequence[Any]

    def forward(self, ops: Ops[Any]) -> Any:
        return ops.take_sampled(self.op(ops, *self.weights))


def run(trial: Trial, backend: Shows) -> list[Floats]:
    backend.load(OneOp(trial.forward, [pack(weight, backend) for weight in trial.weights]))
    backend.reserve_kv(trial.num_blocks, BLOCK_SIZE, trial.states)
    return [pooled(backend, batch) if batch.pools else backend.logits(batch) for batch in trial.steps]


def pack(weight: Stack | Tensor | Experts | Heads, backend: Backend) -> Any:
    match weight:
        case Tensor():
            return backend.pack_vector(weight)
        case Experts():
            return backend.pack_experts(*weight)
        case Heads():
            return backend.pack_heads(*weight)
    return backend.pack_matrix(*weight)


def pooled(backend: Backend, batch: Batch) -> Floats:
    rows = backend.wait(backend.launch(batch)).rows
    return np.stack([np.frombuffer(row.pooled, np.float32) for row in rows if row.pooled])


def difference(got: Floats, wanted: Floats) -> float:
    """Returns the largest difference over the largest value. NaN counts as infinity: `max` would ignore it."""
    found = float(np.abs(got - wanted).max() / np.abs(wanted).max())
    return float("inf") if np.isnan(found) else found


def inputs(rng: Random, tokens: int, width: int) -> Stack:
    """Returns an embedding table whose row i is the op's input for token i."""
    return Stack([random_tensor(rng, "F32", tokens, width)], [None])


def all_at_once(tokens: int) -> list[Batch]:
    return [greedy_batch([Chunk(range(tokens), 0, [0] * -(-tokens // BLOCK_SIZE))])]


def embed(rng: Random, *, format: str, tokens: int, width: int) -> Trial:
    table = Stack([random_tensor(rng, format, 50, width)], [None])
    steps = [greedy_batch([Chunk(rng.integers(50, size=tokens).tolist(), 0, [0])])]
    return Trial(lambda ops, table: ops.embed(table), [table], steps)


def add_norm(rng: Random, *, tokens: int, width: int) -> Trial:

    def forward(ops: Ops[Any], table: Any, first: Any, second: Any) -> Any:
        x, residual = ops.add_norm(ops.embed(table), None, first, 1e-5)
        return ops.add_norm(x, residual, second, 1e-6)[0]

    gains = [random_tensor(rng, "F32", width) for _ in range(2)]
    return Trial(forward, [inputs(rng, tokens, width), *gains], all_at_once(tokens))


def linear(rng: Random, *, format: str, tokens: int, width: int, parts: Sequence[int], bias: bool = False) -> Trial:
    """Multiplies by parts with these numbers of rows; with `bias`, all but the first have one."""
    weight = Stack(
        [random_tensor(rng, format, rows, width) for rows in parts],
        [random_tensor(rng, "F32", rows) if bias and i else None for i, rows in enumerate(parts)],
    )
    return Trial(
        lambda ops, table, weight: ops.linear(ops.embed(table), weight),
        [inputs(rng, tokens, width), weight],
        all_at_once(tokens),
    )


def attend(rng: Random, *, spec: AttentionSpec, lengths: Sequence[int], longest: int = 16) -> Trial:
    """Computes sequences of these lengths in random chunks of at most `longest`, scattered over the cache."""
    table = inputs(rng, sum(lengths), spec.q_width + 2 * spec.kv_width)
    vectors = {name: random_tensor(rng, "F32", size) for name, size in spec.vectors.items()}
    for vector in vectors.values():
        vector.data.view(np.float32)[:] *= 4

    def forward(ops: Ops[Any], table: Any, *vectors: Any) -> Any:
        return ops.attend(0, ops.embed(table), spec, dict(zip(spec.vectors, vectors, strict=True)))

    return Trial(forward, [table, *vectors.values()], *scattered(rng, lengths, longest))


def scattered(rng: Random, lengths: Sequence[int], longest: int) -> tuple[list[Batch], int]:
    """Returns steps in which all tokens of these sequences come, and how many blocks they need."""
    ends = np.cumsum(lengths).tolist()
    prompts = [range(end - length, end) for length, end in zip(lengths, ends, strict=True)]
    steps = random_steps(rng, prompts, BLOCK_SIZE, longest)
    return [greedy_batch(chunks, i) for i, chunks in enumerate(steps)], blocks_for(prompts, BLOCK_SIZE)


def attend_whole(rng: Random, *, spec: AttentionSpec, lengths: Sequence[int]) -> Trial:
    """Attends over whole sequences, all in one step, in two layers that share a cache."""
    sizes = [-(-length // BLOCK_SIZE) for length in lengths]
    blocks = np.split(rng.permutation(sum(sizes)), np.cumsum(sizes)[:-1])
    ends = np.cumsum(lengths).tolist()
    chunks = [
        Chunk(range(end - length, end), 0, table.tolist(), slot)
        for slot, (length, end, table) in enumerate(zip(lengths, ends, blocks, strict=True))
    ]

    def forward(ops: Ops[Any], table: Any, other: Any, *given: Any) -> Any:
        vectors = dict(zip(spec.vectors, given, strict=True))
        return ops.add(*(ops.attend(0, ops.embed(each), spec, vectors) for each in (table, other)))

    tables = [inputs(rng, sum(lengths), spec.q_width + 2 * spec.kv_width) for _ in range(2)]
    vectors = [random_tensor(rng, "F32", size) for size in spec.vectors.values()]
    return Trial(forward, [*tables, *vectors], [greedy_batch(chunks)], num_blocks=sum(sizes))


def act_and_mul(rng: Random, *, tokens: int, hidden: int, act: str = "silu") -> Trial:
    table = inputs(rng, tokens, 2 * hidden)
    table.parts[0].data.view(np.float32)[:: hidden + 1] *= 100  # where exp overflows
    return Trial(lambda ops, table: ops.act_and_mul(ops.embed(table), act), [table], all_at_once(tokens))


def norm_qk(rng: Random, *, spec: AttentionSpec, tokens: int) -> Trial:
    sizes = (spec.head_dim, spec.head_dim) if spec.qk_norm == "head" else (spec.q_width, spec.kv_width)
    return Trial(
        lambda ops, table, q, k: ops.norm_qk(ops.embed(table), q, k, spec, 1e-5),
        [inputs(rng, tokens, spec.q_width + 2 * spec.kv_width), *(random_tensor(rng, "F32", size) for size in sizes)],
        all_at_once(tokens),
    )


def by_value(rng: Random, *, op: Callable[[Ops[Any], Any], Any], width: int) -> Trial:
    """Computes an op on each value by itself, where its input is needed again after it."""

    def forward(ops: Ops[Any], table: Any) -> Any:
        x = ops.embed(table)
        return ops.add(op(ops, x), x)

    table = inputs(rng, 9, width)
    table.parts[0].data.view(np.float32)[::7] *= 20
    return Trial(forward, [table], all_at_once(9))


def take_sampled(rng: Random, *, wanted: Sequence[tuple[int, int]]) -> Trial:
    """Takes rows of (tokens, how many of the last ones are wanted)."""
    chunks = [Chunk(range(tokens), 0, [row], row, sample) for row, (tokens, sample) in enumerate(wanted)]
    return Trial(lambda ops, table: ops.embed(table), [inputs(rng, 16, 32)], [greedy_batch(chunks)], len(wanted))


def pool(rng: Random) -> Trial:
    """Pools a mean over two steps, a mean of one, and a last state, in a step with a row without an embedding. Ops
    after `pool` must not overwrite the pooled values."""

    def forward(ops: Ops[Any], table: Any, gain: Any) -> Any:
        x = y = ops.embed(table)
        ops.pool(x)
        for _ in range(3):
            y, _ = ops.add_norm(y, None, gain, 1e-5)
        return y

    first = greedy_batch([Chunk(range(7), 0, [0], 2, 0), Chunk([9], 0, [1], 0, 1), Chunk(range(5), 0, [2], 1, 0)])
    then = greedy_batch([Chunk(range(7, 16), 7, [0], 2, 0), Chunk([3], 1, [1], 0, 1)], step=1)
    steps = [
        replace(first, pools=(Pool(0, 0, 7, True, 0), Pool(2, 8, 13, True, 5))),
        replace(then, pools=(Pool(0, 0, 9, False, 16), Pool(1, 9, 10, True, 1))),
    ]
    return Trial(forward, [inputs(rng, 16, 32), random_tensor(rng, "F32", 32)], steps, num_blocks=3)


def add_layer_norm(rng: Random, *, tokens: int, width: int) -> Trial:
    """Computes layer norms as `add_norm` does RMS norms, of values far from 0."""

    def forward(ops: Ops[Any], table: Any, gain: Any, bias: Any, second: Any, shift: Any) -> Any:
        x, residual = ops.add_layer_norm(ops.embed(table), None, gain, bias, 1e-5)
        return ops.add_layer_norm(x, residual, second, shift, 1e-6)[0]

    table = inputs(rng, tokens, width)
    table.parts[0].data.view(np.float32)[:] += 10
    return Trial(forward, [table, *(random_tensor(rng, "F32", width) for _ in range(4))], all_at_once(tokens))


def activate(rng: Random, *, act: str) -> Trial:
    return by_value(rng, op=lambda ops, x: ops.activate(x, act), width=33)


def embed_positions(rng: Random, *, format: str, width: int) -> Trial:
    table = Stack([random_tensor(rng, format, 40, width)], [None])
    steps = [greedy_batch([Chunk([0] * 30, 0, [0, 1]), Chunk([1], 39, [2, 3, 4], 1)])]
    return Trial(
        lambda ops, tokens, table: ops.add(ops.embed(tokens), ops.embed_positions(table)),
        [inputs(rng, 2, width), table],
        steps,
        num_blocks=5,
    )


def moe(
    rng: Random,
    *,
    spec: ExpertSpec,
    tokens: int,
    width: int = 64,
    format: str = "F32",
    bias: bool = False,
    same: bool = False,  # experts are chosen by all tokens
) -> Trial:
    """Routes each token by the first values of its input: numbers that no precision rounds. The last two are equal, and
    the first one is the lowest."""

    def forward(ops: Ops[Any], table: Any, router: Any, experts: Any) -> Any:
        x = ops.embed(table)
        return ops.moe(x, ops.linear(x, router, precision="float32"), experts, spec)

    table = inputs(rng, tokens, width)
    logits = np.tile(np.arange(spec.count) / 32 - 1, (1 if same else tokens, 1))
    rng.permuted(logits[:, 1:], axis=1, out=logits[:, 1:])
    logits[:, -1] = logits[:, -2]
    rows = table.parts[0].data.view(np.float32).reshape(tokens, width)
    rows *= 0.125
    rows[:, : spec.count] = logits

    def stack(parts: int, rows: int, width: int) -> Stack:
        biases = [random_tensor(rng, "F32", rows) if bias else None for _ in range(parts)]
        return Stack([random_tensor(rng, format, rows, width) for _ in range(parts)], biases)

    bank = Experts(
        [stack(2 if spec.gated else 1, spec.hidden, width) for _ in range(spec.count)],
        [stack(1, width, spec.hidden) for _ in range(spec.count)],
        random_tensor(rng, "F32", spec.count) if spec.choice_bias else None,
    )
    return Trial(forward, [table, Stack([identity(spec.count, width)], [None]), bank], all_at_once(tokens))


def some_experts(format: str, width: int, tokens: int, rng: Random) -> Trial:
    return moe(rng, spec=ExpertSpec(3, 2, width), tokens=tokens, width=width, format=format)


def identity(rows: int, width: int) -> Tensor:
    values = np.eye(rows, width, dtype=np.float32)
    return Tensor("identity", FORMATS["F32"], values.shape, values.reshape(-1).view(np.uint8))


def attention(
    heads: int,
    kv_heads: int,
    dims: int,
    *,
    interleaved: bool,
    scale: float = 1,
    rotated: int | None = None,  # dimensions of a head that RoPE rotates; None: all
    **others: Any,
) -> Any:
    freqs = rope.plain(10000.0, dims if rotated is None else rotated)
    return AttentionSpec(heads, kv_heads, dims, RopeSpec(freqs, interleaved, scale), **others)


HALVES = partial(attention, interleaved=False)
PAIRS = partial(attention, interleaved=True)
SUNK = partial(HALVES, sinks=True)
GAINED = partial(HALVES, q_gain=True)
SOME_HALVES, SOME_PAIRS = (partial(kind, rotated=6, scale=1.2) for kind in (HALVES, PAIRS))

TWO = ExpertSpec(8, 2, 32, renormalize=True)
BEST_GROUPS = replace(TWO, groups=4, top_k_groups=2, scale=2.5, group_score="max")
BIASED_GROUPS = replace(TWO, top_k=3, groups=2, scoring="sigmoid", choice_bias=True, scale=1.5)
UNGATED = replace(TWO, act="relu2", gated=False)
CLAMPED = replace(TWO, top_k=4, scoring="softmax_top_k", act="clamped")

from penstock.backend.ref.delta_cases import DELTA_CASES  # noqa: E402  # they import the names above
from penstock.backend.ref.distance_cases import DISTANCE_CASES  # noqa: E402
from penstock.backend.ref.hidden_cases import HIDDEN_CASES  # noqa: E402
from penstock.backend.ref.llama4_cases import LLAMA4_CASES  # noqa: E402
from penstock.backend.ref.mamba2_cases import MAMBA2_CASES  # noqa: E402
from penstock.backend.ref.mla_cases import MLA_CASES  # noqa: E402
from penstock.backend.ref.scan_cases import SCAN_CASES  # noqa: E402
from penstock.backend.ref.stream_cases import STREAM_CASES  # noqa: E402

CASES = (
    *(Case("embed", f, f, EXACT, partial(embed, format=f, tokens=7, width=256)) for f in LINEAR_TOLERANCE),
    Case("embed", "one token", "F32", EXACT, partial(embed, format="F32", tokens=1, width=33)),
    Case("add_norm", "one token", "F32", FLOAT, partial(add_norm, tokens=1, width=576)),
    Case("add_norm", "odd width", "F32", FLOAT, partial(add_norm, tokens=5, width=33)),
    *(
        Case("linear", f"{f}, {t} tokens", f, tolerance, partial(linear, format=f, tokens=t, width=512, parts=(37,)))
        for f, tolerance in LINEAR_TOLERANCE.items()
        for t in (1, 5)
    ),
    Case("linear", "one block", "Q4_0", BYTE, partial(linear, format="Q4_0", tokens=3, width=32, parts=(1,))),
    Case("linear", "odd width", "F32", FLOAT, partial(linear, format="F32", tokens=2, width=33, parts=(7,))),
    Case("linear", "parts", "Q8_0", BYTE, partial(linear, format="Q8_0", tokens=33, width=96, parts=(48, 16, 16))),
    Case("linear", "bias", "F16", HALF, partial(linear, format="F16", tokens=4, width=48, parts=(8, 5), bias=True)),
    Case("attend", "one token", "F32", HALF, partial(attend, spec=HALVES(2, 2, 16), lengths=(1,))),
    Case("attend", "whole prompt", "F32", HALF, partial(attend, spec=HALVES(2, 2, 16), lengths=(40,), longest=1000)),
    Case("attend", "token by token", "F32", HALF, partial(attend, spec=PAIRS(2, 2, 16), lengths=(20,), longest=1)),
    Case("attend", "halves", "F32", HALF, partial(attend, spec=HALVES(4, 4, 16), lengths=(33, 1, 50))),
    Case("attend", "pairs", "F32", HALF, partial(attend, spec=PAIRS(4, 4, 16), lengths=(33, 1, 50))),
    Case("attend", "shared heads", "F32", HALF, partial(attend, spec=PAIRS(9, 3, 64), lengths=(17, 70))),
    Case("attend", "one kv head", "F32", HALF, partial(attend, spec=HALVES(3, 1, 10), lengths=(16, 31))),
    Case("attend", "window", "F32", HALF, partial(attend, spec=HALVES(4, 2, 16, window=7), lengths=(5, 64))),
    Case("attend", "scaled rope", "F32", HALF, partial(attend, spec=PAIRS(2, 1, 16, scale=1.2), lengths=(48,))),
    Case("attend", "some rotated", "F32", HALF, partial(attend, spec=SOME_HALVES(4, 2, 16), lengths=(5, 64))),
    Case("attend", "some pairs rotated", "F32", HALF, partial(attend, spec=SOME_PAIRS(4, 2, 16), lengths=(5, 64))),
    Case("attend", "nothing rotated", "F32", HALF, partial(attend, spec=HALVES(4, 2, 16, rotated=0), lengths=(5, 64))),
    Case("attend", "multiplier", "F32", HALF, partial(attend, spec=PAIRS(2, 1, 16, multiplier=0.7), lengths=(5, 64))),
    Case("attend", "soft cap", "F32", HALF, partial(attend, spec=HALVES(4, 2, 16, soft_cap=0.8), lengths=(5, 64))),
    Case("attend", "sinks", "F32", HALF, partial(attend, spec=HALVES(4, 2, 16, sinks=True), lengths=(1, 64))),
    Case("attend", "sinks and window", "F32", HALF, partial(attend, spec=SUNK(4, 2, 16, window=7), lengths=(5, 64))),
    Case("attend", "sinks, one by one", "F32", HALF, partial(attend, spec=SUNK(2, 1, 16), lengths=(20,), longest=1)),
    Case("attend", "sinks far behind", "F32", HALF, partial(attend, spec=SUNK(2, 1, 16), lengths=(600,), longest=60)),
    Case(
        "attend", "gain of queries", "F32", HALF, partial(attend, spec=HALVES(4, 2, 16, q_gain=True), lengths=(1, 64))
    ),
    Case("attend", "gain, one by one", "F32", HALF, partial(attend, spec=GAINED(2, 1, 12), lengths=(20,), longest=1)),
    Case("norm_qk", "head", "F32", FLOAT, partial(norm_qk, spec=HALVES(4, 2, 10, qk_norm="head"), tokens=5)),
    Case("norm_qk", "all", "F32", FLOAT, partial(norm_qk, spec=HALVES(4, 2, 16, qk_norm="all"), tokens=9)),
    Case("add", "twice", "F32", FLOAT, partial(by_value, op=lambda ops, x: ops.add(x, x), width=33)),
    Case("scale", "some", "F32", FLOAT, partial(by_value, op=lambda ops, x: ops.scale(x, 0.3), width=33)),
    Case("soft_cap", "some", "F32", FLOAT, partial(by_value, op=lambda ops, x: ops.soft_cap(x, 2.5), width=33)),
    Case("act_and_mul", "gelu", "F32", FLOAT, partial(act_and_mul, tokens=5, hidden=33, act="gelu")),
    Case("act_and_mul", "gelu_tanh", "F32", FLOAT, partial(act_and_mul, tokens=5, hidden=33, act="gelu_tanh")),
    Case("act_and_mul", "one token", "F32", FLOAT, partial(act_and_mul, tokens=1, hidden=1536)),
    Case("act_and_mul", "odd width", "F32", FLOAT, partial(act_and_mul, tokens=5, hidden=33)),
    Case("pool", "two steps", "F32", FLOAT, pool),
    Case("moe", "two of eight", "F32", FLOAT, partial(moe, spec=TWO, tokens=9)),
    Case("moe", "one token", "F32", FLOAT, partial(moe, spec=TWO, tokens=1)),
    Case("moe", "one of three", "F32", FLOAT, partial(moe, spec=ExpertSpec(3, 1, 16), tokens=5)),
    Case("moe", "all of them", "F32", FLOAT, partial(moe, spec=ExpertSpec(5, 5, 16), tokens=4)),
    Case("moe", "many", "F32", FLOAT, partial(moe, spec=ExpertSpec(40, 8, 16), tokens=7)),
    Case("moe", "odd widths", "F32", FLOAT, partial(moe, spec=ExpertSpec(6, 2, 21), tokens=7, width=33)),
    Case("moe", "the same", "F32", FLOAT, partial(moe, spec=replace(TWO, top_k=1), tokens=130, same=True)),
    Case("moe", "best groups", "F32", FLOAT, partial(moe, spec=BEST_GROUPS, tokens=9)),
    Case("moe", "biased groups", "F32", FLOAT, partial(moe, spec=BIASED_GROUPS, tokens=9)),
    Case("moe", "clamped, biases", "F32", FLOAT, partial(moe, spec=CLAMPED, tokens=9, bias=True)),
    Case("moe", "not gated", "F32", FLOAT, partial(moe, spec=UNGATED, tokens=9)),
    Case("moe", "Q8_0, not gated", "Q8_0", 3 * BYTE, partial(moe, spec=UNGATED, format="Q8_0", tokens=3)),
    Case("moe", "gelu", "F32", FLOAT, partial(moe, spec=replace(TWO, act="gelu_tanh"), tokens=3)),
    *(
        Case("moe", f"{f}, {tokens} tokens", f, 3 * LINEAR_TOLERANCE[f], partial(some_experts, f, width, tokens))
        for f, width in (("F16", 64), ("BF16", 64), ("Q4_0", 64), ("Q8_0", 64), ("MXFP4", 64), ("Q4_K", 256))
        for tokens in (1, 9)
    ),
    Case("moe", "Q2_K", "Q2_K", 3 * BYTE, partial(some_experts, "Q2_K", 256, 3)),
    Case("moe", "Q8_0, biases", "Q8_0", 3 * BYTE, partial(moe, spec=CLAMPED, format="Q8_0", tokens=9, bias=True)),
    Case("take_sampled", "some", "F32", EXACT, partial(take_sampled, wanted=((5, 1), (1, 0), (7, 3), (2, 2)))),
    Case("add_layer_norm", "one token", "F32", FLOAT, partial(add_layer_norm, tokens=1, width=576)),
    Case("add_layer_norm", "odd width", "F32", FLOAT, partial(add_layer_norm, tokens=5, width=33)),
    *(Case("activate", act, "F32", FLOAT, partial(activate, act=act)) for act in ACTS),
    Case("embed_positions", "two rows", "F16", EXACT, partial(embed_positions, format="F16", width=33)),
    Case("embed_positions", "quantized", "Q8_0", EXACT, partial(embed_positions, format="Q8_0", width=64)),
    Case(
        "attend",
        "not causal",
        "F32",
        HALF,
        partial(attend_whole, spec=HALVES(4, 4, 16, rotated=0, causal=False), lengths=(1, 70, 64, 2, 16, 33)),
    ),
    Case(
        "attend",
        "not causal, long",
        "F32",
        HALF,
        partial(attend_whole, spec=HALVES(2, 1, 16, causal=False), lengths=(5, 1100)),
    ),
    *(
        Case(
            "attend",
            f"not causal, window of {window}",
            "F32",
            HALF,
            partial(attend_whole, spec=HALVES(2, 2, 16, causal=False, window=window), lengths=lengths),
        )
        for window, lengths in ((5, (1, 3, 70, 33)), (65, (40, 300)), (20, (1100,)))
    ),
    *DELTA_CASES,
    *DISTANCE_CASES,
    *(*SCAN_CASES, *LLAMA4_CASES, *MAMBA2_CASES, *MLA_CASES, *STREAM_CASES, *HIDDEN_CASES),
)

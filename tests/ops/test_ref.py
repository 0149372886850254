"""The reference itself, against the plainest loops; and the cases that other backends are held to."""

from __future__ import annotations

import ast
import cmath
import inspect
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.ref import RefBackend, cases
from penstock.backend.ref.kv_cache import RefCache
from penstock.backend.ref.ops import Matrix, RefOps, rotate
from penstock.backend.ref.random_steps import blocks_for, random_steps
from penstock.model import rope
from penstock.model.dequantize import dequantize
from penstock.model.ops import ExpertWeights, Ops
from penstock.model.spec import AttentionSpec, ExpertSpec, RopeSpec
from penstock.model.tensor import STORAGE


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def ops_over(tokens: int) -> RefOps:
    return RefOps(greedy_batch([Chunk(range(tokens), 0, [0])]), RefCache(1, tokens))


def test_embed_takes_rows(rng):
    table = rng.normal(size=(9, 4)).astype(np.float32)
    batch = greedy_batch([Chunk([8, 0, 8], 0, [0])])
    assert np.array_equal(RefOps(batch, RefCache(1, 16)).embed(Matrix(table, None)), table[[8, 0, 8]])


def test_add_norm(rng):
    x, residual = rng.normal(size=(2, 3, 5)).astype(np.float32)
    gain = rng.normal(size=5).astype(np.float32)
    got, total = ops_over(3).add_norm(x, residual, gain, 1e-2)
    assert np.array_equal(total, x + residual)
    for row, answer in zip(total.tolist(), got.tolist(), strict=True):
        size = math.sqrt(sum(value * value for value in row) / 5 + 1e-2)
        assert answer == pytest.approx([value / size * float(g) for value, g in zip(row, gain, strict=True)], rel=1e-5)


def test_linear_adds_its_bias(rng):
    x, weight = np.array([[1, 2]], np.float32), np.array([[1, 0], [0, 1], [3, 3]], np.float32)
    assert ops_over(1).linear(x, Matrix(weight, None)).tolist() == [[1, 2, 9]]
    assert ops_over(1).linear(x, Matrix(weight, np.array([1, 2, 3], np.float32))).tolist() == [[2, 4, 12]]


def test_act_and_mul(rng):
    x = np.array([[1.0, -200.0, 2.0, 3.0]], np.float32)
    assert ops_over(1).act_and_mul(x, "silu").tolist()[0] == pytest.approx([2 / (1 + math.exp(-1)), 0])


def test_gelu():
    got = ops_over(1).act_and_mul(np.array([[1.0, -20.0, 1.0, 3.0]], np.float32), "gelu_tanh").tolist()[0]
    assert got == pytest.approx([(1 + math.tanh((2 / math.pi) ** 0.5 * 1.044715)) / 2, 0])


def test_values_by_themselves():
    x = np.array([[1.0, -2000.0]], np.float32)
    assert ops_over(1).add(x, x).tolist() == [[2, -4000]]
    assert ops_over(1).scale(x, 0.5).tolist() == [[0.5, -1000]]
    assert ops_over(1).soft_cap(x, 30).tolist()[0] == pytest.approx([30 * math.tanh(1 / 30), -30])


@pytest.mark.parametrize(("q_run", "k_run"), [(2, 2), (4, 2)])
def test_queries_and_keys_are_normed_in_runs(rng, q_run, k_run):
    spec = AttentionSpec(2, 1, 2, RopeSpec((1.0,), False))
    qkv, q_gain, k_gain = (rng.normal(size=size).astype(np.float32) for size in ((3, 8), q_run, k_run))
    got = ops_over(3).norm_qk(qkv, q_gain, k_gain, spec, 1e-2)
    for row, answer in zip(qkv, got, strict=True):
        for run in [*np.split(np.arange(4), 4 // q_run), np.arange(4, 6)]:
            gain = k_gain if run[0] >= 4 else q_gain
            size = math.sqrt(sum(float(value) ** 2 for value in row[run]) / len(run) + 1e-2)
            assert answer[run] == pytest.approx(row[run] / size * gain, rel=1e-5)
        assert np.array_equal(answer[6:], row[6:])


def test_what_is_beyond_the_pairs_stays(rng):
    x = rng.normal(size=(2, 1, 6)).astype(np.float32)
    positions = np.array([3, 1000], np.int32)
    for interleaved in (True, False):
        got = rotate(x, positions, RopeSpec((1.0, 0.1), interleaved, scale=1.5))
        assert np.array_equal(got[..., 4:], x[..., 4:])
        assert np.array_equal(got[..., :4], rotate(x[..., :4], positions, RopeSpec((1.0, 0.1), interleaved, 1.5)))
        assert np.array_equal(rotate(x, positions, RopeSpec((), interleaved)), x)


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_rotation_is_a_complex_product(rng, interleaved):
    x = rng.normal(size=(2, 1, 6)).astype(np.float32)
    spec = RopeSpec((1.0, 0.1, 0.01), interleaved, scale=1.5)
    got = rotate(x, np.array([0, 1000], np.int32), spec)
    pairs = [(0, 1), (2, 3), (4, 5)] if interleaved else [(0, 3), (1, 4), (2, 5)]
    for token, position in enumerate((0, 1000)):
        for (a, b), freq in zip(pairs, spec.inv_freq, strict=True):
            rotated = complex(x[token, 0, a], x[token, 0, b]) * 1.5 * cmath.exp(1j * freq * position)
            assert (got[token, 0, a], got[token, 0, b]) == pytest.approx((rotated.real, rotated.imag), rel=1e-5)


@pytest.mark.parametrize(("window", "multiplier", "cap"), [(0, 0, 0), (3, 0, 0), (0, 0.7, 0), (3, 0.7, 0.9)])
def test_attention_one_number_at_a_time(rng, window, multiplier, cap):
    """Without blocks or chunks: each head of each token, over what it sees."""
    spec = AttentionSpec(4, 2, 4, RopeSpec(rope.plain(100.0, 4), False), window, multiplier, cap)
    qkv = rng.normal(size=(9, 32)).astype(np.float32)
    got = ops_over(9).attend(0, qkv, spec, {}).reshape(9, 4, 4)
    heads = rotate(qkv.reshape(9, 8, 4), np.arange(9, dtype=np.int32), spec.rope)
    for token in range(9):
        seen = range(max(0, token - window + 1) if window else 0, token + 1)
        for head in range(4):
            factor = multiplier or 1 / 2
            scores = [float(heads[token, head] @ heads[other, 4 + head // 2]) * factor for other in seen]
            if cap:
                scores = [cap * math.tanh(score / cap) for score in scores]
            weights = [math.exp(score) for score in scores]
            values = [qkv.reshape(9, 8, 4)[other, 6 + head // 2] for other in seen]
            wanted = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
            assert got[token, head] == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "spec",
    [
        ExpertSpec(6, 2, 3),
        ExpertSpec(6, 3, 3, scoring="sigmoid", renormalize=True, scale=2.5, choice_bias=True, groups=3, top_k_groups=2),
        ExpertSpec(6, 2, 3, renormalize=True, groups=2, group_score="max"),
        ExpertSpec(6, 4, 3, scoring="softmax_top_k", act="clamped"),
    ],
    ids=["softmax", "groups and bias", "best groups", "softmax of the chosen"],
)
def test_experts_one_token_at_a_time(rng, spec):
    x, scores = (rng.normal(size=(9, width)).astype(np.float32) for width in (4, 6))
    scores[3] = scores[3, 0]
    bias = rng.normal(size=6).astype(np.float32) if spec.choice_bias else None
    up, down = (rng.normal(size=(6, *shape)).astype(np.float32) * 3 for shape in ((6, 4), (4, 3)))
    experts = ExpertWeights([Matrix(one, None) for one in up], [Matrix(one, None) for one in down], bias)
    got = ops_over(9).moe(x, scores, experts, spec)
    for token, answer in enumerate(got):
        chosen, weights = experts_of(scores[token].tolist(), [0] * 6 if bias is None else bias.tolist(), spec)
        wanted = [
            w * down[k] @ gate(up[k, :3] @ x[token], up[k, 3:] @ x[token], spec.act)
            for k, w in zip(chosen, weights, strict=True)
        ]
        assert answer == pytest.approx(sum(wanted) * spec.scale, rel=1e-4, abs=1e-5)


def experts_of(logits, bias, spec):
    powers = [math.exp(one) for one in logits]
    scores = {
        "softmax": [power / sum(powers) for power in powers],
        "sigmoid": [1 / (1 + math.exp(-one)) for one in logits],
        "softmax_top_k": logits,
    }[spec.scoring]
    choice = [one + other for one, other in zip(scores, bias, strict=True)]
    size = len(choice) // spec.groups
    taken = 1 if spec.group_score == "max" else 2
    best = [sum(sorted(choice[g * size : (g + 1) * size])[-taken:]) for g in range(spec.groups)]
    groups = sorted(range(spec.groups), key=lambda g: -best[g])[: spec.top_k_groups]
    chosen = sorted((k for k in range(len(choice)) if k // size in groups), key=lambda k: -choice[k])[: spec.top_k]
    weights = [powers[k] if spec.scoring == "softmax_top_k" else scores[k] for k in chosen]
    divided = spec.renormalize or spec.scoring == "softmax_top_k"
    return chosen, [weight / (sum(weights) if divided else 1) for weight in weights]


def gate(left, right, act):
    if act == "silu":
        return left / (1 + np.exp(-left)) * right
    left, right = np.minimum(left, 7), np.minimum(np.maximum(right, -7), 7)
    return left / (1 + np.exp(-1.702 * left)) * (right + 1)


def test_layers_do_not_share_a_cache(rng):
    spec = cases.HALVES(1, 1, 4)
    cache = RefCache(1, 16)
    first, second = (rng.normal(size=(1, 12)).astype(np.float32) for _ in range(2))
    start = RefOps(greedy_batch([Chunk([0], 0, [0])]), cache)
    start.attend(0, first, spec, {})
    start.attend(1, second, spec, {})
    again = RefOps(greedy_batch([Chunk([0], 1, [0])]), cache)
    assert not np.allclose(again.attend(0, second, spec, {}), again.attend(1, second, spec, {}))


def test_every_op_has_a_case():
    assert {name for name, _ in inspect.getmembers(Ops, inspect.isfunction) if not name.startswith("_")} == {
        case.op for case in cases.CASES
    }


def test_case_names_are_unique():
    assert len({(case.op, case.name) for case in cases.CASES}) == len(cases.CASES)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: f"{case.op}: {case.name}")
def test_cases_repeat(case):
    """The same seed gives the same trial, and its answers are numbers that can be compared."""
    first, second = (cases.run(case.make(np.random.default_rng(3)), RefBackend()) for _ in range(2))
    assert all(cases.difference(one, other) == 0 for one, other in zip(first, second, strict=True))
    assert not any(cases.difference(one, 1.1 * one) < case.tolerance for one in first)


@pytest.mark.parametrize(
    "case",
    [case for case in cases.CASES if case.op == "attend" and case.make.keywords["spec"].causal],
    ids=lambda case: case.name,
)
def test_attention_does_not_depend_on_the_steps(case):
    def answers(**changes):
        trial = cases.attend(np.random.default_rng(3), **case.make.keywords | changes)
        order = np.concatenate([batch.tokens for batch in trial.steps]).argsort()
        return np.concatenate(cases.run(trial, RefBackend()))[order]

    assert np.allclose(answers(), answers(longest=10_000), atol=1e-5)


@pytest.mark.parametrize("format", STORAGE)
def test_random_tensors_are_finite(rng, format):
    values = dequantize(cases.random_tensor(rng, format, 4, 512))
    assert np.isfinite(values).all()
    assert values.std() > 0


def test_random_steps_cover_every_prompt_once(rng):
    prompts = [range(0, 33), range(100, 101), range(200, 217)]
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    blocks: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    for chunks in random_steps(rng, prompts, block_size=4):
        for chunk in chunks:
            assert chunk.start == len(seen[chunk.slot])
            seen[chunk.slot] += chunk.tokens
            blocks[chunk.slot] |= set(chunk.table)
    assert seen == {slot: list(prompt) for slot, prompt in enumerate(prompts)}
    assert sorted(block for used in blocks.values() for block in used) == list(range(blocks_for(prompts, 4)))


def test_parts_without_a_bias_get_none(rng):
    trial = cases.linear(rng, format="F32", tokens=1, width=4, parts=(2, 3), bias=True)
    (with_bias,) = cases.run(trial, RefBackend())
    weight = trial.weights[1]._replace(bias=[None, None])
    (without,) = cases.run(trial._replace(weights=[trial.weights[0], weight]), RefBackend())
    assert np.array_equal(with_bias[0, :2], without[0, :2])
    assert with_bias[0, 2:] == pytest.approx(without[0, 2:] + dequantize(trial.weights[1].bias[1]), rel=1e-5)


def test_sampled_rows_only(rng):
    batch = greedy_batch([Chunk(range(5), 0, [0], 0, 2), Chunk(range(3), 0, [1], 1, 0), Chunk([1], 9, [2], 2, 1)])
    assert batch.sampled.tolist() == [3, 4, 8]
    assert batch.sample_start.tolist() == [0, 2, 2, 3]
    x = rng.normal(size=(9, 2)).astype(np.float32)
    assert np.array_equal(RefOps(replace(batch), RefCache(3, 16)).take_sampled(x), x[[3, 4, 8]])


def test_product_code_imports_no_generators_of_test_inputs():
    source = Path(penstock.__file__).parent
    own = {*source.glob("backend/ref/*cases.py"), source / "backend/ref/random_steps.py"}
    generators = {f"penstock.backend.ref.{path.stem}" for path in own}
    assert len(own) > 5
    for path in set(source.rglob("*.py")) - own:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                assert not names & generators, f"{path} imports a generator"

"""Experts on the native CPU backend: the same answer in any batch, and a refusal of what does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.cpu._native import Program, Weight, isas
from penstock.backend.ref import RefBackend
from penstock.backend.ref.cases import BIASED_GROUPS, CLAMPED, OneOp, difference, moe, pack
from penstock.model.random_tensor import random_tensor
from penstock.model.roles import Role
from penstock.model.spec import ExpertSpec

TOKENS = 250


def loaded(threads: int, isa: str, **trial: Any) -> CpuBackend:
    backend = CpuBackend(threads, isa=isa)
    made = moe(np.random.default_rng(4), tokens=TOKENS, **trial)
    backend.load(OneOp(made.forward, [pack(weight, backend) for weight in made.weights]))
    return backend


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize(
    ("spec", "format", "bias"),
    [
        (replace(BIASED_GROUPS, hidden=64), "Q8_0", False),
        (CLAMPED, "Q4_0", True),
        (ExpertSpec(3, 2, 48), "BF16", False),
        (ExpertSpec(20, 4, 32), "F32", False),
        (replace(CLAMPED, hidden=128), "EXL3-3", True),
    ],
    ids=["Q8_0", "Q4_0", "BF16", "F32", "EXL3"],
)
def test_a_token_is_bitwise_the_same_in_any_batch(spec: ExpertSpec, format: str, bias: bool, isa: str):
    width = 128 if format.startswith("EXL3") else 64
    trial = {"spec": spec, "format": format, "bias": bias, "width": width}
    alone = loaded(1, isa, **trial)
    wanted = np.concatenate([alone.logits(greedy_batch([Chunk([token], 0, [0])])) for token in range(TOKENS)])
    for threads in (1, 2, 5):
        backend = loaded(threads, isa, **trial)
        for tokens in (range(TOKENS), range(17, 40), range(TOKENS - 1, -1, -1), [5] * 7):
            assert np.array_equal(backend.logits(greedy_batch([Chunk(tokens, 0, [0])])), wanted[list(tokens)])


EXL3 = {  # trials of experts in EXL3
    "gated": {"spec": ExpertSpec(5, 2, 256), "format": "EXL3-2-mul1"},
    "with biases": {"spec": replace(CLAMPED, hidden=128), "format": "EXL3-4", "bias": True},
    "weighed before": {"spec": replace(ExpertSpec(4, 2, 128), weigh_inputs=True), "format": "EXL3-3"},
    "not gated": {"spec": ExpertSpec(3, 1, 384, gated=False, act="relu2"), "format": "EXL3-3-3inst"},
}


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("trial", EXL3.values(), ids=EXL3)
def test_experts_in_exl3_follow_the_definition(trial: dict[str, Any], isa: str, caplog: pytest.LogCaptureFixture):
    made = moe(np.random.default_rng(4), tokens=TOKENS, width=128, **trial)
    reference, backend = RefBackend(), CpuBackend(2, isa=isa)
    for each in (reference, backend):
        each.load(OneOp(made.forward, [pack(weight, each) for weight in made.weights]))
    assert difference(*(each.logits(made.steps[0]) for each in (backend, reference))) < 2e-3
    assert not caplog.records


@pytest.mark.parametrize("side", [0, 1])
def test_experts_of_which_some_are_exl3_are_widened(side: int, caplog: pytest.LogCaptureFixture):
    made = moe(np.random.default_rng(4), tokens=3, width=128, spec=ExpertSpec(3, 2, 128), format="EXL3-3")
    plain = moe(np.random.default_rng(5), tokens=3, width=128, spec=ExpertSpec(3, 2, 128))
    made.weights[2][side][1] = plain.weights[2][side][1]
    reference, backend = RefBackend(), CpuBackend(2)
    for each in (reference, backend):
        each.load(OneOp(made.forward, [pack(weight, each) for weight in made.weights]))
    assert difference(*(each.logits(made.steps[0]) for each in (backend, reference))) < 2e-2
    assert len(caplog.messages) == 1
    assert "EXL3 weights become BF16" in caplog.text


def test_planned_experts_in_exl3_take_their_bits():
    tensor = replace(random_tensor(np.random.default_rng(0), "EXL3-3", 256, 128), role=Role.EXPERT_IN)
    assert CpuBackend(1).stored_as(tensor).kind == "EXL3-3"


def test_layers_of_several_shapes_take_turns():
    trials = [moe(np.random.default_rng(4), tokens=9, spec=spec) for spec in (CLAMPED, BIASED_GROUPS, CLAMPED)]
    answers = []
    for parts in ([0], [1], [2], [0, 1, 2]):
        backend = CpuBackend(2)
        packed = [[pack(weight, backend) for weight in trials[i].weights] for i in parts]

        def forward(ops: Any, parts: list[int] = parts, packed: list[Any] = packed) -> Any:
            given = [trials[i].forward(ops, *weights) for i, weights in zip(parts, packed, strict=True)]
            return given[0] if len(given) == 1 else ops.add(given[0], ops.add(given[1], given[2]))

        backend.load(OneOp(forward, []))
        answers.append(backend.logits(greedy_batch([Chunk(range(9), 0, [0])])))
    assert np.array_equal(answers[3], answers[0] + (answers[1] + answers[2]))


GOOD = {
    "top_k": 2,
    "act": "silu",
    "scoring": "softmax",
    "renormalize": True,
    "scale": 1.0,
    "groups": 2,
    "top_k_groups": 1,
    "group_score": "max",
}
NO_BIAS = np.zeros(0, np.float32)


def emit(up: list[Weight], down: list[Weight], bias: np.ndarray = NO_BIAS, scores: int = 4, **fields: Any) -> None:
    program = Program("auto", 1, "f16")
    buffers = [program.buffer("T", width, False) for width in (8, scores, 8)]
    program.moe(buffers[0], buffers[1], up, down, bias, buffers[2], **GOOD | fields)


def weights(width: int, rows: int, count: int = 4, format: str = "F32") -> list[Weight]:
    return [Weight(width, [(format, rows)]) for _ in range(count)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, "at least one expert and at most all"),
        ({"top_k": 5}, "at least one expert and at most all"),
        ({"top_k": 3}, "must hold enough"),
        ({"groups": 3}, "must be equal"),
        ({"groups": 0}, "must be equal"),
        ({"top_k_groups": 3}, "must be equal"),
        ({"scoring": "hardmax"}, "no scoring hardmax"),
        ({"act": "tanh"}, "no activation tanh"),
        ({"bias": np.zeros(3, np.float32)}, "one value for each expert"),
        ({"scores": 5}, "wide where 4 is needed"),
        ({"up": []}, "as many up weights as down"),
        ({"down": weights(6, 8, 3)}, "as many up weights as down"),
        ({"up": weights(8, 12, 3) + weights(8, 14, 1)}, "one shape"),
        ({"down": weights(6, 9)}, "one shape"),
        ({"up": weights(32, 12, format="Q8_0"), "down": weights(6, 32)}, "8 wide where 32 is needed"),
        ({"up": weights(128, 256, 3) + weights(128, 256, 1, "EXL3-3-mcg")}, "or none is"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str):
    emit(weights(8, 12), weights(6, 8))
    with pytest.raises(ValueError, match=message):
        emit(**{"up": weights(8, 12), "down": weights(6, 8)} | change)


def test_rows_must_be_prepared():
    program = Program("auto", 1, "f16")
    x, scores, out = (program.buffer("T", width, False) for width in (32, 4, 32))
    with pytest.raises(ValueError, match="prepared buffer"):
        program.moe(x, scores, weights(32, 12, format="Q8_0"), weights(6, 32), NO_BIAS, out, **GOOD)

"""The recorder: no buffer is used again while its value is needed, ops are fused where a backend can, and precision is
what an op asked for."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.cpu import CpuBackend
from penstock.backend.cpu.record import EMITTERS, capabilities
from penstock.backend.ref.ops import RefOps
from penstock.model.load import load_model, open_checkpoint
from penstock.model.ops import Ops
from penstock.model.program import PRODUCTS, TAKES_OVER, Buffer, Capabilities, OpNode, Recorder, record
from penstock.model.spec import ModelSpec
from tests.models.shapes import Shaped, execute, recorded, shaped_model

HERE = Path(__file__).parent
MODELS = sorted([*HERE.glob("goldens/*"), *HERE.glob("encoders/*")])
NO_GATE = {
    "gpt2",
    "starcoder2",
    "bert",
    "distilbert",
    "mpnet",
    "gptneox",
    "phi2",
    "falcon",
    "nemotronh",
}  # families whose MLPs have no gate
BESIDE = {"gemma4"}  # layers with experts have an MLP, too
READ_TWICE = {
    "bert",
    "distilbert",
    "mpnet",
    "phi2",
    "falcon",
}  # those whose norms are read by residuals, too, or by attention and MLP
NOTHING = Capabilities(fuses_gate=lambda weight, act: False)
GATES = replace(NOTHING, fuses_gate=lambda weight, act: act == "silu")

every_model = pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)


def layers_with_experts(spec: ModelSpec) -> int:
    """Returns how many layers have experts. In Nemotron-H, layers with attention or a state have nothing else."""
    without = spec.dense.union(spec.recurrent, spec.attention_layers) if spec.arch == "nemotronh" else spec.dense
    return 0 if spec.experts is None else spec.layers - len(without)


def any_capabilities(seed: int) -> Capabilities:
    """Returns a backend drawn at random: which gates it fuses, which weights want prepared rows, which ops compute in
    place, and which need scratch."""
    rng = np.random.default_rng(seed)
    kept: dict[Any, bool] = {}

    def draw(key: Any) -> bool:
        return kept.setdefault(key, bool(rng.random() < 0.5))

    def scratch(node: OpNode) -> list[Buffer]:
        value = node.outputs[0]
        own = Buffer(value.symbol, value.width, "activation" if seed % 2 else value.precision)
        return [own] * int(draw(node.op)) + [Buffer("T", 7, "float32")] * int(draw((node.op, 7)))

    return Capabilities(
        fuses_gate=lambda weight, act: draw(id(weight)),
        prepares=lambda weight: draw(("prepares", id(weight))),
        produces_prepared=frozenset(op for op in EMITTERS if draw(("produces", op))),
        in_place=frozenset(op for op in TAKES_OVER if draw(("in place", op))),
        scratch=scratch,
        uniform=bool(seed % 2),
    )


@every_model
@pytest.mark.parametrize("seed", range(8))
def test_a_buffer_is_not_written_while_a_later_node_reads_it(path: Path, seed: int):
    _, model = shaped_model(path)
    can = any_capabilities(seed)
    execute(record(model, can), can)


@every_model
def test_the_cpu_backends_program_keeps_values_as_long_as_they_are_read(path: Path):
    backend = CpuBackend(1)
    can = capabilities(backend._first)
    execute(record(load_model(open_checkpoint(path), backend), can), can)


def test_buffers_that_are_shared_wrongly_are_noticed():
    _, model = shaped_model(HERE / "goldens" / "llama3")
    can = replace(GATES, in_place=frozenset(TAKES_OVER))
    program = record(model, can)
    pairs = [
        (one, other)
        for one, other in combinations(range(len(program.buffers)), 2)
        if program.buffers[one] == program.buffers[other]
    ]
    assert pairs
    for one, other in pairs:
        places = tuple(tuple(one if place == other else place for place in node) for node in program.places)
        with pytest.raises(AssertionError):
            execute(replace(program, places=places), can)


@every_model
def test_buffers_are_shared_by_values_that_do_not_live_together(path: Path):
    _, model = shaped_model(path)
    values = sum(len(node.outputs) for node in recorded(model))
    fresh = len(record(model, NOTHING).buffers)
    in_place = len(record(model, replace(NOTHING, in_place=frozenset(TAKES_OVER))).buffers)
    assert in_place <= fresh < values


@every_model
@pytest.mark.parametrize("seed", range(4))
def test_fusing_changes_no_dataflow(path: Path, seed: int):
    """A gated product is its product and the gate after it; all else is as the model said it."""
    _, model = shaped_model(path)
    left = {node.outputs: node for node in recorded(model)}
    for node in record(model, any_capabilities(seed)).nodes:
        made = left.pop(node.outputs)
        if node.op == "gated_linear":
            made = left.pop(made.inputs)
            assert made.op == "linear"
        else:
            assert node.op == made.op
        assert node.inputs == made.inputs
        assert made.attributes.items() <= node.attributes.items()
    assert not left


@every_model
def test_products_and_silu_gates_are_fused(path: Path):
    """In every layer that has a gated MLP, and beside experts where there is a shared one."""
    spec, model = shaped_model(path)
    with_experts = layers_with_experts(spec)
    both = with_experts if spec.arch in BESIDE else 0
    dense, shared = spec.layers - with_experts + both, with_experts if spec.shared_hidden else 0
    gates = 0 if spec.arch in NO_GATE else dense + shared
    ops = [node.op for node in record(model, GATES).nodes]
    assert ops.count("gated_linear") == (gates if spec.act == "silu" else 0)
    gated = ops.count("act_and_mul") + ops.count("sparse_act_and_mul")
    assert gated == (0 if spec.act == "silu" else gates)
    assert "gated_linear" not in [node.op for node in record(model, NOTHING).nodes]


@every_model
def test_only_what_routers_heads_streams_and_indexes_choose_by_is_float32(path: Path):
    spec, model = shaped_model(path)
    nodes = recorded(model)
    router_logits = {node.inputs[1] for node in nodes if node.op == "moe"}
    selecting = {one for node in nodes if node.op == "select_positions" for one in (node.inputs[2], *node.outputs)}
    selecting |= {node.inputs[-1] for node in nodes if node.op in ("mix_streams", "correct_streams")}
    for node in nodes:
        for value in node.outputs:
            logits = value in router_logits | selecting or (value.symbol == "S" and value.width == spec.vocab)
            assert value.precision == ("float32" if logits else "activation")
    assert len(router_logits) == layers_with_experts(spec)
    if not spec.encoder:
        assert record(model, NOTHING).answer.precision == "float32"


@every_model
def test_rows_come_prepared_from_ops_that_nothing_else_reads(path: Path):
    spec, model = shaped_model(path)
    makers = frozenset(("add_norm", "add_layer_norm", "act_and_mul", "gated_linear"))
    nodes = record(model, replace(GATES, produces_prepared=makers)).nodes
    reads = [value for node in nodes for value in node.inputs]
    consumers = 0
    for before, node in pairwise(nodes):
        alone = reads.count(before.outputs[0]) == 1 and node.inputs[:1] == before.outputs[:1]
        wanted = before.op in makers and node.op in ("linear", "gated_linear") and alone
        assert (before.attributes.get("consumer") is not None) == wanted
        assert bool(node.attributes.get("prepared")) == wanted
        if wanted:
            assert before.attributes["consumer"] is node.weight
            consumers += 1
    assert bool(consumers) == (spec.arch not in READ_TWICE)


class Pooled:
    """Multiplies rows that embeddings are pooled from, too."""

    def forward(self, ops: Any) -> Any:
        x, _ = ops.add_norm(ops.embed(Shaped((9, 4))), None, Shaped((4,)), 1e-5)
        ops.pool(x)
        return ops.take_sampled(ops.linear(x, Shaped((6, 4))))


def test_rows_that_are_pooled_stay_as_they_are():
    program = record(Pooled(), replace(NOTHING, produces_prepared=frozenset(("add_norm",))))
    assert not any("consumer" in node.attributes for node in program.nodes)
    execute(program, NOTHING)


def test_a_product_of_which_something_else_is_made_is_not_fused_with_its_gate():
    class Twice:
        def forward(self, ops: Any) -> Any:
            product = ops.linear(ops.embed(Shaped((9, 4))), Shaped((8, 4)))
            gated = ops.act_and_mul(product, "silu")
            return ops.take_sampled(ops.add(gated, ops.linear(product, Shaped((4, 8)))))

    assert "gated_linear" not in [node.op for node in record(Twice(), GATES).nodes]


class Again:
    """Reads what in-place ops read once more."""

    def forward(self, ops: Any) -> Any:
        x, gain = ops.embed(Shaped((9, 4))), Shaped((4,))
        made = [ops.scale(x, 2.0), ops.soft_cap(x, 3.0), ops.activate(x, "silu"), ops.sigmoid_mul(x, x), ops.add(x, x)]
        normed, total = ops.add_norm(made[0], x, gain, 1e-5)
        shifted, sum_ = ops.add_layer_norm(made[1], x, gain, gain, 1e-5)
        for other in (*made, normed, total, shifted, sum_):
            x = ops.add(other, x)
        return ops.take_sampled(x)


def test_an_input_that_is_read_again_is_not_overwritten():
    can = replace(NOTHING, in_place=frozenset(TAKES_OVER))
    execute(record(Again(), can), can)


@every_model
def test_prepared_buffers_are_those_that_products_read_so(path: Path):
    _, model = shaped_model(path)
    program = record(
        model, replace(NOTHING, prepares=lambda weight: isinstance(weight, Shaped) and weight.rows % 3 == 0)
    )
    for node, places in zip(program.nodes, program.places, strict=True):
        if node.op in PRODUCTS and isinstance(node.weight, Shaped) and node.weight.rows % 3 == 0:
            assert program.buffers[places[0]].prepared


def names(protocol: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(protocol, inspect.isfunction) if not name.startswith("_")}


def test_every_op_is_recorded_defined_and_emitted():
    assert names(Recorder) == names(RefOps) == names(Ops)
    assert EMITTERS.keys() == names(Ops) - {"pool"} | {"gated_linear"}


def test_layers_are_known_by_what_they_keep():
    spec, model = shaped_model(HERE / "goldens" / "qwen35moe")
    program = record(model, NOTHING)
    assert sorted(program.attention_layers) == list(range(len(spec.cached_attention)))
    assert sorted(program.recurrent_layers) == list(range(len(spec.recurrent)))
    assert {program.nodes[i].outputs[0].symbol for i in range(program.first_sampled)} == {"T"}
    assert program.nodes[program.first_sampled].op == "take_sampled"


def test_an_attention_option_is_named_in_eight_files():
    """docs/families.md lists them. A family that uses the option and the inputs of tests are not counted."""
    source = HERE.parents[1] / "src" / "penstock"  # an installed package has no C++
    files = (path for path in source.rglob("*") if path.suffix in (".py", ".pyi", ".cpp", ".h"))
    named = {str(path.relative_to(source)) for path in files if "sinks" in path.read_text()}
    assert named - {"model/families/gptoss.py", "backend/ref/cases.py"} == {
        "model/spec.py",
        "backend/ref/ops.py",
        "backend/cpu/native/attention.h",
        "backend/cpu/native/attention.cpp",
        "backend/cuda/kernels/decode_attention.py",
        "backend/cuda/kernels/prefill_attention.py",
        "backend/cuda/kernels/hopper_attention.py",
        "backend/cuda/kernels/segmented_attention.py",
    }


def test_a_program_can_be_printed() -> None:
    _, model = shaped_model(HERE / "goldens" / "llama3")
    program = record(model, GATES)
    lines = str(program).splitlines()
    assert len(lines) == len(program.buffers) + len(program.nodes) + 1
    (first, *_), last = program.nodes, lines[-1]
    places = [f"b{place}" for place in program.places[0]]
    assert f"{first.op}({', '.join(places[: len(first.inputs)])} -> " in lines[len(program.buffers)]
    assert last == f"answer: b{program.answer_buffer}"
    assert all(
        f"b{place}" in line
        for line, places in zip(lines[len(program.buffers) :], program.places, strict=False)
        for place in places
    )

"""What the recorder makes of every family for the CUDA backend's launchers."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.backend.cuda.launchers import CAPABILITIES, LAUNCHERS
from penstock.model.ops import Ops
from penstock.model.program import record
from tests.models.shapes import execute, shaped_model

GOLDENS = sorted((Path(__file__).parent.parent / "models" / "goldens").iterdir())


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.name)
def test_values_stay_as_long_as_they_are_read(path: Path):
    _, model = shaped_model(path)
    program = record(model, CAPABILITIES)
    execute(program, CAPABILITIES)
    logits = [node.inputs[1] for node in program.nodes if node.op == "moe"]
    assert all(value.precision == "float32" for value in (*logits, program.answer))


def test_every_op_has_a_launcher():
    ops = {name for name in vars(Ops) if not name.startswith("_")}
    assert LAUNCHERS.keys() == ops - {"pool"} | {"gated_linear"}

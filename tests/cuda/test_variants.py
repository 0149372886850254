"""What ordinary steps launch is compiled before an engine is ready: each variant of a kernel is told from others by its
constants and by what Triton asks of its arguments. Kernels are not run here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda.backend import CudaBackend
from penstock.backend.cuda.graphs import of_each_kind
from penstock.backend.cuda.inputs import Shape
from penstock.backend.cuda.preparation import FIRST_SHAPES
from tests.cuda.device import DEVICE
from tests.cuda.test_memory import loaded

Variants = set[tuple[str, tuple[Any, ...]]]
ROWS, TOKENS, BLOCK = 32, 256, 4
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter says what is launched")


def kind_of(argument: Any) -> Any:
    """Returns what Triton compiles a kernel for, of an argument that is no constant."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int) and not isinstance(argument, bool):
        return argument == 1, argument % 16 == 0
    if isinstance(argument, tuple):
        return tuple(map(kind_of, argument))
    return type(argument)


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], Variants]:
    """Returns a function that returns the variants which a call launches."""
    launched: Variants = set()

    def note(self: Any, *args: Any, **options: Any) -> None:
        parameters = inspect.signature(self.fn).parameters
        given = inspect.signature(self.fn).bind(
            *args, **{name: options[name] for name in options if name in parameters}
        )
        given.apply_defaults()
        kinds = (
            repr(value) if "constexpr" in str(parameters[name].annotation) else kind_of(value)
            for name, value in given.arguments.items()
        )
        launched.add((self.fn.__name__, tuple(kinds)))

    monkeypatch.setattr(GridExecutor, "__call__", note)

    def of(call: Callable[[], object]) -> Variants:
        launched.clear()
        call()
        return set(launched)

    return of


@pytest.fixture
def backend() -> CudaBackend:
    made = loaded("llama3", CudaBackend(TOKENS, ROWS, device=DEVICE, dtype=torch.float32))
    made.reserve_kv(2048, BLOCK)
    made._steps.capture = True  # steps are padded as on a GPU; no graph is captured here
    return made


def rehearse(backend: CudaBackend, shapes: Sequence[Shape]) -> None:
    for shape in shapes:
        backend._preparation.rehearse(backend._programs[0], shape)


def warmed_up(backend: CudaBackend) -> list[Shape]:
    """Returns the shapes whose kernels are compiled before an engine is ready."""
    first = [backend._steps.shape_for(backend._programs[0], shape) for shape in FIRST_SHAPES]
    return first + [shape for _, shape in backend._preparation.of_each_kind()]


def test_shapes_of_each_kind_launch_all_that_others_do(backend: CudaBackend, variants: Any) -> None:
    ahead = [shape for _, shape in backend._preparation.shapes_ahead()]
    chosen = of_each_kind(ahead)
    assert len(chosen) < len(ahead) / 2
    assert variants(lambda: rehearse(backend, chosen)) == variants(lambda: rehearse(backend, ahead))


def prompt(start: int, count: int, row: int, shared: int = 0) -> Chunk:
    """Returns tokens of a row whose first blocks are those of all rows."""
    blocks = -(-(start + count) // BLOCK)
    table = [*range(shared), *range(16 * row + 16, 16 * row + 16 + blocks - shared)]
    return Chunk([1] * count, start, table, slot=row, sample=1)


STEPS = {
    "prompts": [prompt(0, 48, row) for row in range(5)],
    "the same prompts again": [prompt(44, 7, row) for row in range(ROWS)],
    "again, and each is cached but for its last token": [prompt(47, 1, row) for row in range(ROWS)],
    "long prompts of which little is cached": [prompt(4, 60, row) for row in range(4)],
    "answers": [prompt(50, 1, row) for row in range(20)],
    "answers and a prompt": [*(prompt(50, 1, row) for row in range(20)), prompt(0, 100, 21)],
    "answers behind one prefix": [prompt(3600, 1, row, shared=895) for row in range(24)],
    "these and a prompt": [*(prompt(3600, 1, row, shared=895) for row in range(24)), prompt(0, 100, 25)],
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_waits_for_no_compiler(step: str, backend: CudaBackend, variants: Any) -> None:
    program = backend._programs[0]
    known = variants(lambda: rehearse(backend, warmed_up(backend)))
    shape = backend._steps.shape_for(program, backend._steps.plan(program, greedy_batch(STEPS[step])).shape)
    assert variants(lambda: rehearse(backend, [shape])) <= known


def test_cached_prompts_attend_in_runs_and_answers_share_a_prefix(backend: CudaBackend) -> None:
    """Says what the steps above are about: the first kernels that are compiled do not have them."""
    planned = {step: backend._steps.plan(backend._programs[0], greedy_batch(STEPS[step])).shape for step in STEPS}
    assert planned["the same prompts again"].run > 0
    assert planned["answers behind one prefix"].shared > 0
    assert planned["these and a prompt"].shared > 0 < planned["these and a prompt"].tiles

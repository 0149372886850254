"""These tests run on a GPU where there is one, else in Triton's interpreter and our own of Gluon, else not at all.

The interpreter is slow, so there a sample of the cases is run that launches every kernel at least once; all of them run
with PENSTOCK_CUDA_TESTS=all. On a GPU all run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.missing import MISSING

FOLDER = Path(__file__).parent
WITHOUT_TRITON = "test_here.py"  # says why the others do not run
collect_ignore = [path.name for path in FOLDER.glob("test_*.py") if MISSING and path.name != WITHOUT_TRITON]
# Files that interpret no kernels, or hardly any.
WHOLE = {"test_compiles.py", "test_gluon.py", "test_storage.py", "test_tilings.py"}
COUNTS = {  # cases in the sample, of a test or of an op; of all others one
    "attend_mla": 5,
    "test_a_pair_by_itself_and_in_a_block_give_the_same": 3,
    "test_chunks_splits_and_company_change_no_bit": 4,
    "test_contexts_are_expanded_in_pieces": 2,
    "test_copies_beside_steps_move_what_they_would_alone": 8,
    "test_every_kind_of_prompt": 7,
    "test_few_rows": 2,
    "test_launches_are_the_same_at_every_number_of_rows": 7,
    "test_one_row": 2,
    "test_parts_have_bits_and_factors_of_their_own": 2,
    "test_pieces_of_contexts": 3,
    "test_updates_are_added": 4,
    "test_values_are_those_of_the_definition": 3,
    "test_values_of_16_bits": 3,
    "test_values_of_8_bits": 2,
    "test_whole_prompt": 5,
}
LAST = "test_every_kernel_was_launched"


def sampled() -> bool:
    """Returns whether a sample is run instead of everything."""
    wanted = os.environ.get("PENSTOCK_CUDA_TESTS", "")
    if MISSING or wanted == "all":
        return False
    import torch

    return wanted == "sample" or not torch.cuda.is_available()


def group_of(item: pytest.Item) -> tuple[str, str, str]:
    """Returns what has cases in the sample of its own: a test, and an op where a test's cases are cases of ops."""
    callspec = getattr(item, "callspec", None)
    case = callspec.params.get("case") if callspec else None
    return str(item.path), getattr(item, "originalname", item.name), getattr(case, "op", "")


def sample_of(items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns the same cases of every test each time: the middle one, or several at equal distances."""
    groups: dict[tuple[str, str, str], list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item), []).append(item)
    kept: set[int] = set()
    for (path, name, op), cases in groups.items():
        count = len(cases) if Path(path).name in WHOLE else min(COUNTS.get(op or name, 1), len(cases))
        kept |= {id(cases[(2 * i + 1) * len(cases) // (2 * count)]) for i in range(count)}
    return [item for item in items if id(item) in kept]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if FOLDER in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.cuda)
    if not sampled():
        return
    kept = sample_of(ours)
    kept.sort(key=lambda item: item.name == LAST)
    others = [item for item in items if FOLDER not in item.path.parents]
    config.hook.pytest_deselected(items=[item for item in ours if item not in kept])
    items[:] = [*others, *kept]


@pytest.fixture
def ordered_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the interpreter add up every element of a product in one order, as tensor cores do. What BLAS does depends
    on where in a matrix an element is."""
    import numpy as np

    from tests.cuda.device import DEVICE

    def product(a: Any, b: Any, dtype: Any) -> Any:
        return np.add.reduce(a.astype(dtype)[..., :, :, None] * b.astype(dtype)[..., None, :, :], axis=-2)

    if DEVICE == "cpu":
        monkeypatch.setattr(np, "matmul", product)


@pytest.fixture(scope="session")
def launched() -> set[str]:
    """The names of the kernels that were launched in this session."""
    return LAUNCHED


LAUNCHED: set[str] = set()


@pytest.fixture(scope="session", autouse=True)
def count_launches() -> Iterator[None]:
    """Notes the name of every kernel that is launched, in the interpreter and on a GPU."""
    if MISSING:
        yield
        return
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.runtime import JITFunction
    from triton.runtime.interpreter import InterpretedFunction

    from tests.cuda.device import DEVICE
    from tests.cuda.gluon.launch import run

    with pytest.MonkeyPatch.context() as patch:
        for kind in (JITFunction, InterpretedFunction):
            patch.setattr(kind, "run", noted(kind.run))
        if DEVICE == "cpu":
            patch.setattr(GluonJITFunction, "run", noted(run))
        yield


def noted(run: Any) -> Any:
    def run_and_note(self: Any, *args: Any, **options: Any) -> Any:
        LAUNCHED.add(self.fn.__name__)
        return run(self, *args, **options)

    return run_and_note

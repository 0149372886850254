"""Says why the other tests of this folder do not run, where they do not."""

from __future__ import annotations

import pytest

from tests.cuda.missing import MISSING


def test_these_tests_can_run_here() -> None:
    if MISSING:
        pytest.skip(MISSING)

"""These tests run on a GPU where there is one, else in Triton's interpreter, else not at all."""

from __future__ import annotations

import pytest

from tests.cuda.missing import MISSING

collect_ignore_glob = ["test_[!h]*.py"] if MISSING else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "cuda" in item.path.parts:
            item.add_marker(pytest.mark.cuda)

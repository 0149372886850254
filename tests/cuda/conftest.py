"""These tests run on a GPU where there is one, else in Triton's interpreter, else not at all."""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np
import pytest


def why_not() -> str:
    """Why the tests cannot run here; empty when they can."""
    if find_spec("torch") is None or find_spec("triton") is None:
        return "needs torch and triton: pip install 'penstock[cuda]'"
    import torch

    if torch.cuda.is_available():
        return ""
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        return "Triton's interpreter needs numpy < 2.4"
    return ""


MISSING = why_not()
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header() -> str:
    return f"cuda tests: {MISSING or 'collected'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "cuda" in item.path.parts:
            item.add_marker(pytest.mark.cuda)

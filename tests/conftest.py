"""Fixtures shared by every test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's file, fetched on first use as a user's first run would."""
    given = os.environ.get("PENSTOCK_TEST_MODEL")
    if given:
        return Path(given)
    from penstock.store import fetch

    return fetch("smollm2")

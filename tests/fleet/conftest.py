"""Fleets on a Ray cluster run with `pytest -m ray`, where Ray is installed."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "ray" not in str(config.getoption("-m")):
        for item in items:
            if item.get_closest_marker("ray"):
                item.add_marker(pytest.mark.skip(reason="starts a Ray cluster: runs with -m ray"))

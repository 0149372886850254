"""Tests that no module, constructor or class grows beyond its limit. Those that are over it today may only shrink."""

from __future__ import annotations

import ast
import json

import pytest

from tests.house import shape


@pytest.mark.parametrize("kind", shape.LIMITS)
def test_nothing_grows_beyond_its_limit(kind: str) -> None:
    recorded: dict[str, int] = json.loads(shape.RECORDED.read_text())[kind]
    now = shape.measured()[kind]
    grown = {place: number for place, number in now.items() if number > recorded.get(place, shape.LIMITS[kind])}
    assert not grown, f"{kind}: at most {shape.LIMITS[kind]}, or the number in shape.json: split it by what it does"
    shrunk = {place for place, number in recorded.items() if now.get(place, 0) < number}
    assert not shrunk, "it has shrunk: record that with `python -m tests.house.shape`"


def test_each_kind_is_measured() -> None:
    code = """
from penstock.a import B as B
class Wide:
    def __init__(self, a, b, *, c=1):
        self.a, self.b = a, b
        about = a, b
        self.c = call(*about)
    def other(self): ...
"""
    found = {kind: number for kind, _, number in shape.of_module(ast.parse(code), "wide.py")}
    assert found == {
        "imports": 1,
        "packed tuples": 1,
        "renamings": 1,
        "methods": 2,
        "constructor arguments": 3,
        "attributes": 3,
    }

"""What needs a package that is not installed is refused, and says which."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.attacks.conftest import serving

SCHEMA = {  # one answer, and something that a grammar does not enforce
    "type": "object",
    "properties": {"a": {"const": "x"}},
    "required": ["a"],
    "additionalProperties": False,
    "dependentSchemas": {"a": {"not": {"required": ["b"]}}},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}


@pytest.mark.parametrize("package", ["llguidance", "jsonschema"])
def test_structured_output_without_its_package(reciter: Path, tmp_path: Path, package: str) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('no {package}', name={package!r})")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with serving(reciter, tmp_path / "home", env={"PYTHONPATH": paths}) as server:
        for stream in (False, True):
            refused = server.chat(response_format=FORMAT, stream=stream, max_tokens=64)
            assert refused.status_code in (400, 501), refused.text
            assert package in refused.json()["error"]["message"]
        if package == "llguidance":  # which the engine needs, too
            refused = server.chat(guided_regex="x+")
            assert refused.status_code in (400, 501), refused.text
            assert package in refused.json()["error"]["message"]
        assert server.chat().status_code == 200

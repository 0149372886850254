"""Plug-ins of other packages: the example package works, and a broken one is reported with its name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from penstock import plugins
from penstock.backend.ref import RefBackend
from penstock.errors import ConfigError
from penstock.ipc.inprocess import InProcessClient
from penstock.model.load import load_model, open_checkpoint
from penstock.server import dialects
from penstock.server.http.endpoint import Dialect
from penstock.text.tool_formats import find_tool_format
from tests.server import toys
from tests.server.conftest import serving

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "plugin"
TIED = REPOSITORY / "tests" / "models" / "goldens" / "tied"


def list_entries(folder: Path, name: str, groups: dict[str, dict[str, str]]) -> None:
    """Writes the metadata by which Python finds the entry points of an installed package."""
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    sections = (
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in each.items()) for group, each in groups.items()
    )
    (about / "entry_points.txt").write_text("\n".join(sections))


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder in which packages are found, and nothing remembered of what was found before."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for each in (plugins.plugins, dialects.dialects):
        each.cache_clear()
    yield tmp_path
    for each in (plugins.plugins, dialects.dialects):
        each.cache_clear()


@pytest.fixture
def example(searched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    monkeypatch.syspath_prepend(str(EXAMPLE))
    list_entries(searched, project["name"], project["entry-points"])


@pytest.mark.usefixtures("example")
def test_a_dialect_is_served_and_documented() -> None:
    with serving(InProcessClient(toys.open_parrot, "parrot"), toys.ToyText(), "parrot") as server:
        answer = server.post("/ask", question="[hello]", max_tokens=8)
        assert answer.status_code == 200, answer.text
        assert answer.json()["answer"]
        assert server.post("/ask", question=1).status_code == 400
        document: dict[str, Any] = server.get("/openapi.json").json()
        assert "question" in document["components"]["schemas"]["Question"]["properties"]


@pytest.mark.usefixtures("example")
def test_a_family_is_found_and_runs(tmp_path: Path) -> None:
    folder = tmp_path / "tidy"
    shutil.copytree(TIED, folder)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["TidyForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.spec.arch, checkpoint.spec.logit_scale) == ("tidy", 0.5)
    load_model(checkpoint, RefBackend())


@pytest.mark.usefixtures("example")
def test_a_tool_format_is_recognised_by_its_markers() -> None:
    assert find_tool_format("{{ '<do>' }} {{ '</do>' }}").name == "tidy"
    assert find_tool_format("", "tidy").name == "tidy"


BROKEN = {
    "penstock_nowhere:DIALECT": "cannot be imported: ModuleNotFoundError",
    "json:nothing": "cannot be imported: AttributeError",
    "json:loads": "must be a Dialect, and is a function",
}


@pytest.mark.parametrize("value", BROKEN)
def test_a_broken_plugin_is_reported(searched: Path, value: str) -> None:
    list_entries(searched, "broken-package", {"penstock.dialects": {"bad": value}})
    with pytest.raises(ConfigError, match=r"broken-package 1\.0") as raised:
        dialects.dialects()
    assert BROKEN[value] in raised.value.message
    assert "docs/plugins.md" in raised.value.message


def test_a_plugin_that_lacks_something_is_reported(searched: Path) -> None:
    list_entries(searched, "broken-package", {"penstock.families": {"Odd": "json"}})
    found = plugins.plugin("penstock.families", "Odd")
    assert found is not None
    with pytest.raises(ConfigError, match="lacks read_hf"):
        found.load(has=("loads", "read_hf"))


def test_two_plugins_of_one_name_are_refused(searched: Path) -> None:
    for package in ("first", "second"):
        list_entries(searched, package, {"penstock.dialects": {"same": f"{package}:DIALECT"}})
    with pytest.raises(ConfigError, match="two packages have a plug-in 'same'"):
        dialects.dialects()


def test_no_plugin_is_no_error(searched: Path) -> None:
    assert plugins.plugin("penstock.dialects", "none") is None
    assert all(isinstance(each, Dialect) for each in dialects.dialects())


@pytest.mark.skipif(find_spec("setuptools") is None, reason="needs setuptools")
def test_the_example_can_be_built(tmp_path: Path) -> None:
    folder, built = tmp_path / "plugin", tmp_path / "built"
    shutil.copytree(EXAMPLE, folder)
    built.mkdir()
    steps = ["build_py", "--build-lib", str(built), "egg_info", "--egg-base", str(built)]
    command = [sys.executable, "-c", "import setuptools; setuptools.setup()", *steps]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
    (entries,) = built.glob("*.egg-info/entry_points.txt")
    assert "ask = penstock_example.dialect:DIALECT" in entries.read_text()
    assert (built / "penstock_example" / "endpoints.py").exists()

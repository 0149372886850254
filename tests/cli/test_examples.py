"""Runs the programs of examples/ and of the pages of clients that no quickstart runs, against one server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config import Config
from penstock.ipc.spawn import ProcessClient
from penstock.model.load import load_text
from tests.server.conftest import Server, serving

ROOT = Path(__file__).parents[2]
EXAMPLES = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".sh", ".mjs")}
QUICKSTARTS = "".join(page.read_text() for page in (ROOT / "docs" / "start").glob("*.md"))
ABOUT = {  # what each prints
    "chat.py": r"> Name a river.*\n\S.*\n> Through",
    "streaming.py": r"(?s)(first token after \d+ ms.*){4}",
    "python_api.py": r"The capital of France is -> Paris",
    "curl.sh": r'"chat\.completion"[^§]*"message"[^§]*"done":true[^§]*"n_predict":20',
}
CLIENTS = {"openai": r"\n576\n$", "anthropic": r"\d+\n$", "ollama": r"\['smollm2:latest'\]\n576\n$"}
WITH_AGENTS = {"ai_sdk.mjs"}  # tests/agents runs it: it needs npm


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Server]:
    config = Config(model=str(smollm2), name="smollm2", max_len=1024, max_rows=4)
    with serving(ProcessClient(config), load_text(smollm2), "smollm2", smollm2) as server:
        yield server


def printed(*command: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_run_and_listed() -> None:
    by_quickstarts = {name for name in EXAMPLES if f"examples/{name}" in re.sub(r"\]\([^)]*\)", "", QUICKSTARTS)}
    assert by_quickstarts | ABOUT.keys() | WITH_AGENTS == EXAMPLES
    listed = re.findall(r"^\| \[`([^`]*)`\]", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(EXAMPLES)


@pytest.mark.parametrize("name", ABOUT)
def test_an_example_prints_what_it_is_about(server: Server, name: str) -> None:
    run = sys.executable if name.endswith(".py") else "bash"
    assert re.search(ABOUT[name], told := printed(run, str(ROOT / "examples" / name), server.url)), told


@pytest.mark.parametrize("name", CLIENTS)
def test_the_program_of_a_client_page_runs(server: Server, name: str) -> None:
    page = (ROOT / "docs" / "clients" / f"{name}.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    told = printed(sys.executable, "-c", program.replace("http://127.0.0.1:8000", server.url))
    assert re.search(CLIENTS[name], told), told

"""A dialect is its folder: without it, the server starts and answers all others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.server.dialects import dialects
from penstock.server.routes import OWN, STREAMS

ROOT = Path(penstock.__file__).parent
REPOSITORY = Path(__file__).parents[2]
ALL = {each.name: each for each in dialects()}

ANSWERS = """
import sys
from pathlib import Path
from starlette.testclient import TestClient
from penstock.ipc.inprocess import InProcessClient
from penstock.server import Setup, Space, create_app
from penstock.server.dialects import dialects
from tests.server import toys

missing, folder = sys.argv[1], Path(sys.argv[2])
assert missing not in {each.name for each in dialects()}
pool = toys.pool_of(InProcessClient(toys.open_parrot, "parrot"), toys.ToyText(), "parrot")
body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "model": "parrot"}
with TestClient(create_app(pool, Setup(space=Space(folder)))) as client:
    for path in ("/v1/chat/completions", "/v1/messages"):
        gone = missing == ("openai" if "chat" in path else "anthropic")
        assert client.post(path, json=body).status_code == (404 if gone else 200), path
    if missing in ("sglang", "tgi"):
        assert client.post("/generate", json={"inputs" if missing == "sglang" else "text": "hi"}).status_code == 200
    assert client.get("/openapi.json").status_code == 200
    assert client.get("/metrics").status_code == 200
"""


def copy_without(dialect: str, folder: Path) -> None:
    """Makes a copy of the package that lacks the dialect's folder. Everything else in it is a link."""
    place, original = folder / "penstock", ROOT
    for inner in ("server", "dialects", dialect):
        place.mkdir(parents=True)
        for each in original.iterdir():
            if each.name not in (inner, "__pycache__"):
                (place / each.name).symlink_to(each)
        place, original = place / inner, original / inner


@pytest.mark.long(cases=2)
@pytest.mark.parametrize("dialect", ALL)
def test_the_server_answers_without_a_dialect(dialect: str, tmp_path: Path) -> None:
    copy_without(dialect, tmp_path)
    path = f"{tmp_path}:{REPOSITORY}"
    arguments = [sys.executable, "-c", ANSWERS, dialect, str(tmp_path / "data")]
    done = subprocess.run(arguments, env={"PYTHONPATH": path, "PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [*ALL, "", "streams"])
def test_all_references_lead_somewhere(name: str) -> None:
    dialect = (ALL | {"": OWN, "streams": STREAMS})[name]
    dialect.load()
    for entry in dialect.routes:
        dialect.operation(entry)
        if isinstance(entry.endpoint, str):
            module, _, rest = entry.endpoint.partition(":")
            holder, _, method = rest.rpartition(".")
            found = dialect.find(f"{module}:{holder or method}")
            assert callable(getattr(found, method) if holder else found)
    for reference in dialect.metrics.values():
        assert dialect.find(reference)("model")

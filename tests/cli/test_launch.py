"""`penstock launch` finds or starts a server, and starts programs that know of it."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.ipc.inprocess import InProcessClient
from penstock.server.access.guard import Rules
from tests.cli.conftest import Outcome
from tests.server import toys
from tests.server.conftest import Server, serving

MODEL = "toy/parrot"
Penstock = Callable[..., Outcome]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(InProcessClient(toys.open_parrot, "parrot"), toys.ToyText(), MODEL) as server:
        yield server


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that write down what they were started with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("claude", "codex", "opencode", "aider"):
        program = folder / name
        program.write_text(
            f"#!{sys.executable}\n"
            "import json, os, sys, urllib.request\n"
            "url = os.environ.get('OPENAI_API_BASE')\n"
            "models = json.load(urllib.request.urlopen(url + '/models')) if url else None\n"
            f"told = {{'arguments': sys.argv[1:], 'environment': dict(os.environ), 'models': models}}\n"
            f"open({str(tmp_path / 'told.json')!r}, 'w').write(json.dumps(told))\n"
            "sys.exit(3)\n"
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "told.json"


def test_what_cannot_be_launched_is_said(penstock: Penstock, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    code, _, err = penstock("launch", "emacs")
    assert (code, "PROGRAM is one of claude, codex, opencode, aider" in err) == (2, True)
    code, _, err = penstock("launch", "codex", "--url", server.url)
    assert (code, "codex is not installed: run `npm install -g @openai/codex`" in err) == (1, True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        code, _, err = penstock("launch", "claude", "--print", "--url", f"http://127.0.0.1:{free.getsockname()[1]}")
    assert (code, "no server answers" in err) == (1, True)


def test_a_server_that_needs_a_key_says_so(penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys.json"
    _, out, _ = penstock("keys", "add", "me", "--file", keys)
    client = InProcessClient(toys.open_parrot, "parrot")
    with serving(client, toys.ToyText(), MODEL, rules=Rules(keys=keys)) as locked:
        assert "set PENSTOCK_API_KEY" in penstock("launch", "claude", "--print", "--url", locked.url)[2]
        monkeypatch.setenv("PENSTOCK_API_KEY", out.split()[-1])
        assert (
            f"ANTHROPIC_AUTH_TOKEN={out.split()[-1]}" in penstock("launch", "claude", "--print", "--url", locked.url)[1]
        )


def printed(penstock: Penstock, server: Server, program: str) -> str:
    code, out, err = penstock("launch", program, "--print", "--url", f"{server.url}/", "--", "-p", "a b")
    assert (code, err) == (0, "")
    assert out.endswith("-p 'a b'\n")
    return out


def test_each_program_is_told_in_its_own_way(penstock: Penstock, server: Server) -> None:
    told = printed(penstock, server, "claude")
    assert f"export ANTHROPIC_BASE_URL={server.url}\n" in told
    assert f"export ANTHROPIC_MODEL={MODEL}\n" in told
    told = printed(penstock, server, "codex")
    assert f'base_url = "{server.url}/v1", wire_api = "responses"' in told
    assert "model_context_window=512" in told
    told = printed(penstock, server, "opencode")
    config: Any = json.loads(re.search(r"OPENCODE_CONFIG_CONTENT='(.*)'\n", told)[1])  # type: ignore[index]
    assert config["model"] == f"penstock/{MODEL}"
    assert config["provider"]["penstock"]["options"]["baseURL"] == f"{server.url}/v1"
    told = printed(penstock, server, "aider")
    assert f"export OPENAI_API_BASE={server.url}/v1\n" in told
    assert f"aider --model openai/{MODEL} -p" in told


def test_the_program_takes_the_place_of_the_command(
    penstock: Penstock, server: Server, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda *told: begun.append(told))
    assert penstock("launch", "claude", "--url", server.url, "--", "-p", "--model", "x")[0] == 0
    ((file, words, environment),) = begun
    assert (file, words) == ("claude", ["claude", "-p", "--model", "x"])
    assert (environment["ANTHROPIC_BASE_URL"], environment["PATH"]) == (server.url, os.environ["PATH"])


def test_a_server_is_started_where_none_runs_and_ends_with_the_program(
    penstock: Penstock, reciter: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.launch.DEFAULT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    code, _, err = penstock("launch", "aider", "--model", reciter, "--max-len", 256, "--", "notes.txt")
    assert code == 3
    assert f"starting penstock serve {reciter} --port 0 --max-len=256" in err
    told = json.loads(installed.read_text())
    assert told["arguments"] == ["--model", "openai/reciter", "notes.txt"]
    assert told["models"]["data"][0]["id"] == "reciter"
    port = int(told["environment"]["OPENAI_API_BASE"].split(":")[2].partition("/")[0])
    with socket.socket() as after:
        assert after.connect_ex(("127.0.0.1", port)) != 0


def test_a_server_that_does_not_start_says_why(
    penstock: Penstock, tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.launch.DEFAULT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GG")
    code, _, err = penstock("launch", "aider", "--model", broken)
    assert (code, "the server did not start" in err, "malformed_file" in err) == (1, True, True)

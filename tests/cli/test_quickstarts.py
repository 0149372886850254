"""Runs the commands of the quickstarts as they stand there, each page in a folder and a store of its own.

Blocks marked `sh` run in order, in one shell that ends at the first failure. A server is started in the background,
and a later one takes its place. Four things differ from a reader's terminal: the port, the folder of the store,
`--device cuda` means the CPU, and blocks after a comment `not run: REASON` are left out.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "start").glob("*.md"))
TASKS = {  # what the output of each page shows
    "laptop": r'"content":',
    "gpu-server": r"penstock_requests_finished_total",
    "agents": r"turn 2: answer\(",
    "rag": r"The cat is called Ada\.",
    "batch": r"completed BatchRequestCounts\(completed=4",
    "fleet": r"ready.*the answer is the same",
    "structured-output": r"kind='(bug|question|praise)'",
    "tool-calls": r"the model calls temperature\('Oslo'\)",
    "many-models": r"pirate.*without: .*with: ",
    "team": r"alice.*smollm2",
}
LEFT_OUT = {  # why some blocks are not run
    "CI installs the package before",
    "needs a terminal",
    "needs a GPU",
    "fetches the agents",
    "fetches models from a hub",
    "needs a Ray cluster",
}
BLOCK = re.compile(r"(?:<!-- not run: ([^\n]*) -->\n)?^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SERVER = re.compile(r"^penstock (fleet )?serve\b", re.MULTILINE)
SECONDS = 240
PRELUDE = """\
set -euo pipefail
server=
stop() { if [ -n "$server" ]; then kill -INT "$server"; wait "$server" || true; server=; fi; }
trap stop EXIT
curl() { command curl --fail-with-body --silent --show-error "$@"; }
start() {
  stop
  "$@" &
  server=$!
  until command curl --silent --output /dev/null "$PENSTOCK_URL/health"; do kill -0 "$server"; sleep 0.2; done
}
"""


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yields why a block of shell commands is not run, or an empty text, and the block."""
    yield from BLOCK.findall(page.read_text())


def script(page: Path, port: int) -> str:
    """Returns a page's commands as one script."""
    commands = "".join(block for reason, block in blocks(page) if not reason)
    commands = SERVER.sub(r"start \g<0>", commands).replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    return PRELUDE + commands.replace("--device cuda", "--device cpu")


def test_every_quickstart_is_a_task() -> None:
    assert [page.stem for page in PAGES] == sorted(TASKS)
    assert len(TASKS) == 10
    assert {reason for page in PAGES for reason, _ in blocks(page) if reason} == LEFT_OUT


@pytest.fixture
def environment(smollm2: Path, tmp_path: Path) -> dict[str, str]:
    """A reader's environment: `penstock` and the packages of this Python, and a store with the default model."""
    store = tmp_path / "store"
    for kept in ("records/smollm2.json", "models/smollm2", "machine.json"):  # else the page fetches and measures
        if (there := smollm2.parents[2] / kept).exists():
            (store / kept).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if there.is_dir() else shutil.copyfile
            copy(there, store / kept)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "penstock").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock "$@"\n')
    (programs / "penstock").chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "HOME": str(tmp_path),
        "PATH": os.pathsep.join((str(programs), str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PENSTOCK_HOME": str(store),
        "PENSTOCK_PORT": str(port),
        "PENSTOCK_URL": f"http://127.0.0.1:{port}",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_quickstart_runs_as_written(page: Path, environment: dict[str, str], tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "examples").symlink_to(ROOT / "examples")
    shell = subprocess.Popen(
        ["bash", "-c", script(page, int(environment["PENSTOCK_PORT"]))],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = shell.communicate(timeout=SECONDS)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, printed
    assert re.search(TASKS[page.stem], printed, re.DOTALL), printed

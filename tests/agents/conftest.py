"""Agents and client libraries as npm and pip install them, and a server whose model is played: see scripted.py.

They run with `pytest -m agents`. PENSTOCK_AGENTS is a folder that keeps the packages (2 GB) between runs; without it
they are installed into a temporary one.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.ipc.inprocess import InProcessClient
from tests.agents.scripted import Script, ScriptedText
from tests.server import toys
from tests.server.conftest import Server, serving

CLAUDE, CLAUDE_VERSION = "@anthropic-ai/claude-code-linux-x64", "2.1.325"
CODEX, CODEX_VERSION = "@openai/codex", "0.166.0"
INSTALL_SECONDS = 400  # for all packages together
RUN_SECONDS = 90
MODEL = "toy/scripted"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "agents" not in str(config.getoption("-m")):
        for item in items:
            if item.get_closest_marker("agents"):
                item.add_marker(pytest.mark.skip(reason="fetches 2 GB: runs with -m agents"))


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all that is installed."""
    folder = os.environ.get("PENSTOCK_AGENTS")
    return Path(folder).resolve() if folder else tmp_path_factory.mktemp("agents")


@pytest.fixture(scope="session")
def packages(kept: Path) -> Path:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("the packages are for Linux on x86-64")
    for package, version in ((CLAUDE, CLAUDE_VERSION), (CODEX, CODEX_VERSION)):
        npm_install(kept, package, version)
    return kept / "node_modules"


def npm_install(folder: Path, package: str, version: str) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not here")
    known = folder / "node_modules" / package / "package.json"
    if known.exists() and f'"version": "{version}"' in known.read_text():
        return
    options = ("--no-audit", "--no-fund", "--prefix", str(folder))
    _install(package, ["npm", "install", *options, f"{package}@{version}"])


def pip_install(folder: Path, *requirements: str) -> Path:
    """Returns a Python that has these packages, in an environment of its own."""
    python, known = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join(requirements)
    if python.exists() and known.exists() and known.read_text() == wanted:
        return python
    _install(requirements[0], [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)])
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    _install(requirements[0], [*pip, "install", "--no-compile", *requirements])
    known.write_text(wanted)
    return python


def _install(package: str, command: list[str]) -> None:
    began = time.monotonic()
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=max(INSTALL_SECONDS - sum(SPENT), 1))
    except subprocess.TimeoutExpired:
        pytest.skip(f"{package} was not installed within {INSTALL_SECONDS} seconds, other packages included")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{package} cannot be installed: {error.stderr.decode()[-300:]}")
    finally:
        SPENT.append(time.monotonic() - began)


SPENT: list[float] = []  # seconds, on installing


class Workplace(NamedTuple):
    """A folder with one file, in which an agent runs with a home of its own."""

    folder: Path
    environment: dict[str, str]

    @property
    def file(self) -> Path:
        return self.folder / "notes.txt"

    def launch(self, program: str, server: Server, *arguments: str) -> str:
        """Runs the agent to its end and returns what it printed."""
        command = [sys.executable, "-m", "penstock", "launch", program, "--url", server.url, "--", *arguments]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def workplace(packages: Path, tmp_path: Path) -> Workplace:
    return make_workplace(tmp_path, packages / CLAUDE, packages / ".bin")


def make_workplace(under: Path, *programs: Path) -> Workplace:
    """Returns a new place whose agents are in these folders."""
    folder, home = under / "work", under / "home"
    folder.mkdir()
    home.mkdir()
    places = (*programs, os.environ["PATH"])
    environment = {
        "HOME": str(home),
        "PATH": os.pathsep.join(map(str, places)),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    place = Workplace(folder, environment | {"DISABLE_AUTOUPDATER": "1"})
    place.file.write_text("The colour is red.\n")
    return place


@pytest.fixture
def play() -> Iterator[Callable[[Script], Server]]:
    """Serves a model that a script plays."""
    running = []

    def begin(script: Script) -> Server:
        engine = InProcessClient(lambda: toys.open_paced_parrot(0.0, grammars=toys.FreeGrammars()), "parrot")
        running.append(serving(engine, ScriptedText(script), MODEL))
        return running[-1].__enter__()

    yield begin
    for each in running:
        each.__exit__(None, None, None)

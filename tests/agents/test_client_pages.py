"""The programs on the pages of clients, with the client libraries as installed, ask the default model. For aider and
Continue the model is played."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.agents.conftest import MODEL, make_workplace, npm_install, pip_install
from tests.agents.test_agents import DONE, TASK, Play, check_edited
from tests.agents.test_libraries import AI_SDKS, INSTRUCTOR, LITELLM, LLAMA_INDEX, OFFLINE, server
from tests.server.conftest import Server

__all__ = ["server"]  # the fixture

pytestmark = pytest.mark.agents

ROOT = Path(__file__).parents[2]
PAGE_SECONDS = 240  # the first import of such a library compiles all of it
LANGCHAIN = ("langchain==1.4.7", "langchain-openai==1.7.3")
AIDER = "aider-chat==0.86.2"
CONTINUE, CONTINUE_VERSION = "@continuedev/cli", "1.5.47"
PYTHON_PAGES = {  # the packages of each, and what its program prints last
    "langchain": (LANGCHAIN, r"name='.*' kilometres=-?\d+\n576\n$"),
    "llama-index": (LLAMA_INDEX, r"\S\n$"),
    "litellm": (LITELLM, r"576\n$"),
    "instructor": (INSTRUCTOR, r"^kind='(bug|question|praise)' urgent=(True|False)\n$"),
}


def program(page: str, language: str, server: Server) -> str:
    """Returns the program of a page, or the settings on it, with the address of this server."""
    text = (ROOT / "docs" / "clients" / f"{page}.md").read_text()
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return found.replace("http://127.0.0.1:8000", server.url)


def printed(folder: Path, *command: str) -> str:
    environment = {"HOME": str(folder), "PATH": "/usr/bin:/bin"} | OFFLINE
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PAGE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_a_python_page_runs(server: Server, kept: Path, page: str) -> None:
    packages, about = PYTHON_PAGES[page]
    python = pip_install(kept / page, *packages)
    told = printed(kept / page, str(python), "-I", "-c", program(page, "python", server))
    assert re.search(about, told), told


@pytest.fixture(scope="module")
def ai_sdk(kept: Path) -> Path:
    """A folder with the packages of the Vercel AI SDK."""
    versions = AI_SDKS[-1]
    folder = kept / f"ai-sdk-{versions['ai']}"
    for package, version in versions.items():
        npm_install(folder, package, version)
    return folder


def test_the_page_of_the_ai_sdk_runs(server: Server, ai_sdk: Path) -> None:
    node = shutil.which("node") or pytest.skip("node is not here")
    told = printed(ai_sdk, node, "--input-type=module", "-e", program("vercel-ai-sdk", "js", server))
    assert told.endswith("576\n")


def test_the_example_of_the_ai_sdk_runs(server: Server, ai_sdk: Path) -> None:
    node = shutil.which("node") or pytest.skip("node is not here")
    shutil.copy(ROOT / "examples" / "ai_sdk.mjs", ai_sdk)  # node looks for packages beside the file
    assert re.search(r'\{"name":".*","kilometres":-?\d+\}\n$', printed(ai_sdk, node, "ai_sdk.mjs", server.url))


def test_aider_edits_a_file(kept: Path, tmp_path: Path, play: Play) -> None:
    place = make_workplace(tmp_path, pip_install(kept / "aider", AIDER).parent)
    server = play(lambda *_: f"{DONE}\n\nnotes.txt\n```\nThe color is red.\n```\n")
    place.environment.update(OFFLINE, PYTHONPATH=str(ROOT / "src"))  # aider has other versions of some packages
    quiet = ("--yes-always", "--no-git", "--no-check-update", "--no-show-model-warnings")
    check_edited(place, place.launch("aider", server, *quiet, "--message", TASK, "notes.txt"))


def test_the_settings_of_continue_work(kept: Path, tmp_path: Path, play: Play) -> None:
    npm_install(kept / "continue", CONTINUE, CONTINUE_VERSION)
    server = play(lambda messages, _: f"You said: {messages[-1]['content']}")
    file = tmp_path / "config.yaml"
    file.write_text(program("continue", "yaml", server).replace("model: smollm2", f"model: {MODEL}"))
    command = str(kept / "continue" / "node_modules" / ".bin" / "cn")
    assert printed(tmp_path, command, "--config", str(file), "-p", "Say hello.") == "You said: Say hello.\n"

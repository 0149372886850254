"""Older majors of the SDKs as judges. They cannot share an environment with the newest, so each is fetched into a
folder of its own, with what it needs that is not here, and judges in a process of its own.

Without a package index they are skipped; PENSTOCK_OLDER_SDKS=required makes that a failure.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock.engine.assemble import assemble
from penstock.ipc.inprocess import InProcessClient
from penstock.text.tool_formats import AnswerFormat, find_tool_format
from tests.server import toys
from tests.server.conftest import Server, serving

OLDER = ["openai==1.99.9", "openai==2.8.0", "anthropic==0.60.0", "anthropic==1.17.0", "ollama==0.5.4"]
REQUIRED = os.environ.get("PENSTOCK_OLDER_SDKS") == "required"
MODEL = "toy/parrot"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
LIMITS = toys.LIMITS._replace(max_len=2048, num_blocks=1024)


class Hermes(toys.ToyText):
    format = AnswerFormat(find_tool_format("", "hermes"), ("<think>", "</think>"))


@pytest.fixture(scope="module")
def hermes() -> Iterator[Server]:
    client = InProcessClient(lambda: assemble(toys.Parrot(LIMITS), LIMITS), "parrot")  # type: ignore[arg-type]
    with serving(client, Hermes(), MODEL) as server:
        yield server


def installed(wanted: Requirement) -> bool:
    try:
        return wanted.specifier.contains(version(wanted.name), prereleases=True)
    except PackageNotFoundError:
        return False


def missing(folder: Path) -> set[str]:
    """What the packages in a folder need that is neither there nor here."""
    there = list(distributions(path=[str(folder)]))
    names = {canonicalize_name(each.name) for each in there}
    needed = [Requirement(line) for each in there for line in each.requires or ()]
    needed = [each for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return {str(each) for each in needed if canonicalize_name(each.name) not in names and not installed(each)}


def fetch(folder: Path, *packages: str) -> None:
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    words += ["--retries", "1", "--timeout", "15", "--target", str(folder), *packages]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        told = f"pip cannot fetch {' '.join(packages)}: {done.stderr.strip()[-300:]}"
        pytest.fail(told) if REQUIRED else pytest.skip(told)


@pytest.fixture
def sdk(request: pytest.FixtureRequest) -> tuple[str, Path]:
    package: str = request.param
    home = request.config.cache.mkdir(f"sdks-{sys.version_info[0]}.{sys.version_info[1]}")
    folder, making = home / package, home / f"{package}.part"
    if not folder.exists():
        fetch(making, package)
        while more := missing(making):
            fetch(making, *more)
        making.rename(folder)
    return package, folder


@pytest.mark.parametrize("sdk", OLDER, indirect=True)
def test_an_older_sdk_is_content(hermes: Any, sdk: tuple[str, Path]) -> None:
    package, folder = sdk
    name, _, number = package.partition("==")
    judge = Path(__file__).parent / "older" / f"judge_{name}.py"
    done = subprocess.run(
        [sys.executable, str(judge), hermes.url, number, MODEL, CALL],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "judged\n"
    hermes.until_idle()
    assert hermes.client.stats.blocks_used == 0

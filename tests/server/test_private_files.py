"""Nothing that holds prompts, keys or who used how much can be read by other users, whatever the umask is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.ipc.inprocess import InProcessClient
from penstock.keys import changing
from penstock.server.access.usage import UsageRecord
from penstock.server.batch.archive import Space
from penstock.store.blobs import Upload
from penstock.store.derived import DerivedModel, save_derived
from penstock.system.files import make_private_file
from tests.server import toys
from tests.server.conftest import serving

MODEL = "toy/parrot"


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> list[Path]:
    """Locks aside, which are empty."""
    found = [path for path in folder.rglob("*") if path.is_dir() or path.stat().st_size]
    return [path for path in found if path.stat().st_mode & 0o077]


def test_what_a_server_keeps(tmp_path: Path) -> None:
    usage = UsageRecord(tmp_path / "state" / "usage.db")
    client = InProcessClient(toys.open_parrot, "parrot")
    space = Space(tmp_path / "data", answers=True)
    with serving(client, toys.ToyText(), MODEL, space=space, usage=usage) as server:
        fields = {"model": MODEL, "messages": [{"role": "user", "content": "[hello]"}], "store": True}
        assert server.post("/v1/chat/completions", **fields).status_code == 200
        assert server.post("/v1/responses", model=MODEL, input="[hello]").status_code == 200
        sdk = server.sdk()
        sdk.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        assert open_to_others(tmp_path) == []
    assert {"usage.db", "archive.db"} <= {path.name for path in tmp_path.rglob("*")}


def test_a_usage_record_of_before_is_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    path.touch(0o644)
    UsageRecord(path)
    assert open_to_others(tmp_path) == []


def test_keys_uploads_and_derived_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    with changing(tmp_path / "keys" / "keys.json"):
        pass
    save_derived(DerivedModel(name="x", base="y", system="secret"))
    upload = Upload("sha256:" + "0" * 64, 0)
    upload.write(b"weights")
    opened = open_to_others(tmp_path)
    assert not [path for path in opened if path.is_file()]
    assert tmp_path / "keys" not in opened


def test_a_file_that_exists_keeps_its_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("kept")
    make_private_file(path)
    assert path.read_text() == "kept"
    assert path.stat().st_mode & 0o777 == 0o600

"""Paths that requests give: below which folders they may lie, and paths that are no files."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import Forbidden
from penstock.server import Setup, Space, create_app
from penstock.server.models.pool import ModelPool, PoolSettings
from penstock.server.models.request_paths import RequestPaths, request_paths
from tests.server import conftest
from tests.server.test_adapter_routes import MODELS, TIED, said, source

DEVICES = ["/dev/zero", "/proc/self/mem", "/dev/tty", "/etc", "/proc"]


@pytest.fixture(scope="module")
def allowed() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder).resolve()


@pytest.fixture(scope="module")
def server(allowed: Path) -> Iterator[Any]:
    """Serves a model whose adapters and weights may come from one folder only."""
    pool = ModelPool([source("tied")], PoolSettings(paths=RequestPaths((allowed,))))
    with tempfile.TemporaryDirectory() as folder:
        yield from conftest._serving(None, create_app(pool, Setup(space=Space(Path(folder)))))


@pytest.fixture(scope="module")
def open_server() -> Iterator[Any]:
    """Serves a model whose adapters and weights may come from anywhere."""
    with tempfile.TemporaryDirectory() as folder:
        yield from conftest._serving(None, create_app(ModelPool([source("tied")]), Setup(space=Space(Path(folder)))))


def update(server: Any, path: object) -> Any:
    return server.http.post("/update_weights", json={"path": str(path)})


def load(server: Any, path: object) -> Any:
    return server.post("/v1/load_lora_adapter", lora_name="pirate", lora_path=str(path))


def test_only_files_below_the_allowed_folders_are_opened(server: Any, allowed: Path, tmp_path: Path) -> None:
    shutil.copytree(TIED, allowed / "pirate")
    (allowed / "out").symlink_to(TIED)
    (tmp_path / "in").symlink_to(allowed / "pirate")
    weights = MODELS / "goldens" / "tied"
    for path in (
        TIED,
        tmp_path / "none",
        "/etc/shadow",
        allowed / "out",
        f"{allowed}/../x",
        "~root/x",
        "a\0b",
        "x" * 5000,
    ):
        for route, fields in (
            ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(path)}),
            ("/load_lora_adapter", {"lora_name": "x", "lora_path": str(path)}),
            ("/update_weights", {"path": str(path)}),
            ("/update_weights_from_disk", {"model_path": str(path)}),
        ):
            answer = server.http.post(route, json=fields)
            assert answer.status_code == 403, (path, route, answer.text)
            assert "--allowed-path" in answer.text
    assert update(server, weights).status_code == 403
    assert load(server, tmp_path / "in").status_code == 200
    assert said(server, "pirate") != said(server)
    assert server.post("/v1/unload_lora_adapter", lora_name="pirate").status_code == 200
    shutil.copytree(weights, allowed / "weights")
    assert update(server, allowed / "weights").status_code == 200


@pytest.mark.parametrize(
    ("folders", "host", "keyless", "expected"),
    [
        ([], "127.0.0.1", True, None),
        ([], "::1", True, None),
        ([], "localhost", True, None),
        ([], "0.0.0.0", False, None),
        ([], "0.0.0.0", True, ()),
        ([], "::", True, ()),
        ([], "example.org", True, ()),
        (["/a/../b"], "127.0.0.1", True, (Path("/b"),)),
        (["/a", "/c"], "0.0.0.0", False, (Path("/a"), Path("/c"))),
    ],
)
def test_where_strangers_may_reach_the_server_no_path_is_allowed_by_default(
    folders: list[str], host: str, keyless: bool, expected: tuple[Path, ...] | None
) -> None:
    paths = request_paths(folders, host, keyless)
    assert paths == RequestPaths(expected)
    if expected == ():
        with pytest.raises(Forbidden):
            paths.check("/etc/hostname")


@pytest.mark.parametrize("path", DEVICES)
def test_devices_and_folders_of_the_system_are_refused(open_server: Any, path: str) -> None:
    before = said(open_server)
    for answer in (load(open_server, path), update(open_server, path)):
        assert answer.status_code == 400, answer.text
        assert "hostname" not in answer.text
        assert "passwd" not in answer.text
    assert said(open_server) == before


@pytest.mark.parametrize("file", ["", "adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_as_an_adapter_is_refused_at_once(open_server: Any, tmp_path: Path, file: str) -> None:
    folder = shutil.copytree(TIED, tmp_path / "adapter")
    pipe = folder / file if file else tmp_path / "pipe.gguf"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    answer = load(open_server, folder if file else pipe)
    assert answer.status_code == 400
    assert "is not a regular file" in answer.json()["error"]["message"]
    assert load(open_server, TIED).status_code == 200, "the next one is read"
    assert open_server.post("/v1/unload_lora_adapter", lora_name="pirate").status_code == 200


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_pipe_as_weights_is_refused_at_once(open_server: Any, tmp_path: Path, file: str) -> None:
    folder = shutil.copytree(MODELS / "goldens" / "tied", tmp_path / "weights")
    (folder / file).unlink()
    os.mkfifo(folder / file)
    answer = update(open_server, folder)
    assert answer.status_code == 400
    assert "is not a regular file" in answer.json()["error"]["message"]


def test_an_error_does_not_list_what_a_folder_has(open_server: Any, tmp_path: Path) -> None:
    (tmp_path / "secret-plan.txt").touch()
    (tmp_path / "adapter_config.json").write_text(json.dumps({}))
    answer = load(open_server, tmp_path)
    assert answer.status_code == 400
    assert "has no adapter_model.safetensors: give a folder" in answer.json()["error"]["message"]
    assert "secret-plan" not in answer.text


def test_an_adapter_with_a_slow_pattern_stops_nobody(open_server: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(TIED, tmp_path / "slow")
    config = json.loads((folder / "adapter_config.json").read_text())
    slow = {"(?:[a-z0-9_.]+)+!": 3}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"rank_pattern": slow, "alpha_pattern": slow}))
    assert load(open_server, folder).status_code == 200
    assert said(open_server, "pirate") != said(open_server)
    assert open_server.post("/v1/unload_lora_adapter", lora_name="pirate").status_code == 200

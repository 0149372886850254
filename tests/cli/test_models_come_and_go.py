"""A server of the whole store, or of a folder, sees models that come and go while it runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import ollama
import pytest

from penstock.cli.served_models import ModelFinder
from penstock.store.paths import Entry, ModelPaths, size_of, write_record
from tests.cli.conftest import RECITED

WAIT = 120.0  # seconds after which something hangs
ENGINE = ("--device", "ref", "--max-len", 128, "--kv-memory", 2_000_000)


def pulled(home: Path, name: str, model: Path) -> None:
    """Puts a model into the store, as a pull does."""
    paths = ModelPaths(home, name)
    shutil.copytree(model, paths.folder)
    write_record(paths, Entry(name, "hf:a/b", paths.folder, size_of(paths.folder), "", "2026-01-01T00:00:00+00:00"))


def removed(home: Path, name: str) -> None:
    ModelPaths(home, name).record.unlink()
    shutil.rmtree(ModelPaths(home, name).folder)


@contextmanager
def serving(*words: object) -> Iterator[httpx.Client]:
    command = [sys.executable, "-m", "penstock", "serve", "--port", "0", *map(str, (*words, *ENGINE))]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        lines = iter(process.stderr.readline, "")
        address = next(found[0] for line in lines if (found := re.search(r"http://[\d.:]+", line)))
        with httpx.Client(base_url=address, timeout=WAIT) as client:
            yield client
    finally:
        process.terminate()
        process.communicate(timeout=WAIT)


def names(client: httpx.Client) -> set[str]:
    return {model["id"] for model in client.get("/v1/models").json()["data"]}


def answer(client: httpx.Client, model: str) -> str:
    said = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    response = client.post("/v1/chat/completions", json=said)
    if response.status_code != 200:
        return str(response.status_code)
    return str(response.json()["choices"][0]["message"]["content"])


def pids(client: httpx.Client) -> dict[str, int]:
    return {model["name"]: model["pid"] for model in client.get("/health").json()["models"]}


def test_a_server_of_the_whole_store_serves_what_is_in_it(own_store: Path, reciter: Path) -> None:
    one, two, three, four = (f"hf:a/{name}" for name in ("one", "two", "three", "four"))
    pulled(own_store, one, reciter)
    pulled(own_store, two, reciter)
    with serving() as client:
        assert names(client) == {one, two}
        assert answer(client, one) == RECITED
        engine = pids(client)[one]
        assert answer(client, three) == "404"
        pulled(own_store, three, reciter)
        assert answer(client, three) == RECITED
        assert names(client) == {one, two, three}
        removed(own_store, two)
        removed(own_store, three)
        assert names(client) == {one, three}  # it is awake
        assert answer(client, three) == RECITED
        assert client.post("/models/unload", json={"model": three}).status_code == 200
        assert names(client) == {one}
        sdk = ollama.Client(str(client.base_url), timeout=WAIT)
        sdk.copy(one, "twin")
        assert answer(client, "twin") == RECITED
        sdk.delete("twin")
        assert pids(client) == {one: engine}  # it was never loaded again
        sdk.delete(one)  # unloads it
        assert names(client) == set()
        assert answer(client, one) == answer(client, "gpt-4o") == "404"
        pulled(own_store, four, reciter)
        assert answer(client, four) == answer(client, "gpt-4o") == RECITED


def test_a_server_of_a_folder_serves_what_is_in_it(tmp_path: Path, reciter: Path) -> None:
    folder = tmp_path / "models"
    shutil.copytree(reciter, folder / "one")
    with serving("--models-dir", folder) as client:
        engine = pids(client)["one"]
        assert answer(client, "one") == RECITED
        (folder / "two").mkdir()
        for file in reciter.iterdir():  # a copy in progress: config.json comes at any time
            assert "two" not in names(client) or (folder / "two" / "config.json").exists()
            shutil.copy(file, folder / "two")
        assert answer(client, "two") == RECITED
        ollama_sdk = ollama.Client(str(client.base_url), timeout=WAIT)
        with pytest.raises(ollama.ResponseError, match="being served"):
            ollama_sdk.delete("two")
        shutil.rmtree(folder / "two")
        assert client.post("/models/unload", json={"model": "two"}).status_code == 200
        assert pids(client) == {"one": engine}


def test_one_max_len_is_cut_for_models_with_a_shorter_context(tmp_path: Path, reciter: Path) -> None:
    for name, context in (("short", 96), ("long", 4096)):
        config = json.loads((shutil.copytree(reciter, tmp_path / name) / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    with serving(tmp_path / "short", tmp_path / "long") as client:
        assert answer(client, "short") == answer(client, "long") == RECITED
        listed = {model["id"]: model["max_model_len"] for model in client.get("/v1/models").json()["data"]}
        assert listed == {"short": 96, "long": 128}


def test_a_folder_that_can_no_longer_be_read_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.gguf").touch()
    finder = ModelFinder([], str(tmp_path), "")

    def refuse(_: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.listdir", refuse)
    assert finder.find_again() is None
    assert [each.name for each in finder.found] == ["a"]
    assert f"--models-dir {tmp_path} cannot be read: Permission denied" in caplog.text


def test_a_finder_looks_again_only_if_something_has_changed(
    own_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(b"GGUF")
    finder = ModelFinder([], str(folder), "first")
    assert [each.name for each in finder.found] == ["first"]
    assert finder.changes
    (folder / "b.gguf").write_bytes(b"GGUF")
    assert [each.name for each in finder.find_again() or ()] == ["first", "b"]
    assert finder.find_again() is None
    long_ago = time.time() - 60
    os.utime(folder, (long_ago, long_ago))
    finder.find_again()
    monkeypatch.setattr(ModelFinder, "_all", lambda _: pytest.fail("it looked again"))
    assert finder.find_again() is None
    monkeypatch.undo()
    (folder / "b.gguf").unlink()
    assert [each.name for each in finder.find_again() or ()] == ["first"]
    shutil.rmtree(folder)
    assert finder.find_again() is None  # the server goes on with what it has
    assert not ModelFinder([str(tmp_path)], "", "").changes

"""Models that were made here, as the rest of the store knows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import store
from penstock.cli.served_models import short_name
from penstock.config import packed_folder
from penstock.errors import ModelNotFound
from penstock.store import DerivedModel, Upload


def uploaded(content: bytes, digest: str) -> None:
    with Upload(f"sha256:{digest}", len(content)) as arriving:
        arriving.write(content)
        arriving.keep()


def test_a_model_of_a_file_is_found_and_removed(content: bytes, digest: str, own_store: Path) -> None:
    uploaded(content, digest)
    store.save_derived(DerivedModel(name="me/mine:v1", blob=f"sha256:{digest}", system="Hi"))
    entry = store.find("me/mine:v1")
    assert entry is not None
    assert (entry.path, entry.size) == (store.fetch("me/mine:v1"), len(content))
    assert store.sha256_of(entry.path) == digest
    assert short_name("me/mine:v1", entry.path) == "me/mine:v1"
    packed = packed_folder(entry.path) / "a.packed"
    packed.parent.mkdir(parents=True)
    packed.write_bytes(bytes(500))
    assert store.remove("me/mine:v1") == len(content) + 500
    assert [file for file in own_store.rglob("*") if file.is_file() and file.parent.name != "locks"] == []
    with pytest.raises(ModelNotFound):
        store.remove("me/mine:v1")


def test_a_model_of_another_is_that_ones_files(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    store.save_derived(DerivedModel(name="mine", base="model", path=str(file)))
    assert store.fetch("mine") == store.fetch("mine:latest") == file
    assert short_name("mine", file) == "mine"
    assert store.remove("mine") == 0
    assert file.exists()


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store.save_derived(DerivedModel(name="mine", base="smollm2"))
    Path("mine").write_bytes(b"GGUF")
    assert store.fetch("mine") == Path("mine")
    assert store.find("mine") is None


def test_what_it_is_made_of_may_be_gone() -> None:
    store.save_derived(DerivedModel(name="mine", base="hf:a/b"))
    assert store.find("mine") is None
    assert [made.name for made in store.derived_models()] == ["mine"]

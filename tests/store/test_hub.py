from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

WEIGHTS = b"weights" * 20_000
FILES = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "README.md": b"about",
    "pytorch_model.bin": b"pickled",
    "original/model.safetensors": b"again",
}
REPOS = {
    "team/folder": FILES,
    "team/files": {"a.Q4_0.gguf": WEIGHTS, "sub/b.gguf": b"b"},
    "team/split": {"q/m-00001-of-00002.gguf": b"1", "q/m-00002-of-00002.gguf": b"2", "q/n-00001-of-00002.gguf": b"3"},
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
        small = {"rfilename": name, "size": len(content)}
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
from penstock.store import entries, fetch
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

    assert {file.name: file.read_bytes() for file in Path(folder).iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors", "tokenizer.json")
    }
    assert Path(a).read_bytes() == WEIGHTS
    assert Path(b).read_bytes() == b"b"
    assert names == ["hf:team/files/a.Q4_0.gguf", "hf:team/files/sub/b.gguf", "hf:team/folder"]

    unnamed, absent, unknown, damaged = refused
    assert (
        unnamed == "model_not_found: team/files has no safetensors weights; its GGUF files are a.Q4_0.gguf, sub/b.gguf"
    )
    assert absent.startswith("model_not_found: team/files has no file c.gguf")
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


def test_a_hub_that_cannot_be_reached(own_store: Path) -> None:
    (said,), _ = fetch_all("http://127.0.0.1:9", own_store, "hf:team/folder")
    assert said.startswith("download_error: hf:team/folder could not be fetched: ")

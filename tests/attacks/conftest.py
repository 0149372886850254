"""A running `penstock serve` that is attacked over its sockets."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.conftest import write_reciter

WAIT = 60.0  # seconds after which something hangs
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


class Attacked:
    """A server process, and ways to talk to it."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = httpx.URL(url)
        self.logged = ""
        self.connect()
        threading.Thread(target=self._read, daemon=True).start()

    def connect(self) -> None:
        """Begins with new connections."""
        self.http = httpx.Client(base_url=self.url, timeout=WAIT)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.http.post(CHAT, json={"messages": HELLO, "max_tokens": 8, **fields})

    def metric(self, name: str, **headers: str) -> float:
        text = self.http.get("/metrics", headers=headers).text
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)} (.*)$", text, re.MULTILINE))

    @contextmanager
    def raw(self) -> Iterator[socket.socket]:
        with socket.create_connection((self.url.host, self.url.port or 80), timeout=WAIT) as wire:
            yield wire

    @property
    def memory(self) -> int:
        """The bytes that it has in memory."""
        return self._status("VmRSS")

    @property
    def most_memory(self) -> int:
        """The most bytes that it has had in memory."""
        return self._status("VmHWM")

    def _status(self, name: str) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(rf"{name}:\s+(\d+) kB", status)[0]) * 1024

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.logged += line


def read_all(wire: socket.socket) -> bytes:
    """All that comes until the connection is closed."""
    said = b""
    while more := wire.recv(2**16):
        said += more
    return said


def post(body: bytes | str | dict[str, Any], version: str = "1.1", **headers: str) -> bytes:
    """The bytes of a POST to the chat route."""
    body = json.dumps(body) if isinstance(body, dict) else body
    body = body.encode() if isinstance(body, str) else body
    lines = {"host": "localhost", "content_length": str(len(body)), **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
    return f"POST {CHAT} HTTP/{version}\r\n{head}\r\n".encode() + body


@contextmanager
def serving(model: Path, home: Path, *words: object, **settings: Any) -> Iterator[Attacked]:
    engine = ("--max-len", 4096, "--max-rows", 8, "--name", "it", "--port", 0)
    command = [sys.executable, "-m", "penstock", "serve", *map(str, (model, *engine, *words))]
    environment = {**os.environ, "PENSTOCK_HOME": str(home), **settings.pop("env", {})}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, **settings)
    try:
        assert process.stderr
        lines = iter(process.stderr.readline, "")
        found = next((found[0] for line in lines if (found := re.search(r"http://[\d.:]+", line))), None)
        assert found, "the server did not start"
        yield Attacked(process, found)
    finally:
        process.terminate()
        process.wait(WAIT)


@pytest.fixture(scope="package")
def reciter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reciter(tmp_path_factory.mktemp("reciter") / "reciter", endless=False)


@pytest.fixture(scope="package")
def babbler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reciter(tmp_path_factory.mktemp("babbler") / "babbler", endless=True)


@pytest.fixture(scope="package")
def attacked(babbler: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """A server without keys that renders templates of requests. Its model recites without end."""
    with serving(babbler, tmp_path_factory.mktemp("home"), "--trust-request-chat-template") as server:
        yield server

"""Clients that send requests without waiting for answers: those who read get all in order, the others cost little."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from penstock.ipc.inprocess import InProcessClient
from penstock.server.access import protocol
from tests.attacks.conftest import Attacked, read_all, serving
from tests.server import toys
from tests.server.conftest import Server
from tests.server.conftest import serving as serving_toy

CROWD = 160
ALLOWED = 50 * 2**20  # bytes that the crowd may cost


def get(path: str, *, last: bool = False) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{'connection: close' if last else 'x: y'}\r\n\r\n".encode()


@pytest.fixture(scope="module")
def fresh(babbler: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with serving(babbler, tmp_path_factory.mktemp("home")) as server:
        yield server


@pytest.mark.parametrize("path", ["/health", "/openapi.json"])
def test_a_crowd_that_does_not_read_costs_little(fresh: Attacked, path: str) -> None:
    before = fresh.memory
    flood = get(path) * (256_000 // len(get(path)))
    with ExitStack() as stack:
        wires = [stack.enter_context(fresh.raw()) for _ in range(CROWD)]
        for wire in wires:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.setblocking(False)
        sent = dict.fromkeys(wires, 0)
        for _ in range(8):  # meanwhile the server answers others
            for wire in wires:
                with suppress(BlockingIOError):
                    sent[wire] += wire.send(flood[sent[wire] % len(flood) :])
            assert fresh.http.get("/health").status_code == 200
        assert fresh.memory - before < ALLOWED
    fresh.connect()
    assert fresh.http.get("/health").status_code == 200
    assert fresh.memory - before < ALLOWED


def test_requests_leave_no_garbage_that_waits_for_the_collector(fresh: Attacked) -> None:
    """Those of one connection that reads are many more than are collected at once."""
    before = fresh.memory
    with fresh.raw() as wire:
        for _ in range(10):
            wire.sendall(get("/ping") * 500)
            said = b""
            while said.count(b"HTTP/1.1 200 ") < 500 or not said.endswith(b"\r\n\r\n"):
                said += wire.recv(2**16)
    assert fresh.memory - before < 6 * 2**20


def test_who_reads_gets_all_answers_in_order(fresh: Attacked) -> None:
    paths = [f"/v1/models/none{index}" for index in range(300)]
    with fresh.raw() as wire:
        wire.sendall(b"".join(get(path) for path in paths) + get("/v1/models/final", last=True))
        said = read_all(wire).decode()
    assert re.findall(r"/?none\d+|final", said) == [*(path.rpartition("/")[2] for path in paths), "final"]


def test_bodies_between_requests(fresh: Attacked) -> None:
    """A request may follow a body of either kind in the same packet; a client may close its side behind all."""
    text = b'{"content": "' + b"a" * 5000 + b'"}'
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n"
    sized = head + b"content-length: %d\r\n\r\n" % len(text) + text
    chunked = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)
    with fresh.raw() as wire:
        wire.sendall((sized + get("/ping") + chunked + get("/version")) * 10)
        wire.shutdown(socket.SHUT_WR)
        said = read_all(wire)
    assert said.count(b"HTTP/1.1 200 OK") == 40
    assert said.count(b'"tokens"') == 20
    assert said.count(b'"version"') == 10


# -- the limits on what waits -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    with serving_toy(InProcessClient(toys.open_slow_parrot, "parrot"), toys.ToyText(), "toy/parrot") as server:
        yield server


def ask(wire: socket.socket, then: bytes) -> None:
    body = b'{"prompt": "[hello world how are you]", "max_tokens": 8}'
    wire.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body))
    wire.sendall(body + then)


def connected(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def test_beyond_the_limit_of_all_connections_the_current_answer_is_the_last(
    slow: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_ALL_PIPELINED", 4)
    with connected(slow) as wire:
        ask(wire, get("/health") * 5)
        said = read_all(wire)
    assert said.count(b"HTTP/1.1 200 OK") == 1
    assert b'"choices"' in said
    with connected(slow) as wire:  # the others have left no trace
        ask(wire, get("/version") * 3 + get("/version", last=True))
        assert read_all(wire).count(b"HTTP/1.1 200 OK") == 5


def test_behind_chunks_one_read_holds_no_more_requests_than_a_connection_may_have(
    slow: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b'{"prompt": "[hello world how are you]", "max_tokens": 8}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    monkeypatch.setattr(protocol, "MAX_PIPELINED", 4)
    with connected(slow) as wire:
        wire.sendall(head)
        wire.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) + get("/version") * 200)
        said = read_all(wire)
    assert said.count(b"HTTP/1.1 200 OK") == 1
    assert b'"choices"' in said


def test_heads_that_are_not_whole_have_a_limit_together(slow: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is refused; when the others are whole, they are answered."""
    monkeypatch.setattr(protocol, "MAX_HEADS", 40_000)
    begun = b"GET /version HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 15_000
    with ExitStack() as stack:
        wires = [stack.enter_context(connected(slow)) for _ in range(3)]
        for wire in wires:
            wire.sendall(begun)
            slow.get("/health")  # the server has read it by now
        assert read_all(wires[0]).startswith(b"HTTP/1.1 408 ")
        for wire in wires[1:]:
            wire.sendall(b"\r\nconnection: close\r\n\r\n")
            assert read_all(wire).startswith(b"HTTP/1.1 200 ")
        for _ in range(10):  # heads that were whole count no more
            with connected(slow) as wire:
                wire.sendall(begun + b"\r\nconnection: close\r\n\r\n")
                assert read_all(wire).startswith(b"HTTP/1.1 200 ")


def test_an_empty_line_does_not_keep_an_idle_connection(slow: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "IDLE_SECONDS", 0.5)
    with connected(slow) as wire:
        wire.sendall(get("/version"))
        assert wire.recv(2**16).startswith(b"HTTP/1.1 200 OK")
        wire.sendall(b"\r\n")
        assert read_all(wire) == b""

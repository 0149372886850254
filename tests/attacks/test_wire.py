"""What clients do to a server's sockets: nothing of it costs others a place, and everyone can read their answer."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.attacks.conftest import CHAT, HELLO, WAIT, Attacked, post, read_all, serving

BODY = {"messages": HELLO, "max_tokens": 8}
HALF = b'{"messages": [{"role": "user", "content": "He'


@pytest.fixture(scope="module")
def narrow(babbler: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """Has 2 places, may open few files, and answers a token at a time."""

    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))

    words = ("--max-rows", 1, "--max-waiting", 1, "--drain-seconds", 0, "--speculation", "off")
    with serving(babbler, tmp_path_factory.mktemp("home"), *words, preexec_fn=few_files) as server:
        yield server


def test_bodies_that_do_not_come_hold_no_place(narrow: Attacked) -> None:
    with ExitStack() as stack:
        for _ in range(20):
            wire = stack.enter_context(narrow.raw())
            wire.sendall(post(HALF, content_length="1000"))
        time.sleep(0.2)
        assert narrow.chat().status_code == 200


def test_connections_stay_below_the_limit_on_files(narrow: Attacked) -> None:
    """The limit is raised at the start, idle connections make room for others, and no failed accept is logged."""
    soft, _ = Path(f"/proc/{narrow.process.pid}/limits").read_text().split("Max open files")[1].split()[:2]
    assert int(soft) == 256
    with ExitStack() as stack:
        idle = [stack.enter_context(narrow.raw()) for _ in range(300)]
        for _ in range(3):
            narrow.connect()  # one that was idle may have been closed
            assert narrow.chat().status_code == 200
        assert idle[0].recv(1) == b""  # the longest idle one
    assert "accept" not in narrow.logged
    assert "Traceback" not in narrow.logged


def test_clients_that_do_not_read_hold_neither_memory_nor_others_up(narrow: Attacked) -> None:
    """There are two places, and three answers that nobody reads."""
    body = {"messages": HELLO, "max_tokens": 3900, "stream": True, "logprobs": True, "top_logprobs": 20}
    before = narrow.most_memory
    with ExitStack() as stack:
        generated = narrow.metric("penstock_generated_tokens_total")
        for _ in range(3):
            wire = stack.enter_context(narrow.raw())
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.sendall(post(body))
            generated += 3900
            until(lambda: narrow.metric("penstock_generated_tokens_total") >= generated)  # noqa: B023
        assert narrow.chat().status_code == 200
        assert narrow.most_memory - before < 64 * 2**20


def test_a_refused_body_of_any_length_is_answered(attacked: Attacked) -> None:
    """The client that sends all of it first can read the answer, too."""
    with attacked.raw() as wire:
        wire.sendall(post(b" " * 40_000_000))
        said = read_all(wire)
    assert said.startswith(b"HTTP/1.1 413 ")
    assert b'"request_too_large"' in said
    with attacked.raw() as wire:  # in chunks, so that its length is not known before
        wire.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for _ in range(40):
            wire.sendall(b"%x\r\n" % 1_000_000 + b" " * 1_000_000 + b"\r\n")
        assert read_all(wire).startswith(b"HTTP/1.1 413 ")


def test_a_head_that_is_too_long_is_answered(attacked: Attacked) -> None:
    with attacked.raw() as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x: " + b"y" * 1_000_000 + b"\r\n\r\n")
        assert read_all(wire).startswith(b"HTTP/1.1 431 ")


CHUNKED = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode()


@pytest.mark.parametrize("chunks", [b"zz\r\n", b"5\r\nhello,\r\n", b"-1\r\n", b"fffffffffffffffff\r\n"])
def test_malformed_chunks_are_answered(attacked: Attacked, chunks: bytes) -> None:
    with attacked.raw() as wire:
        wire.sendall(CHUNKED + b"2\r\n{}\r\n")
        wire.sendall(chunks)
        said = read_all(wire)
    assert said.startswith(b"HTTP/1.1 400 ")
    assert said.count(b"content-length: ") == 1
    assert b'"bad_request"' in said


def test_what_is_malformed_behind_a_request_costs_that_request_nothing(attacked: Attacked) -> None:
    with attacked.raw() as wire:
        wire.sendall(post(BODY) + CHUNKED + b"zz\r\n")
        said = read_all(wire)
    assert said.startswith(b"HTTP/1.1 200 OK")
    assert b'"choices"' in said


UPGRADE = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2_settings": "AAMAAABkAARAAAAAAAIAAAAA"}


@pytest.mark.parametrize("upgrade", [UPGRADE, {"connection": "upgrade", "upgrade": "websocket"}])
@pytest.mark.parametrize("size", [0, 5000])
def test_a_request_that_asks_for_another_protocol_is_answered_in_this_one(
    attacked: Attacked, upgrade: dict[str, str], size: int
) -> None:
    """Java's HTTP client does so with its first request, whose body comes with it or behind it."""
    body = {**BODY, "metadata": {"x": "y" * size}}
    with attacked.raw() as wire:
        wire.sendall(post(body, **upgrade) + post(body, **(upgrade | {"connection": "upgrade, close"})))
        said = read_all(wire)
    assert said.count(b"HTTP/1.1 200 OK") == 2
    assert said.count(b'"choices"') == 2
    assert "WebSocket" not in attacked.logged


@pytest.mark.parametrize(
    ("request_line", "status"),
    [("CONNECT example.org:443", 405), ("GET http://[", 400), ("GET http://", 400), ("GET ?", 400), ("PRI *", 400)],
)
def test_a_strange_url_is_no_fault_of_the_server(attacked: Attacked, request_line: str, status: int) -> None:
    with attacked.raw() as wire:
        wire.sendall(f"{request_line} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        assert read_all(wire).startswith(f"HTTP/1.1 {status} ".encode())
    assert "Traceback" not in attacked.logged


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0(attacked: Attacked, stream: bool) -> None:
    """Such clients know no chunks: an answer ends with its connection."""
    with attacked.raw() as wire:
        wire.sendall(post({**BODY, "stream": stream}, version="1.0"))
        head, _, body = read_all(wire).partition(b"\r\n\r\n")
    assert b" 200 " in head
    assert b"chunked" not in head
    if stream:
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(body)["choices"]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_side_gets_its_answer(attacked: Attacked, stream: bool, version: str) -> None:
    with attacked.raw() as wire:
        wire.sendall(post({**BODY, "max_tokens": 64, "stream": stream}, version=version))
        wire.shutdown(socket.SHUT_WR)
        said = read_all(wire)
    final = said[said.index(b" 200 OK") :]
    assert b"[DONE]" in final if stream else b'"choices"' in final


def test_a_client_that_leaves_is_still_noticed(attacked: Attacked) -> None:
    with attacked.raw() as wire:
        wire.sendall(post({"messages": HELLO, "max_tokens": 3900, "n": 8, "speculation": 0}))  # takes seconds
        time.sleep(0.1)
    left = 'penstock_http_responses_total{reason="client_left",route="/v1/chat/completions",status="499"}'
    until(lambda: attacked.metric(left) >= 1)


def until(met: object) -> None:
    deadline = time.monotonic() + WAIT
    while not met():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000"])
@pytest.mark.parametrize("path", ["/v1/files", "/health", "/v1/models"])
def test_a_name_that_a_stranger_points_here_reads_nothing(attacked: Attacked, host: str, path: str) -> None:
    refused = attacked.http.get(path, headers={"host": host})
    assert refused.status_code == 403
    assert "--allowed-host" in refused.text


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8000", "it.localhost", "box"])
def test_names_that_a_stranger_cannot_own(attacked: Attacked, host: str) -> None:
    assert attacked.http.get("/v1/models", headers={"host": host}).status_code == 200


def test_every_answer_is_counted(attacked: Attacked) -> None:
    def count(route: str, status: int, reason: str) -> float:
        labels = f'reason="{reason}",route="{route}",status="{status}"'
        return attacked.metric(f"penstock_http_responses_total{{{labels}}}")

    answers = {
        (CHAT, 200, ""): lambda: attacked.chat(),
        (CHAT, 400, "invalid_json"): lambda: attacked.http.post(CHAT, content=b"{"),
        (CHAT, 413, "request_too_large"): lambda: attacked.http.post(CHAT, content=b" " * 20_000_000),
        (CHAT, 403, "permission_denied"): lambda: attacked.http.post(CHAT, headers={"host": "evil.example"}),
        (CHAT, 405, "method_not_allowed"): lambda: attacked.http.put(CHAT),
        ("/v1/files/{id}", 404, "not_found"): lambda: attacked.http.get("/v1/files/other"),
        ("none", 404, "not_found"): lambda: attacked.http.get("/who/knows"),
    }
    before = {labels: count(*labels) for labels in answers}
    for answer in answers.values():
        answer()
    assert {labels: count(*labels) - before[labels] for labels in answers} == dict.fromkeys(answers, 1)
    malformed = count("none", 400, "bad_request")
    with attacked.raw() as wire:
        wire.sendall(b"nonsense\r\n\r\n")
        assert read_all(wire).startswith(b"HTTP/1.1 400 ")
    assert count("none", 400, "bad_request") == malformed + 1


def test_a_stream_that_a_drain_cuts_ends_with_an_error(narrow: Attacked) -> None:
    """It is the last of these tests: the server stops."""
    fields = {"messages": HELLO, "max_tokens": 3900, "stream": True}
    with narrow.http.stream("POST", CHAT, json=fields) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        narrow.process.terminate()
        *_, last = [line for line in lines if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_stopping"
    assert narrow.process.wait(WAIT) in (0, -15)

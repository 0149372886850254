"""What a request may take: too long, too deep, too slow or too many is refused, and others go on undisturbed."""

from __future__ import annotations

import builtins
import io
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from penstock import store
from penstock.errors import ConfigError, ContextTooLong, Overloaded
from penstock.ipc.inprocess import InProcessClient
from penstock.server.access import bounds, guard, protocol
from penstock.server.access.guard import Rules, check
from penstock.server.access.in_flight import Admission, requests_in_flight
from penstock.server.context.request_context import RequestContext
from penstock.server.context.service import Service
from penstock.server.dialects.ollama import pulls
from penstock.templates.template import Template
from tests.server import toys
from tests.server.conftest import WAIT, Server, serving

MODEL = "toy/parrot"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "[hello]"}]
ENDLESS = [{"role": "user", "content": "[*hello]"}]


def refusal(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


# -- what a body holds ------------------------------------------------------------------------------------------------


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/api/chat", "/tokenize", "/api/show"])
@pytest.mark.parametrize("depth", [bounds.MAX_DEPTH, 100_000])
def test_deep_json_is_refused_before_anyone_walks_it(parrot: Server, path: str, depth: int) -> None:
    body = b'{"model": "toy/parrot", "metadata": ' + b"[" * depth + b"]" * depth + b"}"
    answer = parrot.http.post(path, content=body)
    assert answer.status_code == 400
    assert f"nested more than {bounds.MAX_DEPTH} deep" in answer.text


def test_brackets_are_not_depth(parrot: Server) -> None:
    said = parrot.post(CHAT, model=MODEL, messages=[{"role": "user", "content": "[hi]" + "[{" * 200}])
    assert said.status_code == 200
    deep = parrot.post(CHAT, model=MODEL, messages=HELLO, metadata=nested(bounds.MAX_DEPTH - 1))
    assert deep.status_code == 200


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        (b"[],", f"{bounds.MAX_CONTAINERS} arrays and objects"),
        (b'{"":1},', f"{bounds.MAX_CONTAINERS} arrays and objects"),
        (b'"",', f"{bounds.MAX_STRINGS} strings"),
        (b'"\\\\",', f"{bounds.MAX_STRINGS} strings"),  # of one backslash
    ],
)
def test_many_values_are_refused_before_they_are_parsed(parrot: Server, value: bytes, limit: str) -> None:
    most = bounds.MAX_STRINGS if "strings" in limit else bounds.MAX_CONTAINERS
    body = b'{"model": "toy/parrot", "metadata": [' + value * most + b"0]}"
    answer = parrot.http.post(CHAT, content=body)
    assert answer.status_code == 400
    assert f"more than {limit}" in answer.text


def test_what_is_inside_a_string_is_one_value(parrot: Server) -> None:
    text = '[{"a\\": "\\\\", []}]' * 60_000  # quotes, brackets and backslashes
    body = json.dumps({"model": MODEL, "messages": HELLO, "metadata": {"text": text}})
    assert parrot.http.post(CHAT, content=body).status_code == 200
    assert bounds.read_json(body, "the body")["metadata"]["text"] == text


def test_many_numbers_are_few_values() -> None:
    assert len(bounds.read_json(b"[" + b"7," * 2_000_000 + b"7]", "the body")) == 2_000_001


def test_depth_inside_strings_counts_too(parrot: Server) -> None:
    text = json.dumps({"a": nested(200)})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    told = refusal(parrot.post(CHAT, model=MODEL, messages=[{"role": "assistant", "tool_calls": [call]}]), 400)
    assert told["param"] == "messages[0].tool_calls[0].function.arguments"
    told = refusal(parrot.post(CHAT, model=MODEL, messages=HELLO, guided_json=text), 400)
    assert told["param"] == "guided_json"


MANY = [{"role": "user", "content": "x"}] * (bounds.MAX_MESSAGES + 1)
PARTS = [{"type": "text", "text": "x"}] * (bounds.MAX_PARTS + 1)
TOOLS = [{"type": "function", "function": {"name": "f"}}] * 129


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        (CHAT, {"messages": MANY}, "messages takes at most 4096; got 4097"),
        (CHAT, {"messages": [{"role": "user", "content": PARTS}]}, "messages[0].content takes at most 4096"),
        (CHAT, {"messages": HELLO, "stop": ["x"] * 33}, "stop takes at most 32; got 33"),
        (CHAT, {"messages": HELLO, "stop": "x" * 1025}, "at most 1024 characters; got 1025"),
        (CHAT, {"messages": HELLO, "tools": TOOLS}, "tools takes at most 128"),
        (CHAT, {"messages": HELLO, "n": 129}, "<= 128"),
        ("/v1/completions", {"prompt": ["x"] * 1000, "n": 2}, "more than 1024"),
        ("/v1/messages", {"messages": MANY, "max_tokens": 1}, "messages takes at most 4096"),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 1, "stop_sequences": ["x"] * 33}, "at most 32"),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 1, "system": PARTS}, "system takes at most 4096"),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 1, "tools": [{"name": "f"}] * 129}, "at most 128"),
        ("/v1/responses", {"input": MANY}, "input takes at most 4096"),
        ("/v1/responses", {"input": [{"role": "user", "content": PARTS}]}, "input[0].content takes at most 4096"),
        (
            "/v1/responses",
            {"input": "x", "tools": [{"type": "function", "name": "f"}] * 129},
            "tools takes at most 128",
        ),
        ("/v1/embeddings", {"input": ["x"] * 2049}, "at most 2048"),
        ("/api/chat", {"messages": MANY}, "messages takes at most 4096"),
        ("/api/chat", {"messages": HELLO, "options": {"stop": ["x"] * 33}}, "options.stop takes at most 32"),
    ],
)
def test_counts_within_a_body(parrot: Server, path: str, fields: dict[str, Any], told: str) -> None:
    answer = parrot.post(path, model=MODEL, **fields)
    assert answer.status_code == 400
    assert told in answer.text


def test_a_body_far_too_large_is_not_read_to_its_end(parrot: Server) -> None:
    with raw(parrot) as wire:
        wire.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000000000\r\n\r\n")
        with pytest.raises(OSError, match=r"reset|pipe"):
            wire.sendall(b" " * 2**28)
    assert parrot.get("/health").status_code == 200


# -- how it comes -----------------------------------------------------------------------------------------------------


@contextmanager
def raw(server: Server) -> Iterator[socket.socket]:
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port or 80), timeout=WAIT) as wire:
        yield wire


def told(wire: socket.socket) -> bytes:
    """All that is said until the connection is closed."""
    said = b""
    while more := wire.recv(2**16):
        said += more
    return said


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/messages", b"/api/chat"])
def test_a_body_that_does_not_come_is_given_up(parrot: Server, monkeypatch: pytest.MonkeyPatch, path: bytes) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.1)
    with raw(parrot) as wire:
        wire.sendall(b"POST " + path + b' HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"mod')
        said = told(wire)
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"too slowly" in said


def test_a_connection_that_says_nothing_is_closed(parrot: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "IDLE_SECONDS", 0.1)
    with raw(parrot) as wire:
        assert told(wire) == b""


def test_a_head_that_does_not_come_is_given_up(parrot: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.1)
    with raw(parrot) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\nhost")
        assert told(wire).startswith(b"HTTP/1.1 408 ")


def test_a_body_that_no_one_waits_for_does_not_hold_the_connection(
    parrot: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.1)
    with raw(parrot) as wire:
        wire.sendall(b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n")
        said = wire.recv(2**16)
        with suppress(ConnectionError):  # of a connection that is closed already
            wire.sendall(b"x")
            said += told(wire)
    assert said.startswith(b"HTTP/1.1 404 ")


def test_headers_after_the_body_have_a_bound(parrot: Server) -> None:
    with raw(parrot) as wire:
        wire.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: "
        )
        with pytest.raises(OSError, match=r"reset|pipe"):
            wire.sendall(b"x" * 2**27)
    big = json.dumps({"model": MODEL, "messages": HELLO}).encode().ljust(500_000)
    chunks = (big[at : at + 70_000] for at in range(0, len(big), 70_000))
    assert parrot.http.post(CHAT, content=chunks).status_code == 200


def test_a_slow_head_after_a_request_is_given_up_too(parrot: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.1)
    with raw(parrot) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /health HT")
        said = told(wire)
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in said


def test_a_body_may_be_slow_within_bounds(parrot: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"model": MODEL, "messages": HELLO}).encode().ljust(400)
    with raw(parrot) as wire:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        wire.sendall(head.encode())
        for byte in body:
            wire.sendall(bytes([byte]))
        assert b'"content":"hello"' in told(wire)


def test_long_heads_are_refused(parrot: Server) -> None:
    assert "uri_too_long" in parrot.get("/v1/models?" + "x" * guard.MAX_URL).text
    assert parrot.get("/v1/models?" + "x" * (guard.MAX_URL - 100)).status_code == 200
    assert parrot.http.get("/health", headers={f"x-{i}": "x" for i in range(300)}).status_code == 400
    with raw(parrot) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\nx-long: ")
        wire.sendall(b"x" * (protocol.MAX_HEAD + 1))
        assert told(wire).startswith(b"HTTP/1.1 431 ")


def test_a_body_is_no_part_of_the_next_head(parrot: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_HEAD", 1000)
    body = json.dumps({"model": MODEL, "messages": HELLO}).encode().ljust(5000)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with raw(parrot) as wire:
        wire.sendall(head + body + b"GET /health HTTP/1.1\r\nhost")
        wire.sendall(b": x\r\nconnection: close\r\n\r\n")
        assert told(wire).count(b"HTTP/1.1 200 ") == 2


# -- requests that come before the answer to the one before ------------------------------------------------------------


def sent(fields: dict[str, Any], path: str = "/v1/completions") -> bytes:
    body = json.dumps({"model": MODEL, "stream": True, "max_tokens": 20_000, **fields}).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


LOOK = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def test_a_client_that_leaves_takes_its_stream_along_whatever_it_sent_after_it(slow_parrot: Server) -> None:
    done = slow_parrot.client.stats.generated_tokens
    with raw(slow_parrot) as wire:
        wire.sendall(sent({"prompt": "[*endless]"}) + LOOK)
        assert wire.recv(2**16).startswith(b"HTTP/1.1 200 ")
    slow_parrot.until_idle()
    assert slow_parrot.client.stats.generated_tokens - done < 10_000


def test_a_connection_whose_next_request_is_answered_is_not_idle(
    slow_parrot: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_parrot.http.close()  # its connections count, too
    with raw(slow_parrot) as wire:
        wire.sendall(LOOK + sent({"prompt": "[*endless]"}))
        slow_parrot.until(lambda: slow_parrot.client.stats.running > 0)
        monkeypatch.setattr(protocol, "max_connections", 1)
        with raw(slow_parrot) as other:
            assert told(other).startswith(b"HTTP/1.1 503 ")
        wire.settimeout(WAIT)
        for _ in range(5):
            assert wire.recv(2**16)
    slow_parrot.http = httpx.Client(base_url=slow_parrot.url, timeout=WAIT)
    slow_parrot.until_idle()


def test_an_answer_is_whole_if_its_client_sends_nothing_more(
    slow_parrot: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "PROBE_SECONDS", 0.01)
    with raw(slow_parrot) as wire:
        wire.sendall(sent({"prompt": f"[{'abc' * 40}]"}) + LOOK)
        wire.shutdown(socket.SHUT_WR)
        first, stream, _, rest = re.split(rb"(data: .*\[DONE\])(\r|\n)", told(wire), flags=re.DOTALL)
    assert b" 200 OK" in first
    assert b"100 Continue" not in stream
    assert b" 200 OK" in rest


@pytest.mark.parametrize("fault", [False, True])
def test_only_a_fault_of_this_server_is_logged_as_one(
    parrot: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: bool
) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError

    if fault:
        monkeypatch.setattr(protocol.BoundedProtocol, "on_message_begin", fail)
    with raw(parrot) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\n\r\n" if fault else b"this is not HTTP\r\n\r\n")
        assert told(wire).startswith(b"HTTP/1.1 400 ")
    assert ("a fault in this server" in caplog.text) == fault
    assert ("ZeroDivisionError" in caplog.text) == fault


def test_a_reader_who_does_not_read_is_left(parrot: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "STALLED_SECONDS", 0.1)
    body = json.dumps({"model": MODEL, "tokens": [toys.END] * 700_000}).encode()
    head = f"POST /detokenize HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    lost: set[Any] = set()
    connection_lost = protocol.BoundedProtocol.connection_lost

    def note(self: Any, error: Exception | None) -> None:
        lost.add(self.client)
        connection_lost(self, error)

    monkeypatch.setattr(protocol.BoundedProtocol, "connection_lost", note)
    with raw(parrot) as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.sendall(head + body)
        parrot.until(lambda: wire.getsockname() in lost)


# -- how many at once -------------------------------------------------------------------------------------------------


@pytest.fixture
def narrow() -> Iterator[Server]:
    """Computes one request at once and lets one wait."""

    client = InProcessClient(lambda: toys.open_paced_parrot(0.002, max_rows=1), "parrot")
    with serving(client, toys.ToyText(), MODEL, rules=Rules(max_waiting=1)) as server:
        yield server


def test_more_than_may_wait_are_refused_in_every_dialect(narrow: Server) -> None:
    sdk = narrow.sdk()
    streams = [sdk.chat.completions.create(model=MODEL, messages=ENDLESS, stream=True)]
    next(iter(streams[0]))
    waiting = threading.Thread(target=lambda: sdk.chat.completions.create(model=MODEL, messages=HELLO))
    waiting.start()
    narrow.until(lambda: narrow.client.stats.waiting == 1)
    with pytest.raises(openai.InternalServerError) as ours:
        sdk.chat.completions.create(model=MODEL, messages=HELLO)
    assert (ours.value.status_code, ours.value.code) == (503, "overloaded")
    assert ours.value.response.headers["retry-after"] == "1"
    client = anthropic.Anthropic(base_url=narrow.url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.APIStatusError) as theirs:
        client.messages.create(model="claude-x", max_tokens=5, messages=HELLO)
    assert theirs.value.status_code == 529
    with pytest.raises(ollama.ResponseError, match="requests in flight") as third:
        ollama.Client(host=narrow.url).chat(MODEL, HELLO)
    assert third.value.status_code == 503
    assert sdk.models.list().data  # reading does not wait
    streams[0].close()
    waiting.join(WAIT)
    narrow.until_idle()
    assert sdk.chat.completions.create(model=MODEL, messages=HELLO).choices[0].message.content == "hello"


def test_every_choice_takes_a_place(narrow: Server) -> None:
    sdk = narrow.sdk()
    assert len(sdk.chat.completions.create(model=MODEL, messages=HELLO, n=2).choices) == 2
    with pytest.raises(openai.InternalServerError, match="requests in flight"):
        sdk.chat.completions.create(model=MODEL, messages=HELLO, n=3)
    with pytest.raises(openai.InternalServerError, match="requests in flight"):
        sdk.chat.completions.create(model=MODEL, messages=HELLO, n=3, stream=True)
    narrow.until_idle()
    assert narrow.client.stats.blocks_used == 0


def test_an_answer_uses_its_requests_place_and_others_take_their_own(parrot: Server) -> None:
    in_flight = requests_in_flight(lambda: toys.LIMITS.max_rows, 0)
    admissions = [Admission(in_flight) for _ in range(toys.LIMITS.max_rows)]
    for admission in admissions[1:]:
        admission.open()
    first = admissions[0]
    first.open()
    with first.answer():
        assert in_flight.count == toys.LIMITS.max_rows
        with pytest.raises(Overloaded, match="16 requests in flight"), first.answer():
            pass
        with pytest.raises(Overloaded):
            Admission(in_flight).open()
        admissions[1].close()
        with first.answer():
            assert in_flight.count == toys.LIMITS.max_rows
        first.close()  # the answer outlives its request and keeps the place
        assert in_flight.count == toys.LIMITS.max_rows - 1
    assert in_flight.count == toys.LIMITS.max_rows - 2
    for admission in admissions:
        admission.close()
    assert in_flight.count == 0


def test_a_request_whose_answer_is_computed_only_waits_for_its_client() -> None:
    in_flight = requests_in_flight(lambda: 1, 0)
    slow = Admission(in_flight)
    slow.open()
    assert in_flight.full()
    with slow.answer() as computed:
        computed()
    assert not in_flight.full()
    with suppress(InterruptedError), slow.answer():  # it tries again, in its own place
        assert in_flight.full()
        raise InterruptedError
    assert in_flight.full()  # nothing was computed
    with slow.answer():  # a stop string ends it, which its engine does not know of
        assert in_flight.full()
    assert not in_flight.full()
    with slow.answer() as computed:
        computed()
        other = Admission(in_flight)
        other.open()
        with pytest.raises(Overloaded, match=r"busy: 1 requests in flight \(the limit is 1\)"):
            in_flight.check()
        other.close()
    slow.close()
    assert (in_flight.count, in_flight.unread) == (0, 0)


def test_background_requests_take_no_place() -> None:
    with RequestContext(service=Service(background=True)).answer():
        pass


def test_bodies_together_have_a_bound(parrot: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_BODIES", 1000)
    assert refusal(parrot.http.post(CHAT, content=b" " * 2000), 503)["code"] == "overloaded"
    assert parrot.post(CHAT, model=MODEL, messages=HELLO).status_code == 200


@pytest.fixture
def half(parrot: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns what sends the beginning of a body, and waits until it is there."""
    arrived = [0]
    take = guard.ArrivingBodies.take

    def counted(bodies: guard.ArrivingBodies, count: int, body: guard.TimedBody) -> None:
        take(bodies, count, body)
        arrived[0] += count

    monkeypatch.setattr(guard.ArrivingBodies, "take", counted)

    def send(wire: socket.socket, size: int = 10) -> None:
        whole = arrived[0] + size
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n"
        wire.sendall(head.encode() + b" " * size)
        parrot.until(lambda: arrived[0] == whole)

    return send


def test_one_body_too_many_costs_the_oldest_that_is_not_whole(
    parrot: Server, half: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MAX_ARRIVING", 2)
    with raw(parrot) as oldest, raw(parrot) as second, raw(parrot) as third:
        for wire in (oldest, second, third):
            half(wire)
        said = told(oldest)
        assert parrot.post(CHAT, model=MODEL, messages=HELLO).status_code == 200
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"others arrive" in said


def test_bytes_of_bodies_that_are_not_whole_make_room(
    parrot: Server, half: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MAX_BODIES", 20_000)
    with raw(parrot) as hoarder:
        half(hoarder, 19_000)
        assert parrot.http.post(CHAT, content=b" " * 5000).status_code == 400  # it is read, and no JSON
        assert told(hoarder).startswith(b"HTTP/1.1 408 ")


def test_a_model_is_pulled_once_however_many_ask_and_few_at_once(
    parrot: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, asked = threading.Event(), []

    def fetch(ref: str, *, progress: Callable[[str, int, int | None], None]) -> Path:
        asked.append(ref)
        progress("downloading", 1, 2)
        assert go.wait(WAIT)
        return Path()

    monkeypatch.setattr(store, "fetch", fetch)
    client = ollama.Client(host=parrot.url, timeout=WAIT)
    pulled = [client.pull(name, stream=True) for name in ("hf.co/a/b", "hf:a/b", "hf.co/a/b:latest")]
    assert [next(each).status for each in pulled] == ["pulling manifest"] * 3
    others = [client.pull(f"hf.co/a/{n}", stream=True) for n in range(pulls.MAX_PULLS - 1)]
    assert [next(each).status for each in others] == ["pulling manifest"] * len(others)
    with pytest.raises(ollama.ResponseError, match="Retry when one is done") as caught:
        next(client.pull("hf.co/a/more", stream=True))
    assert caught.value.status_code == 503
    go.set()
    for each in (*pulled, *others):
        assert list(each)[-1].status == "success"
    assert sorted(asked) == ["hf:a/0", "hf:a/1", "hf:a/2", "hf:a/b"]
    assert client.pull("hf.co/a/more").status == "success"


# -- other people's pages ---------------------------------------------------------------------------------------------


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}


def test_pages_of_others_may_neither_read_nor_ask(parrot: Server) -> None:
    http = parrot.http
    for origin in ("https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1:1", "http://[::1"):
        answer = http.post(CHAT, json={"model": MODEL, "messages": HELLO}, headers={"origin": origin})
        assert "--cors" in refusal(answer, 403)["message"]
        assert http.get("/v1/models", headers={"origin": origin}).status_code == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert http.options(CHAT, headers=PREFLIGHT | {"origin": origin}).status_code == 403
    assert http.get("/v1/models", headers={"origin": parrot.url}).status_code == 200


def test_a_name_that_a_stranger_can_own_is_not_ours(parrot: Server) -> None:
    """A page of evil.example whose name was made to lead to this machine."""
    port = httpx.URL(parrot.url).port
    for host, status in (("evil.example", 403), ("localhost", 200), ("192.168.0.7", 200), ("[::1]", 200)):
        headers = {"host": f"{host}:{port}", "origin": f"http://{host}:{port}"}
        assert parrot.http.get("/v1/models", headers=headers).status_code == status


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    rules = Rules(origins=("https://app.example", "http://localhost:3000"))
    with serving(InProcessClient(toys.open_parrot, "parrot"), toys.ToyText(), MODEL, rules=rules) as server:
        yield server


def test_a_server_answers_to_the_names_that_it_was_told_of() -> None:
    rules = Rules(hosts=("api.example",), origins=("https://page.example",))
    with serving(InProcessClient(toys.open_parrot, "parrot"), toys.ToyText(), MODEL, rules=rules) as server:
        asked = {
            host: server.http.get("/v1/models", headers={"host": host}).status_code
            for host in ("api.example", "API.example.:80", "page.example", "localhost", "other.example", "xapi.example")
        }
    assert asked == dict.fromkeys(asked, 200) | {"other.example": 403, "xapi.example": 403}


def test_named_origins_may(shared: Server) -> None:
    http, origin = shared.http, {"origin": "https://app.example"}
    asked = http.options(CHAT, headers=PREFLIGHT | origin)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == "https://app.example"
    assert "authorization" in asked.headers["access-control-allow-headers"]
    assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
    fields = {"model": MODEL, "messages": HELLO}
    for streaming in (False, True):
        answer = http.post(CHAT, json=fields | {"stream": streaming}, headers=origin)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert "x-ratelimit-remaining-tokens" in answer.headers["access-control-expose-headers"]
    wrong = http.post(CHAT, json={}, headers=origin)
    assert wrong.status_code == 400
    assert wrong.headers["access-control-allow-origin"] == "https://app.example"
    assert http.post(CHAT, json=fields, headers={"origin": "https://evil.example"}).status_code == 403
    assert http.options(CHAT, headers=PREFLIGHT | {"origin": "https://evil.example"}).status_code == 403
    assert "access-control-allow-origin" not in http.post(CHAT, json=fields).headers


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "https://a b", "x@https://a", ""])
def test_an_origin_is_a_scheme_and_a_host(origin: str) -> None:
    with pytest.raises(ConfigError, match="is not an origin"):
        check(Rules(origins=(origin,)), "127.0.0.1")


# -- files ------------------------------------------------------------------------------------------------------------

PATHS = [
    "../../../../../../etc/passwd",
    "/etc/passwd",
    "~/.ssh/id_rsa",
    "file:///etc/passwd",
    "hf:../../etc/passwd",
    "hf:a/../../etc",
    "hf.co/../..",
    "hf.co//etc/passwd",
    "pypi:../x/y.gguf",
    "..",
    "smollm2/../../x",
    "C:\\windows\\system32",
    "a\x00b",
    "/etc/passwd\x00.gguf",
    "x" * 5000,
]


def asks(server: Server, name: str) -> Iterator[httpx.Response]:
    yield server.post(CHAT, model=name, messages=HELLO)
    yield server.post("/v1/completions", model=name, prompt="x")
    yield server.post("/v1/messages", model=name, max_tokens=1, messages=HELLO)
    yield server.post("/v1/messages/count_tokens", model=name, messages=HELLO)
    yield server.post("/tokenize", model=name, prompt="x")
    yield server.post("/api/chat", model=name, messages=HELLO)
    yield server.post("/api/generate", model=name, prompt="x")
    yield server.post("/api/show", model=name)
    yield server.post("/api/pull", model=name)
    yield server.http.request("DELETE", "/api/delete", json={"model": name})
    yield server.post("/api/create", model=name, **{"from": MODEL})
    yield server.post("/api/create", model="mine", **{"from": name})
    yield server.post("/api/create", model="mine", files={"m.gguf": name})
    yield server.post("/api/copy", source=MODEL, destination=name)
    yield server.post("/api/copy", source=name, destination="mine")
    quoted = "".join(f"%{byte:02x}" for byte in name.encode())
    yield server.http.post(f"/api/blobs/{quoted}", content=b"x")
    yield server.get(f"/v1/models/{quoted}")
    yield server.get(f"/v1/files/{quoted}/content")
    yield server.get(f"/v1/responses/{quoted}")


@pytest.mark.parametrize("name", PATHS, ids=lambda name: re.sub(r"\W", "_", name)[:20])
def test_no_name_in_a_request_reaches_the_file_system(
    parrot: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    opened: list[str] = []

    def watch(call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(path: Any, *args: Any, **kwargs: Any) -> Any:
            opened.append(os.fsdecode(path) if not isinstance(path, int) else "")
            return call(path, *args, **kwargs)

        return watched

    for module, call in ((builtins, "open"), (io, "open"), (os, "open"), (os, "stat"), (os, "scandir"), (os, "mkdir")):
        monkeypatch.setattr(module, call, watch(getattr(module, call)))
    for answer in asks(parrot, name):
        assert answer.status_code in (400, 404, 414), answer.text
    ours = (str(tmp_path), gettempdir(), sys.prefix, sys.base_prefix)  # the second: of the server's files
    outside = [path for path in opened if path and not path.startswith(ours)]
    assert not outside


def test_a_name_that_only_looks_like_a_path_stays_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    for ref in ("hf:a/b", "hf:owner/repo/deep/er/file.gguf", "smollm2"):
        paths = store.paths.ModelPaths(store.home(), store.refs.name_of(store.refs.parse(ref)))
        for path in (paths.folder, paths.part, paths.record, paths.lock):
            assert path.resolve().is_relative_to(tmp_path)
            assert path.parent.parent == tmp_path


def test_a_template_that_writes_without_end_is_stopped() -> None:
    with pytest.raises(ContextTooLong, match="longer than"):
        Template("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}").render({})

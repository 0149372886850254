from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, EngineUnavailable, InvalidRequest
from penstock.tools.bench import RequestTiming, UrlTarget, Workload, run_workload
from penstock.tools.bench.http import Chunked
from penstock.tools.bench.load import prompts, summarize

DRAFTED = 'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="stub"}'
ACCEPTED = 'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="stub"}'
Penstock = Callable[..., tuple[int, str, str]]


class Stub(ThreadingHTTPServer):
    """An OpenAI-compatible server that sends each answer in three pieces, and counts two tokens in each."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Endpoint)
        self.bodies: list[dict[str, Any]] = []
        self.takes_ids = True
        self.unknown = ""  # a field it refuses
        self.breaks = False  # off in the middle of an answer
        self.chunked = True
        self.drafted = 0
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Endpoint(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.server.drafted += 40
            self.answer(200, f"# HELP\n{DRAFTED} {self.server.drafted}\n{ACCEPTED} {self.server.drafted / 4}\n")
        else:
            self.answer(200, {"data": [{"id": "stub"}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.server.unknown in body:
            self.answer(400, {"error": {"message": f"unknown field {self.server.unknown}"}})
        elif isinstance(body["prompt"], list) and not self.server.takes_ids:
            self.answer(422, {"detail": "prompt must be text"})
        elif self.headers["authorization"] == "Bearer wrong":
            self.answer(401, {"error": {"message": "wrong key"}})
        else:
            self.server.bodies.append(body)
            self.stream(body)

    def stream(self, body: dict[str, Any]) -> None:
        with self.server.lock:
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        self.begin(200)
        for _ in range(3):
            self.piece({"choices": [{"text": "x"}]})
        self.piece({"choices": [{"text": "", "finish_reason": "length"}]})
        if not self.server.breaks:
            count = len(body["prompt"]) if isinstance(body["prompt"], list) else len(body["prompt"].split())
            details = {"cached_tokens": 1}
            self.piece(
                {
                    "choices": [],
                    "usage": {"prompt_tokens": count, "completion_tokens": 6, "prompt_tokens_details": details},
                }
            )
            self.send(b"data: [DONE]\n\n")
            if self.server.chunked:
                self.wfile.write(b"0\r\n\r\n")
        with self.server.lock:
            self.server.at_once -= 1

    def begin(self, status: int) -> None:
        self.close_connection = True
        self.send_response(status)
        if self.server.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def piece(self, value: Any) -> None:
        self.send(b": a comment\n\ndata: " + json.dumps(value).encode() + b"\n\n")

    def send(self, data: bytes) -> None:
        """In two halves, for a reader must not think that a line is a chunk."""
        for half in (data[:5], data[5:]):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(half), half) if self.server.chunked else half)

    def answer(self, status: int, value: Any) -> None:
        content = (value if isinstance(value, str) else json.dumps(value)).encode()
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_server_is_driven_and_its_own_counts_are_taken(penstock: Penstock, stub: Stub) -> None:
    code, out, err = penstock(
        "bench",
        "--url",
        stub.url,
        "--concurrency",
        "1,4",
        "--requests",
        9,
        "--input-len",
        10,
        "--output-len",
        6,
        "--json",
    )
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert [result["concurrency"] for result in report["results"]] == [1, 4]
    for result in report["results"]:
        assert (result["requests"], result["errors"]) == (9, 0)
        assert (result["prompt_tokens"], result["cached_tokens"], result["output_tokens"]) == (90, 9, 54)
        assert result["output_tok_s"] == pytest.approx(54 / result["seconds"])
        assert result["total_tok_s"] == pytest.approx(144 / result["seconds"])
        assert 0 < result["ttft_p50"] <= result["ttft_p99"]
        assert 0 < result["itl_p50"] <= result["itl_p99"]
        assert (result["drafted_tokens"], result["accepted_tokens"]) == (40, 10)
    assert stub.most_at_once <= 4
    _, *asked = stub.bodies  # the first was to get to know it
    assert len(asked) == 18
    assert all(body["max_tokens"] == 6 and body["ignore_eos"] and body["model"] == "stub" for body in asked)
    assert len({tuple(body["prompt"]) for body in asked}) == 18


def test_the_table(penstock: Penstock, stub: Stub) -> None:
    code, out, _ = penstock("bench", "--url", stub.url)
    head, row, drafts = out.splitlines()
    assert code == 0
    assert head.split()[:3] == ["clients", "requests", "errors"]
    assert row.split()[:3] == ["1", "4", "0"]
    assert drafts == "concurrency 1: 40 tokens drafted, 25% accepted"


def test_servers_of_other_kinds_are_met_half_way(stub: Stub) -> None:
    stub.chunked = False
    stub.takes_ids = False
    stub.unknown = "ignore_eos"
    target = UrlTarget(stub.url + "/")
    timing = RequestTiming()

    async def ask() -> None:
        await target.negotiate()
        await target.complete(range(1000, 1020), 6, timing)

    asyncio.run(ask())
    assert len(timing.arrivals) == 3
    assert len(stub.bodies[-1]["prompt"].split()) == 20
    assert "ignore_eos" not in stub.bodies[-1]
    assert (timing.prompt_tokens, timing.output_tokens) == (20, 6)


def test_what_a_server_refuses_is_told(stub: Stub) -> None:
    stub.unknown = "model"
    with pytest.raises(InvalidRequest, match="status 400: unknown field model"):
        asyncio.run(UrlTarget(stub.url).negotiate())
    stub.unknown = ""
    with pytest.raises(EngineUnavailable, match="status 401: wrong key"):
        asyncio.run(UrlTarget(stub.url, api_key="wrong").negotiate())
    with pytest.raises(EngineUnavailable, match="status 200"):
        asyncio.run(UrlTarget(stub.url + "/other").negotiate())


def test_answers_that_break_off_are_errors(penstock: Penstock, stub: Stub) -> None:
    target = UrlTarget(stub.url)
    asyncio.run(target.negotiate())
    stub.breaks = True
    workload = Workload(concurrency=2, requests=4, input_len=5, output_len=6)
    done = []
    result = asyncio.run(run_workload(target, workload, lambda: done.append(1)))
    assert (result.requests, result.errors, result.output_tokens, len(done)) == (4, 4, 0, 4)
    assert "closed the connection within an answer" in result.first_error


def test_no_server_and_no_url(penstock: Penstock) -> None:
    code, out, err = penstock("bench", "smollm2", "--url", "http://127.0.0.1:9/v1")
    assert code == 2
    code, out, err = penstock("bench", "--url", "http://127.0.0.1:9/v1")
    assert (code, out) == (1, "")
    assert err.startswith("error: there is no server at http://127.0.0.1:9/v1/models")
    with pytest.raises(ConfigError, match="is not a URL"):
        UrlTarget("127.0.0.1:8000")


def test_prompts_share_what_they_should_and_no_more() -> None:
    workload = Workload(concurrency=2, requests=20, input_len=30, output_len=1, shared_prefix=20, seed=3)
    made = list(prompts(workload, range(100)))
    assert made == list(prompts(workload, range(100)))
    assert {len(prompt) for prompt in made} == {30}
    assert len({tuple(prompt[:20]) for prompt in made}) == 1
    assert len({tuple(prompt[20:]) for prompt in made}) == 20
    assert {token for prompt in made for token in prompt} <= set(range(100))


def test_percentiles() -> None:
    workload = Workload(concurrency=1, requests=2, input_len=1, output_len=1)
    timings = [
        RequestTiming(started=1.0, arrivals=[1.1, 1.2, 1.4], prompt_tokens=5, output_tokens=3),
        RequestTiming(started=2.0, arrivals=[2.3], prompt_tokens=5, output_tokens=1),
        RequestTiming(started=3.0, error="no"),
    ]
    result = summarize(workload, timings, 2.0)
    assert result.ttft_p50 == pytest.approx(200)
    assert result.ttft_p99 == pytest.approx(298)
    assert result.itl_p50 == pytest.approx(150)
    assert (result.errors, result.first_error, result.output_tok_s, result.total_tok_s) == (1, "no", 2.0, 7.0)


def test_a_model_is_driven_in_a_process_of_its_own(penstock: Penstock, babbler: Path) -> None:
    words = ("--device", "ref", "--concurrency", 2, "--input-len", 20, "--output-len", 5, "--shared-prefix", 16)
    code, out, err = penstock("bench", babbler, *words, "--json")
    (result,) = json.loads(out)["results"]
    assert (code, err) == (0, "")
    assert (result["requests"], result["errors"]) == (8, 0)
    assert (result["prompt_tokens"], result["output_tokens"]) == (160, 40)
    assert result["cached_tokens"] >= 96


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 100])
def test_chunks_are_read_however_they_arrive(cut: int) -> None:
    sent = b"3\r\nabc\r\n10;name=value\r\n0123456789\r\nabcd\r\n0\r\n\r\n"
    body = Chunked()
    told = [body.take(sent[at : at + cut]) for at in range(0, len(sent), cut)]
    assert b"".join(told) == b"abc0123456789\r\nabcd"
    assert body.ended


def test_what_is_no_chunk_is_an_error() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        Chunked().take(b"data: {}\r\n")

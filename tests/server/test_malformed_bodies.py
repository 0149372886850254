"""Ten thousand malformed bodies at every POST route, over good connections and broken ones: each is refused with a 4xx
or its connection is closed. Eight good streams go on meanwhile as if they were alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

MODEL = "toy/parrot"
SEED = 5
PIPELINED, PLAIN, BROKEN = 9000, 400, 600  # bodies
CONNECTIONS = 12
BATCH = 25  # requests sent before an answer is read
SLOW = 16  # connections that say a byte now and then
GROWTH = 32  # MB that a server may keep of it all
WAIT = 300.0  # seconds after which something hangs: much longer than a busy machine takes

# The server is patient here, so that a busy machine's clients are not cut off for being slow: test_limits tests that.
SERVE = f"""
import toys
from penstock.config import Config
from penstock.ipc.spawn import ProcessClient
from penstock.server import app, serve
from penstock.server import Setup
from penstock.server.access import guard, protocol

app.IDLE_SECONDS = protocol.IDLE_SECONDS = protocol.HEAD_SECONDS = protocol.STALLED_SECONDS = {WAIT}
guard.BODY_SECONDS = {WAIT}
client = ProcessClient(Config(model="parrot"), toys.HOST)
serve(toys.pool_of(client, toys.ToyText(), "toy/parrot", lenient=False), "127.0.0.1", 0,
      Setup(rules=guard.Rules(lenient=False)))
"""


class Running(NamedTuple):
    url: str
    pid: int

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        assert url.port
        return url.host, url.port

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def megabytes(self) -> float:
        told = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert told
        return int(told[1]) / 1024


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    """In a process of its own, so that what it keeps can be told from what the clients do."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("looks into /proc")
    path = os.pathsep.join([str(request.path.parent), *sys.path])
    log = tmp_path / "log"
    around = {**os.environ, "PYTHONPATH": path, "PENSTOCK_HOME": str(tmp_path)}
    with log.open("w") as stderr:
        process = subprocess.Popen([sys.executable, "-c", SERVE], stderr=stderr, env=around)
    try:
        until(lambda: "\n" in log.read_text() or process.poll() is not None)
        yield Running(log.read_text().split()[3], process.pid)
        process.send_signal(signal.SIGINT)
        process.wait(WAIT)
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()


def until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not met():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


# -- malformed bodies ---------------------------------------------------------------------------------------------

SAID = [{"role": "user", "content": "[hello]"}]
GOOD: dict[str, dict[str, Any]] = {  # of the routes whose fields are known here; others get what is no JSON object
    "/v1/chat/completions": {"model": MODEL, "messages": SAID, "max_tokens": 3, "temperature": 0.5, "seed": 1},
    "/v1/completions": {"model": MODEL, "prompt": "[hello]", "max_tokens": 3, "top_p": 0.5, "logprobs": 1},
    "/v1/messages": {"model": MODEL, "messages": SAID, "max_tokens": 3, "top_k": 4},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": SAID},
    "/api/chat": {"model": MODEL, "messages": SAID, "options": {"num_predict": 3}},
    "/api/generate": {"model": MODEL, "prompt": "[hello]", "options": {"seed": 3}},
    "/api/show": {"model": MODEL},
    "/v1/responses": {"model": MODEL, "input": "[hello]", "max_output_tokens": 3, "temperature": 0.5},
    "/v1/responses/input_tokens": {"model": MODEL, "input": "[hello]"},
    "/v1/batches": {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/embeddings": {"model": MODEL, "input": "hello", "dimensions": 3},
    "/api/embed": {"model": MODEL, "input": "hello"},
    "/api/create": {"model": "made", "from": MODEL, "system": "hi"},
    "/api/copy": {"source": MODEL, "destination": "made"},
    "/tokenize": {"model": MODEL, "prompt": "hello"},
    "/detokenize": {"model": MODEL, "tokens": [104, 105]},
    "/apply-template": {"model": MODEL, "messages": SAID},
    "/generate": {"text": "[hello]", "rid": "x"},
    "/generate_stream": {"inputs": "[hello]", "parameters": {"max_new_tokens": 3}},
    "/encode": {"text": "hello"},
    "/pooling": {"model": MODEL, "input": "hello"},
    "/update_weights": {"path": "/no/such/folder", "weight_version": "x", "recompute": False},
    "/update_weights_from_disk": {"model_path": "/no/such/folder", "weight_version": "x"},
}
BODILESS = (  # they read no body, or a list, or end all streams
    *("/abort_requests", "/pause", "/resume", "/reset_prefix_cache", "/pause_generation", "/continue_generation"),
    *("/flush_cache", "/ping", "/sleep", "/wake_up", "/lora-adapters"),
    *("/api/models/unload", "/api/models/unload/{id}"),
)
WRONG = (-(2**70), 2**70, {"a": {}}, [[None]], [None], True)  # for every field of the above
NOT_OBJECTS = (b"", b" ", b"[]", b"null", b"3", b'"x"', b"true", b"NaN", b"{'a': 1}", b"{} {}", b"{}x", b"\0", b"{,}")
NOT_UTF8 = (b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xc0\xaf", b"\x80")
NUMBERS = ("1e999", "-1e999", "9" * 400, "1" + "0" * 5000, "1e-", "0x10", "1_000", "Infinity", "-", "00", "1.")


def encoded(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


def cut(draw: random.Random, good: dict[str, Any]) -> bytes:
    body = encoded(good)
    return body[: draw.randrange(len(body))]


def not_utf8(draw: random.Random, good: dict[str, Any]) -> bytes:
    body = encoded(good)
    at = draw.randrange(len(body))
    return body[:at] + draw.choice(NOT_UTF8) + body[at:]


def not_an_object(draw: random.Random, _: dict[str, Any]) -> bytes:
    return draw.choice(NOT_OBJECTS)


def other_encoding(draw: random.Random, good: dict[str, Any]) -> bytes:
    return json.dumps(good).encode(draw.choice(("utf-16", "utf-32", "utf-16-le")))


def nested(draw: random.Random, _: dict[str, Any]) -> bytes:
    depth = draw.choice((300, 1000, 20_000))
    opening, closing = draw.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return b'{"no_such_field":' + opening * depth + b"1" + closing * draw.choice((depth, depth - 1, 0)) + b"}"


def number(draw: random.Random, good: dict[str, Any]) -> bytes:
    field = draw.choice([*good])
    return encoded(good | {field: "HERE"}).replace(b'"HERE"', draw.choice(NUMBERS).encode())


def wrong_type(draw: random.Random, good: dict[str, Any]) -> bytes:
    return encoded(good | {draw.choice([*good]): draw.choice(WRONG)})


def unknown_field(draw: random.Random, good: dict[str, Any]) -> bytes:
    return encoded(good | {f"field_{draw.randrange(1000)}": draw.choice((None, 1, "x"))})


def missing_field(draw: random.Random, good: dict[str, Any]) -> bytes:
    return encoded({name: value for name, value in good.items() if name in ("temperature", "options", "seed")})


def noise(draw: random.Random, _: dict[str, Any]) -> bytes:
    return draw.randbytes(draw.randrange(1, 200))


NEVER_JSON = (cut, not_utf8, not_an_object, other_encoding, noise)
WAYS = (*NEVER_JSON, nested, number, wrong_type, unknown_field, missing_field)


class Malformed(NamedTuple):
    path: str
    way: str
    body: bytes

    def request(self, *headers: str) -> bytes:
        head = [f"POST {self.path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
        return "\r\n".join([*head, f"Content-Length: {len(self.body)}", "", ""]).encode() + self.body


def malformed(draw: random.Random, routes: list[str]) -> Malformed:
    path = draw.choice(routes)
    way = draw.choice(WAYS if path in GOOD else NEVER_JSON)
    return Malformed(path, way.__name__, way(draw, GOOD.get(path, {"model": MODEL})))


def post_routes(server: Running) -> list[str]:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    return [
        re.sub(r"\{\w+\}", "x", path) for path, methods in paths.items() if "post" in methods and path not in BODILESS
    ]


# -- ways to send them --------------------------------------------------------------------------------------------


@asynccontextmanager
async def connection(server: Running) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*server.address)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def next_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    assert length, head
    return int(head.split()[1]), await reader.readexactly(int(length[1]))


async def pipelined(server: Running, bodies: list[Malformed]) -> Counter[str]:
    """Many requests on one connection, sent without waiting."""
    async with connection(server) as (reader, writer):
        for first in range(0, len(bodies), BATCH):
            batch = bodies[first : first + BATCH]
            writer.write(b"".join(each.request() for each in batch))
            for each in batch:
                status, told = await next_answer(reader)
                assert 400 <= status < 500, (each, status, told)
                assert b'"error":' in told
    return Counter(answered=len(bodies))


async def plain(server: Running, bodies: list[Malformed]) -> Counter[str]:
    async with httpx.AsyncClient(base_url=server.url, timeout=WAIT) as http:
        for each in bodies:
            answer = await http.post(each.path, content=each.body)
            assert answer.is_client_error, (each, answer)
    return Counter(answered=len(bodies))


def broken_request(draw: random.Random, each: Malformed) -> bytes:
    """HTTP that is wrong itself, or that ends before it should."""
    whole, length = each.request(), len(each.body)
    lies = (
        f"{length + 50}",
        f"{length}{length}9",
        "-5",
        "ten",
        "1e3",
        "",
        f"{2**70}",
        f"{length}\r\nContent-Length: 1",
    )
    head, body = whole.rsplit(b"Content-Length:", 1)[0], each.body
    return draw.choice(
        (
            whole[: draw.randrange(1, len(whole))],
            head + f"Content-Length: {draw.choice(lies)}\r\n\r\n".encode() + body,
            head + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n" + body,
            head + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
            head + b"Transfer-Encoding: chunked\r\n\r\n" + b"fffffffffffffffffff\r\n" + body,
            head.replace(b"HTTP/1.1", b"HTTP/9.9") + b"\r\n" + body,
            draw.randbytes(100),
            b"POST " + b"/x" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            head + b"X-Long: " + b"y" * 20_000 + b"\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(50),
        )
    )


async def broken(server: Running, bodies: list[tuple[Malformed, bytes]]) -> Counter[str]:
    """Each on a connection of its own, that says no more after it."""
    told: Counter[str] = Counter()
    for each, request in bodies:
        async with connection(server) as (reader, writer):
            with suppress(ConnectionError):
                writer.write(request)
                writer.write_eof()
                statuses = re.findall(rb"HTTP/1.1 (\d+)", await asyncio.wait_for(reader.read(), WAIT))
                statuses = [status for status in statuses if status != b"100"]  # which clients skip
                assert all(status.startswith(b"4") for status in statuses), (each, request, statuses)
                told["answered"] += bool(statuses)
        told["broken"] += 1
    return told


async def slow(server: Running, each: Malformed, ended: asyncio.Event) -> None:
    """A byte now and then, and never the last."""
    with suppress(ConnectionError):
        async with connection(server) as (_, writer):
            for byte in each.request()[:-1]:
                writer.write(bytes([byte]))
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), 0.05)
                if ended.is_set():
                    return


# -- good streams -------------------------------------------------------------------------------------------------

TOKENS = 150
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "[*abc]"}], "max_tokens": TOKENS}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "[*é漢]"}], "max_tokens": TOKENS, "seed": 3}),
    ("/v1/completions", {"prompt": "[*12345]", "max_tokens": TOKENS}),
    ("/v1/completions", {"prompt": "[*xyz ]", "max_tokens": TOKENS, "n": 2}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "[*hello]"}], "max_tokens": TOKENS}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "[*ping]"}], "max_tokens": TOKENS, "system": "s"}),
    ("/api/chat", {"messages": [{"role": "user", "content": "[*so]"}], "options": {"num_predict": TOKENS}}),
    ("/api/generate", {"prompt": "[*fa]", "options": {"num_predict": TOKENS}}),
]
TEXT = re.compile(r'"(?:content|text|response)":"([^"]*)"')


async def streamed(http: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> str:
    """All text of a stream's pieces; of two choices, one after the other."""
    pieces: dict[str, str] = {}
    async with http.stream("POST", path, json={"model": MODEL, "stream": True} | fields) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            index = re.search(r'"choices":\[{"index":(\d)', line)
            choice = index[1] if index else ""
            pieces[choice] = pieces.get(choice, "") + "".join(TEXT.findall(line))
    return "|".join(pieces[choice] for choice in sorted(pieces))


async def stream_until(server: Running, path: str, fields: dict[str, Any], alone: str, ended: asyncio.Event) -> int:
    """How many times the same was streamed."""
    count = 0
    async with httpx.AsyncClient(base_url=server.url, timeout=WAIT) as http:
        while not ended.is_set():
            assert await streamed(http, path, fields) == alone
            count += 1
    return count


async def alone(server: Running) -> list[str]:
    async with httpx.AsyncClient(base_url=server.url, timeout=WAIT) as http:
        return [await streamed(http, path, fields) for path, fields in ASKED]


# -- all at once --------------------------------------------------------------------------------------------------


def share(of: list[Any], among: int) -> list[list[Any]]:
    return [of[start::among] for start in range(among)]


async def bombard(server: Running, draw: random.Random, counts: tuple[int, int, int]) -> Counter[str]:
    routes = post_routes(server)
    piped, usual, wrong = ([malformed(draw, routes) for _ in range(count)] for count in counts)
    torn = [(each, broken_request(draw, each)) for each in wrong]
    told = await asyncio.gather(
        *(pipelined(server, some) for some in share(piped, CONNECTIONS)),
        *(plain(server, some) for some in share(usual, 2)),
        *(broken(server, some) for some in share(torn, 4)),
    )
    return sum(told, Counter())


async def bombard_amid_streams(
    server: Running, draw: random.Random, texts: list[str]
) -> tuple[Counter[str], list[int]]:
    ended = asyncio.Event()
    routes = post_routes(server)
    crawling = [asyncio.create_task(slow(server, malformed(draw, routes), ended)) for _ in range(SLOW)]
    good = [
        asyncio.create_task(stream_until(server, path, fields, text, ended))
        for (path, fields), text in zip(ASKED, texts, strict=True)
    ]
    try:
        told = await bombard(server, draw, (PIPELINED, PLAIN, BROKEN))
    finally:
        ended.set()
    await asyncio.gather(*crawling)
    return told, await asyncio.gather(*good)


def gauges(server: Running) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics").text
    return {name: float(value) for name, value in re.findall(r"^(penstock_\S+) (\S+)$", text, re.MULTILINE)}


def test_ten_thousand_malformed_bodies_amid_eight_streams(server: Running) -> None:
    draw = random.Random(SEED)
    texts = asyncio.run(alone(server))
    assert len(set(texts)) == len(ASKED)
    assert all(len(text) > TOKENS / 4 for text in texts)
    asyncio.run(bombard(server, draw, (600, 20, 60)))  # what is made once is made
    until(lambda: gauges(server)['penstock_requests{state="running"}'] == 0)
    files, megabytes = server.files(), server.megabytes()

    told, streams = asyncio.run(bombard_amid_streams(server, draw, texts))

    assert told["answered"] >= PIPELINED + PLAIN
    assert told["broken"] == BROKEN
    assert min(streams) > 0
    until(lambda: server.files() <= files)
    until(lambda: gauges(server)['penstock_requests{state="running"}'] == 0)
    after = gauges(server)
    assert after['penstock_requests{state="waiting"}'] == 0
    assert after['penstock_kv_blocks{state="used"}'] == 0
    assert after["penstock_engine_restarts_total"] == 0
    assert server.megabytes() - megabytes < GROWTH
    assert asyncio.run(alone(server)) == texts

"""Measures what a gateway in front of another engine costs: time to the first event, and CPU time for each event.

    python bench/relay.py --clients 64 --requests 6 --events 500

A scripted engine sends events as fast as it can, each as a chunk of its own. Clients read them from it directly and
through a gateway, in turn. Engine, gateway and clients are three processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from statistics import median

EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"word "},"finish_reason":null}]}\n\n'
)
GATEWAY = """
import sys
from penstock.fleet.foreign.engine import parse_engine
from penstock.fleet.foreign.gateway import ForeignGateway
from penstock.server import Setup, serve
from penstock.server.models.pool import ModelPool
from penstock.server.telemetry.access_log import LogSettings
foreign = ForeignGateway([parse_engine(sys.argv[1])])
serve(ModelPool([], foreign=foreign), "127.0.0.1", 0, Setup("gateway", log=LogSettings("error")))
"""


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class ScriptedEngine:
    """Speaks just enough HTTP to be taken for vLLM."""

    def __init__(self, events: int) -> None:
        self._events = events
        usage = b'{"prompt_tokens":5,"completion_tokens":%d,"total_tokens":5}' % events
        last = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
        counted = b'data: {"choices":[],"usage":' + usage + b"}\n\n"
        self._end = chunk(last) + chunk(counted) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self._event = chunk(EVENT)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = head.partition(b"content-length:")[2].partition(b"\r\n")[0].strip() or b"0"
                body = await reader.readexactly(int(size))
                await self._answer(head.split(b" ")[1], body, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                return

    async def _answer(self, path: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == b"/v1/chat/completions":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for at in range(1 if b'"max_tokens":1' in body else self._events):
                writer.write(self._event)
                await asyncio.sleep(0)
                if at % 50 == 0:
                    await writer.drain()
            writer.write(self._end)
            return
        answer = {b"/v1/models": b'{"data":[{"id":"m","owned_by":"vllm"}]}', b"/health": b"{}"}.get(path)
        status = b"404 Not Found" if answer is None else b"200 OK"
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(answer or b""), answer or b""))


def run_engine(events: int) -> None:
    async def main() -> None:
        server = await asyncio.start_server(ScriptedEngine(events).handle, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    asyncio.run(main())


async def load(port: int, clients: int, requests: int, short: bool) -> tuple[float, list[float]]:
    """Returns events per second, and the milliseconds to each answer's first event."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
    body |= {"max_tokens": 1} if short else {}
    data = json.dumps(body, separators=(",", ":")).encode()
    asked = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)
    count, first = 0, []

    async def client() -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(requests):
            began, seen, tail = time.perf_counter(), False, b""
            writer.write(asked)
            while not tail.endswith(b"0\r\n\r\n"):
                read = await reader.read(2**16)
                if not seen and b"data:" in read:
                    first.append((time.perf_counter() - began) * 1000)
                    seen = True
                count += read.count(b"data:")
                tail = (tail + read)[-8:]
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return count / (time.perf_counter() - began), first


def cpu_ms(pid: int) -> float:
    """Returns the CPU time of a process so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def start_gateway(engine: int) -> tuple[subprocess.Popen[str], int]:
    words = [sys.executable, "-c", GATEWAY, f"http://127.0.0.1:{engine}"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = next(line for line in process.stderr if line.startswith("serving "))
    return process, int(line.partition("http://127.0.0.1:")[2].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=6, help="of each client")
    parser.add_argument("--events", type=int, default=500, help="of each answer")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        return run_engine(given.events)
    words = [sys.executable, __file__, "--engine", "--events", str(given.events)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        port = int(engine.stdout.readline())
        gateway, through = start_gateway(port)
        try:
            compare(given, port, through, gateway.pid)
        finally:
            gateway.kill()
            engine.kill()


def compare(given: argparse.Namespace, direct: int, through: int, pid: int) -> None:
    for name, port in (("direct", direct), ("gateway", through)) * 2:
        before = cpu_ms(pid)
        rate, _ = asyncio.run(load(port, given.clients, given.requests, False))
        spent = cpu_ms(pid) - before
        _, first = asyncio.run(load(port, 1, 300, True))
        events = given.clients * given.requests * given.events
        cost = f"; the gateway's CPU time: {spent * 1000 / events:.1f} us an event" if port == through else ""
        print(f"{name}: {rate:,.0f} events/s; first event after {median(first):.2f} ms (least {min(first):.2f}){cost}")


if __name__ == "__main__":
    main()

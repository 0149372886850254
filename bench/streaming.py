"""Measures what the server process costs for each token that it streams, beside the engine process's own cost.

    python bench/streaming.py                                    chat and completions, 256 and 1,024 clients
    python bench/streaming.py --against ../other/src --rounds 5  this tree and another one in turn

The engine answers without computing, a step every `--step` milliseconds: the server has to send a token to every client
at once and can keep up. Clients are raw sockets in this process; the server is another, the engine a third. What is
reported is processor time from /proc: it tells more than a clock on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
from instant import open_instant
from served import free_port, until_ready

OWN = Path(__file__).parent.parent / "src"
KINDS = "chat", "completions"
WORDS = "the quick brown fox jumps over a lazy dog and then some more of that " * 9  # about 128 tokens
END = b"0\r\n\r\n"
TAIL = 1024  # bytes at the end of an answer that have its usage
TICK = os.sysconf("SC_CLK_TCK")


class Spent(NamedTuple):
    """Says how much processor time a process has used, in seconds."""

    user: float
    system: float

    @classmethod
    def of(cls, pid: int) -> Spent:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return cls(int(fields[11]) / TICK, int(fields[12]) / TICK)

    def per(self, tokens: int, before: Spent) -> Spent:
        """Returns the microseconds for each token since `before`."""
        return Spent(*(1e6 * (now - then) / tokens for now, then in zip(self, before, strict=True)))


class Measured(NamedTuple):
    server: Spent  # microseconds of a token
    engine: Spent
    rate: float  # tokens per second
    joined: float  # tokens of a chunk: more than one if the server is behind
    first: float  # milliseconds to the first token, in the median
    gaps: tuple[float, float]  # milliseconds between two reads of one answer: median and 99th percentile

    @property
    def cost(self) -> float:
        return self.server.user + self.server.system


class Client:
    """Sends requests over one connection, each when the one before was answered."""

    def __init__(self, port: int, request: bytes, answers: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self._request, self._left = request, answers
        self._tail = b""
        self._sent = self._last = 0.0
        self.chunks = self.tokens = 0
        self.firsts: list[float] = []
        self.gaps: list[float] = []

    def send(self) -> None:
        self._left -= 1
        self._sent, self._last = time.perf_counter(), 0.0
        self.socket.sendall(self._request)

    def read(self) -> bool:
        """Reads what has come; returns whether there is more to come."""
        part, now = self.socket.recv(1 << 16), time.perf_counter()
        if not part:
            raise ConnectionError(f"the server closed a connection after {self.chunks} chunks")
        if self._last:
            self.gaps.append(now - self._last)
        else:
            self.firsts.append(now - self._sent)
        self._last = now
        self.chunks += part.count(b"data: {")
        self._tail = (self._tail + part)[-TAIL:]
        if not self._tail.endswith(END):
            return True
        self.tokens += int(self._tail.partition(b'"completion_tokens":')[2].partition(b",")[0])
        if self._left:
            self.send()
        return bool(self._last == 0.0)


def request_of(kind: str, number: int, tokens: int) -> bytes:
    """Returns an HTTP request whose prompt begins like no other client's."""
    prompt, body = f"{number} {WORDS}", {"model": "instant", "stream": True, "max_tokens": tokens, "ignore_eos": True}
    body |= {"stream_options": {"include_usage": True}}
    body |= {"prompt": prompt} if kind == "completions" else {"messages": [{"role": "user", "content": prompt}]}
    path = "/v1/completions" if kind == "completions" else "/v1/chat/completions"
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def load(port: int, kind: str, clients: int, answers: int, tokens: int) -> list[Client]:
    """Returns the clients once all of them have their answers."""
    running = {}
    with select.epoll() as ready:
        for number in range(clients):
            client = Client(port, request_of(kind, number, tokens), answers)
            running[client.socket.fileno()] = client
            ready.register(client.socket, select.EPOLLIN)
            client.send()
        every = list(running.values())
        while running:
            for file, _ in ready.poll(60):
                if not running[file].read():
                    ready.unregister(file)
                    running.pop(file).socket.close()
    return every


class Server:
    """Is a server of one tree, which is asked again and again."""

    def __init__(self, tree: Path, port: int, process: subprocess.Popen[bytes]) -> None:
        self.tree = tree
        self._port, self._pid = port, process.pid
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
        self._engine = next(int(child) for child in children if b"host" in Path(f"/proc/{child}/cmdline").read_bytes())

    def measure(self, kind: str, clients: int, options: argparse.Namespace) -> Measured:
        before, engine, began = Spent.of(self._pid), Spent.of(self._engine), time.perf_counter()
        every = load(self._port, kind, clients, options.answers, options.tokens)
        seconds, tokens = time.perf_counter() - began, clients * options.answers * options.tokens
        assert sum(client.tokens for client in every) == tokens
        firsts = [first for client in every for first in client.firsts]
        gaps = statistics.quantiles([0.0, 0.0, *(gap for client in every for gap in client.gaps)], n=100)
        return Measured(
            Spent.of(self._pid).per(tokens, before),
            Spent.of(self._engine).per(tokens, engine),
            tokens / seconds,
            tokens / sum(client.chunks for client in every),
            1000 * statistics.median(firsts),
            (1000 * gaps[49], 1000 * gaps[98]),
        )


@contextmanager
def running(tree: Path, step: float) -> Iterator[Server]:
    """Runs a server of a tree, with an engine that takes `step` milliseconds for a step."""
    port = free_port()
    command = sys.executable, __file__, "server", str(port), str(step)
    env = os.environ | {"PYTHONPATH": f"{tree}:{Path(__file__).parent}"}
    process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    try:
        asyncio.run(_wait_for(port))
        yield Server(tree, port, process)
    finally:
        process.terminate()
        process.wait()


async def _wait_for(port: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        await until_ready(http)


def serve(port: int, step: float) -> None:
    from penstock.cli.terminal import obtain
    from penstock.config import Config
    from penstock.ipc.launchers import SpawnLauncher
    from penstock.ipc.spawn import ProcessClient
    from penstock.model.load import load_text
    from penstock.server.app import serve
    from penstock.server.models.pool import ModelPool
    from penstock.server.models.source import ModelSource

    path, host = obtain("smollm2"), SpawnLauncher((sys.executable, __file__, "host", str(step)))
    source = ModelSource("instant", lambda: ProcessClient(Config(model="instant"), host), lambda: load_text(path), path)
    serve(ModelPool([source]), "127.0.0.1", port)


def host(step: float) -> None:
    from penstock.ipc.host import host

    host(lambda config, _: open_instant(config, step / 1000))


def report(cell: str, tree: Path, measured: Sequence[Measured]) -> None:
    median = statistics.median
    costs = [each.cost for each in measured]
    user, system = median(each.server.user for each in measured), median(each.server.system for each in measured)
    engine, rate = median(sum(each.engine) for each in measured), median(each.rate for each in measured)
    first, *gaps = (median(values) for values in zip(*((each.first, *each.gaps) for each in measured), strict=True))
    spread = (
        f"{median(costs):.1f} us a token ({min(costs):.1f} to {max(costs):.1f}; user {user:.1f}, system {system:.1f})"
    )
    print(f"{cell} {tree}: server {spread}, engine {engine:.1f};")
    joined = median(each.joined for each in measured)
    times = f"first {first:.1f} ms, then {gaps[0]:.1f} ms, p99 {gaps[1]:.1f}"
    print(f"  {rate:,.0f} tokens/s, {joined:.2f} in a chunk, {times}", flush=True)


def compare(options: argparse.Namespace) -> None:
    """Measures every cell, the trees in turn."""
    trees = [OWN, options.against] if options.against else [OWN]
    for clients in options.clients:
        step = 80 * clients / 1024 if options.step is None else options.step
        with ExitStack() as servers:
            every = [servers.enter_context(running(tree, step)) for tree in trees]
            for kind in options.kinds:
                rounds = [[server.measure(kind, clients, options) for server in every] for _ in range(options.rounds)]
                for server, measured in zip(every, zip(*rounds, strict=True), strict=True):
                    report(f"{kind}, {clients}", server.tree, measured)
                if options.against:
                    ratios = sorted(other.cost / own.cost for own, other in rounds)
                    print(f"  ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["host"]:
        step = float(sys.argv.pop(2))
        sys.argv.pop(1)
        return host(step)
    if sys.argv[1:2] == ["server"]:
        return serve(int(sys.argv[2]), float(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the src folder of another tree")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--clients", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--answers", type=int, default=1, help="for each client")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step", type=float, help="milliseconds; by default 80 for 1,024 clients, in proportion")
    compare(parser.parse_args())


if __name__ == "__main__":
    main()

"""Measures what it costs to have several models on one server instead of one server for each.

    python bench/many_models.py CHAT CHAT CHAT EMBEDDER [--memory 1500000000] [--requests 300] [--parts answers,...]

The first models chat and the last one embeds. Each part prints a line or two:

answers     Requests of all models, interleaved, to one server within `--memory`: each answer is compared with that of
            a server which has the model to itself. With less memory, models make room for each other all the time.
streams     The token rate of a stream of the first model while the second or the third is being loaded, beside its rate
            while none is. Loads and pauses of the same length alternate within one stream.
first       The time to the first token of a model that is awake, beside a server of that model alone. Both take turns.
memory      The memory of the whole process tree before a model is loaded and after `keep_alive: 0` has unloaded it, as
            the sum of proportional set sizes (PSS).

A busy machine blurs `streams` and `first`; the last line says how much of it others have used.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from quiet import Clock, adopt_orphans, others_since, reap_orphans

WORDS = (
    "the",
    "river",
    "stone",
    "small",
    "green",
    "walks",
    "over",
    "under",
    "seven",
    "lamps",
    "bridge",
    "paper",
    "rain",
)
CLIENTS = 4  # at once
PAUSE = 1.0  # seconds at least
PAIRS = 150  # of first tokens
KV_MEMORY = 64_000_000  # bytes of each model's cache: all four fit into the budget


class Asked(NamedTuple):
    """Is one request to one of the models."""

    model: int
    path: str
    body: dict[str, Any]


def main() -> None:
    args = arguments()
    adopt_orphans()
    start = Clock.now()
    names = [name_of(model) for model in args.models]
    for part in args.parts.split(","):
        PARTS[part](args, names)
    reap_orphans()
    print(f"others used {others_since(start):.0%} of the machine meanwhile")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs=4, metavar="MODEL")
    parser.add_argument("--memory", type=int, default=1_500_000_000)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=6, help="loads of each model beside a stream")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", default=",".join(PARTS))
    return parser.parse_args()


def name_of(model: str) -> str:
    """Returns what a server calls a model."""
    path = Path(model)
    return path.stem if path.is_file() else path.resolve().name if path.exists() else model


# -- servers --------------------------------------------------------------------------------------------------------


class Running(NamedTuple):
    """Is a server that was started here."""

    port: int
    pid: int

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"content-type": "application/json"})
        return connection.getresponse()

    def answer(self, asked: Asked, name: str) -> tuple[int, Any]:
        """Returns the status and what was answered: a text or embeddings."""
        response = self.call("POST", asked.path, {"model": name, **asked.body})
        body = json.loads(response.read())
        if response.status != 200:
            return response.status, body
        if asked.path == "/v1/embeddings":
            return 200, [each["embedding"] for each in body["data"]]
        return 200, (body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"])

    def stream(self, name: str, tokens: int, text: str) -> Iterator[float]:
        """Yields the time of each token. None is drafted: a chunk would hold several."""
        body = said(text) | {"model": name, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "speculation": 0}
        response = self.call("POST", "/v1/chat/completions", body)
        while line := response.readline():
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"]:
                yield time.perf_counter()

    def load(self, name: str, how: str) -> None:
        """Loads or unloads a model."""
        response = self.call("POST", f"/models/{how}", {"model": name})
        if response.status != 200:
            raise SystemExit(f"{how} of {name}: {response.read().decode()}")
        response.read()

    def memory(self) -> int:
        """Returns the bytes of the server and all processes under it."""
        return sum(map(pss, tree(self.pid)))


@contextmanager
def serving(models: Sequence[str], *options: object) -> Iterator[Running]:
    """Starts a server on a free port."""
    command = [sys.executable, "-m", "penstock", "serve", *models, "--port", "0", "--log-level", "error"]
    with subprocess.Popen([*command, *map(str, options)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            ports = (found[1] for line in lines if (found := re.search(r"on http://127\.0\.0\.1:(\d+)", line)))
            port = next(ports, None)
            if port is None:
                raise SystemExit(f"the server of {', '.join(models)} did not start")
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield Running(int(port), process.pid)
        finally:
            process.terminate()


def tree(pid: int) -> list[int]:
    """Returns a process and all that it has started."""
    below: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            below += [each for child in (task / "children").read_text().split() for each in tree(int(child))]
    return [pid, *below]


def pss(pid: int) -> int:
    """Returns the bytes of a process, where memory that several share is divided among them."""
    with suppress(FileNotFoundError, ProcessLookupError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)[1]) << 10  # type: ignore[index]
    return 0


# -- answers --------------------------------------------------------------------------------------------------------


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def requests(count: int, models: int, seed: int) -> list[Asked]:
    """Returns requests of mixed lengths, greedy and sampled, for models in random order. The last model embeds."""
    chance = random.Random(seed)

    def words() -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(3, 50)))

    def one(number: int) -> Asked:
        model = chance.randrange(models)
        if model == models - 1:
            return Asked(model, "/v1/embeddings", {"input": [words() for _ in range(chance.randint(1, 3))]})
        sampling = {"temperature": 0} if number % 2 else {"temperature": 0.9, "top_p": 0.9, "seed": number}
        return Asked(model, "/v1/chat/completions", said(words()) | sampling | {"max_tokens": chance.randint(1, 16)})

    return [one(number) for number in range(count)]


def answers(args: argparse.Namespace, names: list[str]) -> None:
    asked = requests(args.requests, len(names), args.seed)
    expected: dict[int, Any] = {}
    with ThreadPoolExecutor(CLIENTS) as clients:
        for model, ref in enumerate(args.models):
            own = [number for number, each in enumerate(asked) if each.model == model]
            with serving([ref], "--kv-memory", KV_MEMORY) as server:
                told = clients.map(lambda number: server.answer(asked[number], names[model]), own)  # noqa: B023
                expected |= dict(zip(own, told, strict=True))
        began = time.perf_counter()
        with serving(args.models, "--memory", args.memory, "--kv-memory", KV_MEMORY) as server:
            got = list(clients.map(lambda each: server.answer(each, names[each.model]), asked))
            health = json.loads(server.call("GET", "/health").read())["models"]
    seconds = time.perf_counter() - began
    errors = [each for each in [*expected.values(), *got] if each[0] != 200]
    different = [number for number, each in enumerate(got) if each != expected[number]]
    print(
        f"answers: {len(asked)} requests to {len(names)} models in {seconds:.0f} s: {len(errors)} errors, "
        f"{len(different)} answers differ from a dedicated server's; at the end the models take "
        f"{sum(each['bytes'] for each in health) / 1e9:.2f} GB of {args.memory / 1e9:.2f} GB"
    )
    for number in different[:3]:
        print(f"  {names[asked[number].model]}, {asked[number].body}: {got[number]}, not {expected[number]}")
    for error in errors[:3]:
        print(f"  {error}")


# -- streams --------------------------------------------------------------------------------------------------------


def streams(args: argparse.Namespace, names: list[str]) -> None:
    """Streams one answer after the other while other models are loaded and unloaded."""
    times: list[float] = []
    stop = threading.Event()
    with serving(args.models, "--memory", args.memory, "--kv-memory", KV_MEMORY) as server:
        for name in names[:3]:  # the first time also finishes the imports of the server
            server.load(name, "load")
        for name in names[1:3]:
            server.load(name, "unload")

        def stream() -> None:
            while not stop.is_set():
                times.extend(server.stream(names[0], 400, "Tell a long story."))

        reader = threading.Thread(target=stream)
        reader.start()
        time.sleep(1.0)
        windows = [(name, load_and_pause(server, name)) for _ in range(args.rounds) for name in names[1:3]]
        stop.set()
        reader.join()
    for name in names[1:3]:
        own = [each for loaded, each in windows if loaded == name]
        during, beside = (
            [rate(times, *window[:2]) for window in own],
            [rate(times, *window[2:]) for window in own],
        )
        took = statistics.median(window[1] - window[0] for window in own)
        ratio = statistics.median(each / other for each, other in zip(during, beside, strict=True))
        print(
            f"streams: {statistics.median(during):.1f} tokens/s while {name} is loaded ({took:.2f} s), "
            f"{statistics.median(beside):.1f} while nothing is: {ratio:.1%}"
        )


def load_and_pause(server: Running, name: str) -> tuple[float, float, float, float]:
    """Returns when a load began and ended, and the same of a pause as long as that."""
    began = time.perf_counter()
    server.load(name, "load")
    done = time.perf_counter()
    server.load(name, "unload")
    time.sleep(0.2)
    pause = time.perf_counter()
    time.sleep(max(done - began, PAUSE))
    return began, done, pause, time.perf_counter()


def rate(times: Sequence[float], began: float, done: float) -> float:
    """Returns the tokens per second of a window, from the last token before it to the last one within."""
    before = [each for each in times if each < began][-1:]
    within = before + [each for each in times if began <= each <= done]
    return (len(within) - 1) / (within[-1] - within[0]) if len(within) > 1 else 0.0


# -- first token ----------------------------------------------------------------------------------------------------


def first(args: argparse.Namespace, names: list[str]) -> None:
    with (
        serving(args.models[:1], "--kv-memory", KV_MEMORY) as alone,
        serving(args.models, "--memory", args.memory, "--kv-memory", KV_MEMORY) as shared,
    ):
        for name in names[1:2]:
            shared.load(name, "load")
        seconds: dict[int, list[float]] = {alone.port: [], shared.port: []}
        for number in range(PAIRS):
            for server in (alone, shared) if number % 2 else (shared, alone):
                began = time.perf_counter()
                chunks = list(server.stream(names[0], 2, f"{number} {' '.join(WORDS)}"))
                seconds[server.port].append(chunks[0] - began)
    alone_ms, shared_ms = (statistics.median(seconds[server.port][2:]) * 1e3 for server in (alone, shared))
    print(
        f"first: {shared_ms:.1f} ms to the first token beside other models, {alone_ms:.1f} ms alone: "
        f"{shared_ms / alone_ms - 1:+.1%}"
    )


# -- memory ---------------------------------------------------------------------------------------------------------


def memory(args: argparse.Namespace, names: list[str]) -> None:
    with serving(args.models, "--memory", args.memory, "--kv-memory", KV_MEMORY) as server:
        server.load(names[1], "load")  # another model that stays, as on a server in use
        for name in (names[0], names[2]):
            before = server.memory()
            body = said("Hello") | {"model": name, "stream": False, "options": {"num_predict": 8}}
            server.call("POST", "/api/chat", body).read()
            awake = server.memory()
            server.call("POST", "/api/chat", body | {"keep_alive": 0}).read()
            after = settled(server)
            print(
                f"memory: {name}: {before / 1e6:.0f} MB before, {awake / 1e6:.0f} MB awake, {after / 1e6:.0f} MB after "
                f"keep_alive 0: {after / before - 1:+.1%}"
            )


def settled(server: Running) -> int:
    """Returns the server's memory once it no longer falls."""
    last = server.memory()
    for _ in range(50):
        time.sleep(0.2)
        now = server.memory()
        if now > last * 0.999:
            return now
        last = now
    return last


PARTS = {"answers": answers, "streams": streams, "first": first, "memory": memory}

if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()

"""Cells of `cuda.py` over HTTP: `penstock serve` on a random model's files, loaded by `penstock bench` on loopback.

    PYTHONPATH=src python bench/gpu/http_cells.py --shape tiny --device cpu --cells start,http4

runs them without a GPU, to see that everything is in its place.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import model_shapes
import random_model

from penstock.tools.bench import RequestTiming, UrlTarget

Figures = dict[str, Any]
SHAPES = model_shapes.SHAPES | model_shapes.TINY
FILES = {"q4_k": "Q4_K", "q8_0": "Q8_0", "q4_0": "Q4_0"}  # weights that come as a GGUF file; the others as a folder
READY = 240.0  # seconds a server may take
SETTLE = 12.0  # seconds without requests, in which graphs are captured
ROUNDS = 3  # requests of each client


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


@dataclass(slots=True)
class Subject:
    """A random model's files, made when the first cell asks for them, and how to serve them."""

    weights: str = "bf16"
    shape: str = "llama8b"
    layers: int = 0
    device: str = "cuda"
    options: tuple[str, ...] = ()
    _made: tempfile.TemporaryDirectory[str] | None = None
    caches: dict[str, str] = field(default_factory=dict)

    def model(self) -> Path:
        shape = SHAPES[self.shape]
        shape = replace(shape, layers=self.layers or shape.layers)
        if self._made is None:
            place = place_for(random_model.folder_bytes(shape))
            self._made = tempfile.TemporaryDirectory(prefix="random-model-", dir=place)
            began = time.perf_counter()
            path = self._path()
            if self.weights not in FILES:
                random_model.write_folder(path, shape)
            elif isinstance(shape, model_shapes.Llama):
                random_model.write_gguf(path, shape, FILES[self.weights])
            else:
                raise ValueError(f"a GGUF file is written of llama's shapes alone; got {self.shape}: take bf16 or fp8")
            took = time.perf_counter() - began
            size = sum(part.stat().st_size for part in path.parent.rglob("*") if part.is_file())
            say(f"wrote {size / 1e9:.2f} GB to {path} in {took:.1f} s")
        return self._path()

    def command(self) -> list[str]:
        """As a user would type it, but for the port."""
        quantize = [] if self.weights in FILES or self.weights == "bf16" else ["--quantize", self.weights]
        serve = [sys.executable, "-m", "penstock", "serve", str(self.model()), "--name", "random", "--port", "0"]
        drafts = ["--speculation", "off"]  # answers of random weights repeat themselves, and drafts would guess them
        return [*serve, "--device", self.device, *quantize, *drafts, *self.options]

    def _path(self) -> Path:
        assert self._made is not None
        return Path(self._made.name) / ("file/model.gguf" if self.weights in FILES else "model")


def place_for(size: int) -> str:
    for place in ("/dev/shm", tempfile.gettempdir()):
        if os.path.isdir(place) and shutil.disk_usage(place).free > size:
            return place
    raise RuntimeError(f"neither /dev/shm nor {tempfile.gettempdir()} has room for {size / 1e9:.0f} GB")


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    pid: int
    ready: float  # seconds from its start to its word that it serves
    log: Path


@contextmanager
def serving(subject: Subject, kernels: str) -> Iterator[Server]:
    """A server with its compiled kernels kept in the folder `kernels`; what it wrote is shown when it fails."""
    command = subject.command()
    log = Path(tempfile.mkstemp(suffix=".log")[1])
    environment = os.environ | {"TRITON_CACHE_DIR": kernels, "PYTHONUNBUFFERED": "1"}
    say(f"starting {' '.join(command[1:])}")
    began = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        url = wait_for_url(process, log)
        yield Server(url, process.pid, time.perf_counter() - began, log)
    except BaseException:
        say(f"the server wrote:\n{log.read_text()[-6000:]}")
        raise
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.copy(log, Path(os.environ.get("OUT", tempfile.gettempdir())) / "serve.log")


def wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.perf_counter() + READY
    while time.perf_counter() < end:
        if found := re.search(r"serving .* on (http://\S+)", log.read_text(errors="replace")):
            return f"{found[1]}/v1"
        if process.poll() is not None:
            raise RuntimeError(f"the server left with code {process.returncode}")
        time.sleep(0.005)
    raise RuntimeError(f"the server was not ready in {READY:.0f} s")


def first_token(url: str, prompt: int) -> float:
    """Seconds to the first token of an answer to so many tokens."""

    async def ask() -> float:
        target, timing = UrlTarget(url, "random"), RequestTiming()
        await target.complete([1000 + i % 7919 for i in range(prompt)], 8, timing)
        return timing.arrivals[0] - timing.started

    return asyncio.run(ask())


def start(subject: Subject) -> Figures:
    """From the start of the process to the first token over HTTP: with no kernel compiled yet, and again."""
    subject.model()
    found: Figures = {}
    with tempfile.TemporaryDirectory(prefix="kernels-") as kernels:
        for name in ("first", "again", "third"):
            with serving(subject, kernels) as server:
                answered = first_token(server.url, 16)
                total = server.ready + answered
                figures: Figures = {"ready s": server.ready, "token s": answered, "start to first token s": total}
                figures["next tokens ms"] = [first_token(server.url, size) * 1e3 for size in (16, 16, 512, 512)]
                figures["log"] = server.log.read_text()[-4000:]
            found[name] = figures
            say(f"start, {name}: {total:.2f} s to the first token (at most 15), of them {server.ready:.2f} to be ready")
            say(f"  answers after it, ms: {', '.join(f'{ms:.0f}' for ms in figures['next tokens ms'])}")
            for line in figures["log"].splitlines():
                say(f"  | {line}")
        found["kernels compiled"] = len(list(Path(kernels).glob("*/*.cubin")))
    return found


@dataclass(frozen=True, slots=True)
class Load:
    """So many clients, each with a request in every round. Several programs share the clients, where one could not read
    answers as fast as they come."""

    clients: int
    prompt: int
    answer: int
    shared: int = 0  # leading tokens that all prompts have in common
    programs: int = 1
    rounds: int = ROUNDS

    def named(self) -> str:
        common = f", {self.shared} in common" if self.shared else ""
        return f"{self.clients} clients, {self.prompt}/{self.answer}{common}"


def http(*loads: Load, options: tuple[str, ...] = ()) -> Callable[[Subject], Figures]:
    """Measures loads one after the other on one server."""

    def cell(subject: Subject) -> Figures:
        kernels = subject.caches.setdefault("kernels", tempfile.mkdtemp(prefix="kernels-"))
        with serving(replace(subject, options=(*options, *subject.options)), kernels) as server:
            say(f"ready after {server.ready:.1f} s")
            return {each.named(): measured(server, subject, each) for each in loads}

    return cell


def measured(server: Server, subject: Subject, wanted: Load) -> Figures:
    """Warms up with one round, lets graphs be captured, and measures."""
    tiny = subject.shape in model_shapes.TINY
    wanted = replace(wanted, prompt=64 + wanted.shared // 64, answer=32, shared=wanted.shared // 64) if tiny else wanted
    load(server, replace(wanted, answer=min(wanted.answer, 96)), 1)
    time.sleep(0 if subject.device == "cpu" else SETTLE)
    before = processor_seconds(server.pid)
    figures = load(server, wanted, wanted.rounds)
    spent = processor_seconds(server.pid) - before
    figures["server process, µs per token"] = spent * 1e6 / max(figures["output_tokens"], 1)
    figures["server process, share of a core"] = spent / figures["seconds"]
    figures["log"] = server.log.read_text()[-4000:]
    told = f"TTFT p50 {figures['ttft_p50']:.0f} p99 {figures['ttft_p99']:.0f}, ITL p50 {figures['itl_p50']:.2f} p99"
    say(f"http {wanted.named()}: {figures['output_tok_s']:.0f} tok/s, {told} {figures['itl_p99']:.2f} ms")
    say(f"  server process: {figures['server process, µs per token']:.1f} µs of CPU time per token")
    say(f"  {figures['errors']} of {figures['requests']} failed {figures['first_error']}")
    return figures


def load(server: Server, wanted: Load, rounds: int) -> Figures:
    """Returns the figures of all programs together: sums of tokens, and of times the largest."""
    clients = wanted.clients // wanted.programs
    sizes = ["--input-len", str(wanted.prompt), "--output-len", str(wanted.answer)]
    sizes += ["--requests", str(rounds * clients), "--shared-prefix", str(wanted.shared), "--json"]
    command = [sys.executable, "-m", "penstock", "bench", "--url", server.url, "--concurrency", str(clients), *sizes]
    started = [
        subprocess.Popen([*command, "--seed", f"{rounds}{number}"], stdout=subprocess.PIPE, text=True)
        for number in range(wanted.programs)
    ]
    results = [json.loads(each.communicate(timeout=500)[0])["results"][0] for each in started]
    figures: Figures = {name: max(result[name] for result in results) for name in results[0]}
    for name in ("requests", "errors", "prompt_tokens", "cached_tokens", "output_tokens"):
        figures[name] = sum(result[name] for result in results)
    figures["output_tok_s"] = figures["output_tokens"] / figures["seconds"]
    return figures


def processor_seconds(pid: int) -> float:
    """Of the server's own process, without its engine's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


HTTP_CELLS: dict[str, Callable[[Subject], Figures]] = {
    "start": start,
    **{f"http{clients}": http(Load(clients, 512, 512)) for clients in (1, 4, 64, 256)},
    "long": http(Load(16, 16000, 256), Load(64, 4224, 128, shared=4096)),
    "saturated": http(
        Load(1024, 128, 128, programs=4),
        Load(512, 1000, 1000, programs=4, rounds=2),
        Load(256, 2048, 2048, programs=4, rounds=2),
        options=("--max-rows", "1024", "--kv", "int8", "--kv-loss", "any"),  # random weights lose much
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", default="start,http4")
    parser.add_argument("--weights", default="bf16", choices=("bf16", "fp8", "int4", *FILES))
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--serve", default="", help="more options for penstock serve, with spaces between")
    given = parser.parse_args()
    subject = Subject(given.weights, given.shape, 0, given.device, tuple(given.serve.split()))
    for name in given.cells.split(","):
        try:
            HTTP_CELLS[name](subject)
        except Exception:
            say(traceback.format_exc())


if __name__ == "__main__":
    main()

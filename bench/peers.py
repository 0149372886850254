"""The engines that `cpu.py` and `yardstick.py` compare: how each of them is run for each cell, at its best settings.

`measure(cell, model, seed)` starts a fresh process and returns its figures by unit, such as {"tok/s": 113.0}.
"""

from __future__ import annotations

import asyncio
import compileall
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import penstock
from penstock.errors import EngineUnavailable
from penstock.tools.bench import Result, UrlTarget, Workload, run_workload

Figures = dict[str, float]
Command = Sequence[str | Path]

PROMPT = "The capital of France is"
INPROCESS = Path(__file__).with_name("inprocess.py")
HTTP = {
    "http32": Workload(concurrency=32, requests=64, input_len=128, output_len=128),
    "prefix32": Workload(concurrency=32, requests=32, input_len=1532, output_len=64, shared_prefix=1500),
}
PATIENCE = 900  # seconds for one figure
STARTING = 120


class Unable(Exception):
    """This engine has no figure for this cell, and why."""


class Peer(Protocol):
    name: str

    def measure(self, cell: str, model: Path, seed: int) -> Figures: ...


class Penstock:
    """Runs without drafts: prompts are random, so answers repeat themselves as real ones do not."""

    name = "penstock"

    def __init__(self, threads: int, device: str = "cpu") -> None:
        self._threads = str(threads)
        self._device = device
        self._program = [sys.executable, "-m", "penstock"]
        compileall.compile_dir(Path(penstock.__file__).parent, quiet=1)  # as installing it does

    def measure(self, cell: str, model: Path, seed: int) -> Figures:
        if cell == "start":
            return first_token(
                [*self._program, "run", model, PROMPT, "--raw", "--max-tokens", "64", "--threads", self._threads]
            )
        if cell in HTTP:
            port = free_port()
            with running(
                [*self._program, "serve", model, "--port", port, "--threads", self._threads, "--speculation", "off"]
            ):
                return over_http(cell, port, seed)
        return inprocess([sys.executable, INPROCESS, "penstock"], cell, model, self._threads, seed, self._device)


class LlamaCpp:
    """Its own benchmarks in process; flash attention on."""

    name = "llama.cpp"

    def __init__(self, folder: Path, threads: int) -> None:
        self._folder = folder
        self._settings = ["-t", str(threads), "-fa"]

    def measure(self, cell: str, model: Path, seed: int) -> Figures:
        if cell == "start":
            return first_token(self._command("llama-completion", model, "on", *COMPLETION))
        if cell in HTTP:
            return self._serve(cell, model, seed)
        if cell in BATCHES:
            return self._batch(BATCHES[cell], model)
        if cell in LLAMA_BENCH:
            return self._bench(LLAMA_BENCH[cell], model)
        raise Unable("it has no such cell")

    def _bench(self, work: list[str], model: Path) -> Figures:
        command = self._command("llama-bench", model, "1", "-r", "3", "-o", "json", *work)
        (test,) = json.loads(output(command))
        return {"tok/s": sorted(test["samples_ts"])[1]}

    def _batch(self, count: int, model: Path) -> Figures:
        sizes = ["-npp", "128", "-ntg", "128", "-npl", str(count), "-c", str(count * 256)]
        lines = output(self._command("llama-batched-bench", model, "on", "--output-format", "jsonl", *sizes))
        test = json.loads(lines.strip().splitlines()[-1])
        return {"tok/s": count * 128 / test["t"]}

    def _serve(self, cell: str, model: Path, seed: int) -> Figures:
        port, workload = free_port(), HTTP[cell]
        context = workload.concurrency * (workload.input_len + workload.output_len + 16)
        slots = ["-np", str(workload.concurrency), "-c", str(context), "--port", port]
        with running(self._command("llama-server", model, "on", *slots)):
            return over_http(cell, port, seed)

    def _command(self, program: str, model: Path, flash: str, *rest: str) -> Command:
        return [self._folder / program, "-m", model, *self._settings, flash, *rest]


COMPLETION = ["-p", PROMPT, "-n", "64", "-no-cnv", "--no-display-prompt", "--no-warmup"]
LLAMA_BENCH = {"decode": ["-p", "0", "-n", "128", "-d", "128"], "prefill": ["-p", "512", "-n", "0"]}
BATCHES = {"batch8": 8, "batch32": 32}


class OpenVino:
    """OpenVINO GenAI, reading the GGUF file itself. It has no server."""

    name = "openvino"

    def __init__(self, python: Path, threads: int) -> None:
        self._python = python
        self._threads = str(threads)

    def measure(self, cell: str, model: Path, seed: int) -> Figures:
        if cell == "start":
            return first_token([self._python, "-c", OPENVINO_RUN, model, PROMPT, self._threads])
        if cell == "http32":
            raise Unable("it has no server")
        where = "prefix" if cell == "prefix32" else cell
        return inprocess([self._python, INPROCESS, "openvino"], where, model, self._threads, seed)


OPENVINO_RUN = """
import sys, openvino_genai
model, prompt, threads = sys.argv[1:]
pipeline = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=int(threads))
say = lambda piece: print(piece, end="", flush=True)
pipeline.generate(prompt, max_new_tokens=64, apply_chat_template=False, streamer=say)
"""


class Transformers:
    """`generate` of transformers, which many know: the requests of a cell are one batch. It has no server."""

    name = "transformers"

    def __init__(self, python: Path, threads: int, device: str = "cpu") -> None:
        self._python = python
        self._threads = str(threads)
        self._device = device

    def measure(self, cell: str, model: Path, seed: int) -> Figures:
        if cell == "start" or cell in HTTP:
            raise Unable("it has no command line and no server")
        return inprocess([self._python, INPROCESS, "transformers"], cell, model, self._threads, seed, self._device)


def inprocess(command: Command, cell: str, model: Path, threads: str, seed: int, device: str = "cpu") -> Figures:
    figures: Figures = json.loads(output([*command, cell, model, threads, str(seed), device]).splitlines()[-1])
    return figures


def output(command: Command) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        raise Unable(f"{Path(command[0]).name} left with {done.returncode}: {last_line(done.stderr)}")
    return done.stdout


def first_token(command: Command) -> Figures:
    """Seconds from the process's start to the first byte of its answer, and its peak memory by the end of it."""
    with tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, bufsize=0)
        assert process.stdout
        spoke = process.stdout.read(1)
        seconds = time.perf_counter() - began
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        if process.returncode or not spoke:
            raise Unable(f"{Path(command[0]).name} left with {process.returncode}: {last_line(errors.read())}")
    return {"s": seconds, "MB": usage.ru_maxrss / 1024}


def over_http(cell: str, port: str, seed: int) -> Figures:
    result = asyncio.run(ask(f"http://127.0.0.1:{port}/v1", cell, seed))
    if result.errors:
        raise Unable(f"{result.errors} of {result.requests} requests failed: {result.first_error}")
    if cell == "prefix32":
        return {"s": result.seconds, "tokens computed": result.prompt_tokens - result.cached_tokens}
    return {"tok/s": result.output_tok_s, "TTFT p50 ms": result.ttft_p50, "ITL p99 ms": result.itl_p99}


async def ask(url: str, cell: str, seed: int) -> Result:
    target = UrlTarget(url)
    await ready(target)
    return await run_workload(target, replace(HTTP[cell], seed=seed), lambda: None)


async def ready(target: UrlTarget) -> None:
    for _ in range(STARTING * 10):
        try:
            return await target.negotiate()
        except EngineUnavailable:
            await asyncio.sleep(0.1)
    raise Unable(f"the server did not answer within {STARTING} s")


@contextmanager
def running(command: Command) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]

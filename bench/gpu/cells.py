"""Cells of `cuda.py` that run the whole model: a step by itself, and the engine with one request or many."""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from delta_cells import DELTA_CELLS
from http_cells import HTTP_CELLS, Subject
from kernel_cells import KERNEL_CELLS, say, seconds
from kv_expansion_cells import kv8_prefill
from library_attention import library_attention
from mla_cells import mla
from model_shapes import SHAPES
from random_weights import KINDS, RandomWeights

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend
from penstock.backend.cuda.graphs import bucket_decode_rows
from penstock.backend.cuda.kernels import pdl
from penstock.backend.cuda.shared_prefixes import Sharing
from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.model.families.llama import build
from penstock.model.rope import plain
from penstock.model.spec import AttentionSpec, ModelSpec, RopeSpec
from penstock.types import Failed, Limits, Request, SamplingParams, Tokens, prefill_budget

Figures = dict[str, Any]
BLOCK_SIZE = 16
MAX_TOKENS = 8192  # the largest step of any cell
LONGEST = 32768  # tokens of a request
MAX_ROWS = 256
STEP_TOKENS = 2048  # in cells with many clients
PREFILL_BUDGET = 384  # of them, once up to 64 rows answer
WEIGHT_BYTES = 15.0e9  # read in every step: all but the embedding table
KV_BYTES = 131072  # of one token
READ = 4.457e12  # bytes a second, measured


def llama8b(layers: int) -> ModelSpec:
    attn = AttentionSpec(32, 8, 128, RopeSpec(plain(500000.0, 128), interleaved=False))
    return ModelSpec("llama", layers, 4096, 14336, 128256, 131072, 1e-5, attn)


class Bench:
    """The loaded model, made when the first cell asks for it."""

    def __init__(self, layers: int, kind: str, deterministic: bool = False) -> None:
        self._layers = layers
        self._kind = kind
        self._deterministic = deterministic
        self._backend: CudaBackend | None = None
        self._ids = iter(range(1 << 30))
        self.dice = np.random.default_rng(0)

    @property
    def backend(self) -> CudaBackend:
        if self._backend is None:
            began = time.perf_counter()
            backend = CudaBackend(MAX_TOKENS, MAX_ROWS, deterministic=self._deterministic)
            backend.load(build(llama8b(self._layers), RandomWeights(backend._packer.target.workspace, self._kind)))
            spare = backend.memory_needs().kv_memory
            self.num_blocks = min(spare // (backend.memory_needs().kv_bytes_per_token * BLOCK_SIZE), 24_000)
            backend.reserve_kv(self.num_blocks, BLOCK_SIZE)
            say(f"model ready in {time.perf_counter() - began:.1f} s; {spare / 1e9:.0f} GB were free for KV")
            self._backend = backend
        return self._backend

    def but_deterministic(self) -> Bench:
        """Returns the same model where answers do not depend on the batch. This one leaves the device to it."""
        self.release()
        return Bench(self._layers, self._kind, deterministic=True)

    def release(self) -> None:
        """Leaves the device to another process."""
        if self._backend is not None:
            self._backend.close()
        self._backend = None
        torch.cuda.empty_cache()

    def engine(self, max_tokens: int, prefill_budget: int = PREFILL_BUDGET) -> Engine:
        backend = self.backend
        limits = Limits(LONGEST, MAX_ROWS, max_tokens, BLOCK_SIZE, self.num_blocks, 128256, prefill_budget)
        return assemble(backend, limits, depth=backend.depth)

    def requests(self, count: int, prompt: int, answer: int, temperature: float = 0.0) -> list[Request]:
        params = SamplingParams(temperature=temperature, ignore_eos=True)
        prompts = self.dice.integers(1000, 100_000, (count, prompt)).tolist()
        return [Request(next(self._ids), tuple(tokens), params, answer) for tokens in prompts]


class Watched:
    """A backend that says how long the host waited for it and worked for it."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self.waited: list[float] = []
        self.launched: list[float] = []

    def launch(self, batch: Any) -> Any:
        began = time.perf_counter()
        ticket = self._backend.launch(batch)
        self.launched.append(time.perf_counter() - began)
        return ticket

    def wait(self, ticket: Any) -> Any:
        began = time.perf_counter()
        result = self._backend.wait(ticket)
        self.waited.append(time.perf_counter() - began)
        return result


def generate(engine: Engine, requests: list[Request]) -> Figures:
    """All requests at once, to their ends."""
    watched = engine.backend = Watched(engine.backend)  # type: ignore[assignment]
    times: dict[int, list[float]] = {request.id: [] for request in requests}
    began = time.perf_counter()
    for request in requests:
        engine.add(request)
    steps = []
    while not engine.idle:
        stepped = time.perf_counter()
        events = engine.step()
        now = time.perf_counter()
        steps.append(now - stepped)
        for event in events:
            if isinstance(event, Tokens):
                times[event.seq] += [now - began] * len(event.tokens)
    total = time.perf_counter() - began
    gaps = np.concatenate([np.diff(stamps) for stamps in times.values()]) if len(requests[0].prompt) else []
    first = [stamps[0] for stamps in times.values()]
    tokens = sum(map(len, times.values()))
    host = np.array(steps[: len(watched.waited)]) - np.array(watched.waited[: len(steps)])
    return {
        "tok/s": tokens / total,
        "seconds": total,
        "tokens": tokens,
        "steps": len(steps),
        "ttft_ms": quantiles(first),
        "itl_ms": quantiles(gaps) if len(gaps) else {},
        "step_ms": quantiles(steps),
        "host_ms": quantiles(host),
        "launch_ms": quantiles(watched.launched),
        "waited_ms": quantiles(watched.waited),
    }


def quantiles(values: Any) -> dict[str, float]:
    p50, p90, p99 = np.quantile(np.asarray(values) * 1e3, [0.5, 0.9, 0.99])
    return {"p50": round(float(p50), 3), "p90": round(float(p90), 3), "p99": round(float(p99), 3)}


def decode1(bench: Bench) -> Figures:
    bench.backend.prepare(1)
    generate(bench.engine(STEP_TOKENS), bench.requests(1, 128, 16))
    found = {}
    for name, temperature in (("greedy", 0.0), ("temperature", 0.8)):
        figures = generate(bench.engine(STEP_TOKENS), bench.requests(1, 128, 513, temperature))
        decode = figures["seconds"] - figures["ttft_ms"]["p50"] / 1e3
        found[name] = {"decode tok/s": 512 / decode, **figures}
        say(f"decode1 {name}: {512 / decode:.1f} tok/s (at least 250; limit 297), host {figures['host_ms']}")
    return found


def batch(count: int, at_least: int, mixed: tuple[int, ...]) -> Callable[[Bench], Figures]:
    """So many clients at once, for each number of tokens that steps with prompts and answers may have."""

    def cell(bench: Bench) -> Figures:
        return {f"mixed steps of {tokens}": many_clients(bench, count, at_least, tokens) for tokens in mixed}

    return cell


def many_clients(bench: Bench, count: int, at_least: int, mixed: int) -> Figures:
    prepare(bench.backend, count, mixed)
    generate(bench.engine(STEP_TOKENS, mixed), bench.requests(count, 512, 4))
    figures = generate(bench.engine(STEP_TOKENS, mixed), bench.requests(count, 512, 512))
    say(f"batch{count}, mixed steps of {mixed}: {figures['tok/s']:.0f} tok/s (at least {at_least})")
    for name in ("ttft_ms", "itl_ms", "step_ms", "host_ms", "launch_ms", "waited_ms"):
        say(f"  {name} {figures[name]}")
    return figures


def prepare(backend: CudaBackend, count: int, mixed: int) -> None:
    """The graphs that the cell will use."""
    for rows in range(8, count + 1, 8):
        backend.prepare(rows)
    for many in range(0, count, 64):
        tokens = min(prefill_budget(mixed, many + 1), STEP_TOKENS)
        for rows in (max(many, 8), min(many + 64, count)):
            backend.prepare(rows, tokens - rows)


def prefill(bench: Bench) -> Figures:
    found = {}
    for tokens in (512, 2048, 4096, 16000, 32000):
        runs = []
        for _ in range(4):
            runs.append(generate(bench.engine(MAX_TOKENS), bench.requests(1, tokens, 1))["ttft_ms"]["p50"])
        found[f"{tokens} tokens, ms"] = best = min(runs[1:])
        flops = 2 * tokens * 6.98e9 + 2 * tokens * tokens * 32 * 128 * 32
        say(f"prefill {tokens}: {best:.1f} ms, {flops / best / 1e9:.0f} TFLOP/s (4096: at most 105)")
    halves = generate(bench.engine(STEP_TOKENS), bench.requests(1, 4096, 1))["ttft_ms"]["p50"]
    found["4096 tokens in steps of 2048, ms"] = halves
    say(f"prefill 4096 in steps of {STEP_TOKENS}: {halves:.1f} ms")
    return found


def decode_batch(rows: int, context: int, blocks: int, step: int) -> Any:
    width = -(-context // BLOCK_SIZE)
    tables = np.random.default_rng(rows).permutation(blocks)[: rows * width].reshape(rows, width).tolist()
    return greedy_batch([Chunk([1], context - 1, tables[row], row, 1) for row in range(rows)], step)


def mixed_batch(rows: int, prompt: int, blocks: int) -> Any:
    """Rows, most of them with 768 positions of context, the last ones with 512 tokens of a prompt or less."""
    width = -(-768 // BLOCK_SIZE)
    tables = np.random.default_rng(rows).permutation(blocks)[: rows * width].reshape(rows, width).tolist()
    prompts = [min(512, prompt - first) for first in range(0, prompt, 512)]
    decodes = rows - len(prompts)
    chunks = [Chunk([1], 767, tables[row], row, 1) for row in range(decodes)]
    return greedy_batch(
        [*chunks, *(Chunk([1] * count, 0, tables[decodes + i], decodes + i, 1) for i, count in enumerate(prompts))]
    )


def step(bench: Bench) -> Figures:
    """A decode step by itself, with 768 positions of context: the graph alone, and as the engine would run it."""
    found: Figures = {}
    backend = bench.backend
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        work = decode_batch(rows, 768, bench.num_blocks, 0)
        for turn in range(3):
            backend.wait(backend.launch(replaced(work, turn)))
        entry = {"graph ms": graph_ms(backend, rows), "launch ms": launch_ms(backend, work)}
        entry["limit ms"] = (WEIGHT_BYTES + rows * 768 * KV_BYTES) / READ * 1e3
        if rows in (1, 16, 64):
            entry["without programmatic launch"] = without_programmatic_launch(backend, work, rows)
        found[str(rows)] = entry
        say(f"step of {rows}: " + ", ".join(f"{name} {value:.3f}" for name, value in entry.items()))
    for rows, prompt in ((8, 376), (64, 320), (64, 448), (256, 1280)):
        work = mixed_batch(rows, prompt, bench.num_blocks)
        for turn in range(3):
            backend.wait(backend.launch(replaced(work, turn)))
        entry = {"whole ms": whole_ms(backend, work), "launch ms": launch_ms(backend, work)}
        found[f"{rows} and {prompt}"] = entry
        say(f"step of {rows} rows and {prompt} tokens: " + ", ".join(f"{k} {v:.3f}" for k, v in entry.items()))
    return found


def shared(bench: Bench) -> Figures:
    """A decode step of rows that have 4,096 positions in common and 192 of their own: the prefix read once, and by
    every row."""
    found: Figures = {}
    backend, common, own = bench.backend, 4096 // BLOCK_SIZE, 192 // BLOCK_SIZE
    for rows in (8, 16, 64, 256):
        blocks = np.random.default_rng(rows).permutation(bench.num_blocks)[: common + rows * own].tolist()
        tables = [blocks[:common] + blocks[common + row * own : common + (row + 1) * own] for row in range(rows)]
        work = greedy_batch([Chunk([1], 4096 + 150, table, row, 1) for row, table in enumerate(tables)])
        entry = {}
        for name, sharing in (("by every row", None), ("once", Sharing(BLOCK_SIZE, 16))):
            backend._programs[0].sharing = sharing
            entry[f"{name}, ms"] = backend.time_step(work, 20) * 1e3
        found[str(rows)] = entry
        say(f"shared prefix, {rows} rows: " + ", ".join(f"{name} {value:.3f}" for name, value in entry.items()))
    return found


def host_tier(bench: Bench) -> Figures:
    """A prompt of 4,096 tokens whose KV has left the device for host memory, beside computing it again and finding it
    on the device."""
    blocks = 700  # two such prompts
    backend = bench.backend
    limits = Limits(8192, MAX_ROWS, STEP_TOKENS, BLOCK_SIZE, blocks, 128256, PREFILL_BUDGET, host_places=2048)
    engine = assemble(backend, limits, depth=backend.depth)
    first, *others = bench.requests(8, 4096, 2)
    found: dict[str, list[float]] = {"computed": [], "on the device": [], "in host memory": []}
    for name, request in (("computed", first), *(("computed", other) for other in others)):
        found[name].append(first_ms(engine, request))
    for _ in range(4):
        for name, other in (("in host memory", first), ("on the device", first), *(("", each) for each in others[:2])):
            ms = first_ms(engine, other._replace(id=next(bench._ids)))
            if name:
                found[name].append(ms)
    figures = {name: min(values) for name, values in found.items()}
    stats = engine.stats()
    say(f"host tier, first token in ms: {figures}; {stats.host_blocks} of {stats.host_places} places, all {found}")
    return {**figures, "all": found, "beside steps": leaving_beside_steps(bench, limits)}


def leaving_beside_steps(bench: Bench, limits: Limits) -> Figures:
    """Tokens a second of requests whose blocks push others out of the device, which are forgotten, or go to host
    memory: in turn, three times each. Copies that cost steps nothing leave them alike."""
    found: dict[str, list[float]] = {"forgotten": [], "to host memory": []}
    for _ in range(3):
        for name, places in (("forgotten", 0), ("to host memory", limits.host_places)):
            engine = assemble(bench.backend, limits._replace(host_places=places), depth=bench.backend.depth)
            found[name].append(generate(engine, bench.requests(32, 2048, 128))["tok/s"])
            engine.pipeline.host.release()
    say(f"host tier, tok/s while blocks leave: {found}")
    return {**found, "ratio": statistics.median(found["to host memory"]) / statistics.median(found["forgotten"])}


def deterministic(bench: Bench) -> Figures:
    """What it costs that an answer does not depend on its batch: one client, 64 clients and prompts, without and with
    that; and whether a prompt's logits then are the same alone and beside others."""
    found: Figures = {}
    for name in ("usual", "deterministic"):
        bench = bench if name == "usual" else bench.but_deterministic()
        say(f"-- {name}")
        decode, many = decode1(bench)["greedy"]["decode tok/s"], many_clients(bench, 64, 9000, PREFILL_BUDGET)
        prompts = {tokens: prompt_ms(bench, tokens) for tokens in (512, 2048, 8192)}
        found[name] = {"decode1 tok/s": decode, "batch64 tok/s": many["tok/s"], "prefill ms": prompts}
        found[name]["logits are alike"] = alike(bench)
    bench.release()
    usual, fixed = found["usual"], found["deterministic"]
    say("times as long: " + json.dumps({key: round(usual[key] / fixed[key], 2) for key in usual if "tok/s" in key}))
    say(f"{found}")
    return found


def prompt_ms(bench: Bench, tokens: int) -> float:
    """The first token of a prompt, without what the first times cost."""
    each = [generate(bench.engine(MAX_TOKENS), bench.requests(1, tokens, 1))["ttft_ms"]["p50"] for _ in range(4)]
    return float(min(each[1:]))


def alike(bench: Bench) -> bool:
    """Whether a token after 700 others has the same logits in its prompt's only step, in its second, as a row of its
    own, and among 63 others."""
    tokens = bench.dice.integers(1000, 100_000, 701).tolist()
    blocks = list(range(64))
    others = [Chunk([1], 300 + 7 * row, list(range(64 * row, 64 * row + 64)), row, 1) for row in range(1, 64)]
    whole = bench.backend.logits(greedy_batch([Chunk(tokens, 0, blocks, 0, 1)]))[0]
    again = [bench.backend.logits(greedy_batch([Chunk(tokens[at:], at, blocks, 0, 1)]))[0] for at in (333, 700)]
    among = bench.backend.logits(greedy_batch([Chunk(tokens[700:], 700, blocks, 0, 1), *others]))[0]
    return all(np.array_equal(whole, each) for each in (*again, among))


def first_ms(engine: Engine, request: Request) -> float:
    began = time.perf_counter()
    engine.add(request)
    ms = 0.0
    while not engine.idle:
        if any(isinstance(event, Tokens) for event in engine.step()) and not ms:
            ms = (time.perf_counter() - began) * 1e3
    return ms


def whole_ms(backend: CudaBackend, work: Any) -> float:
    """From launch to answer."""
    spent = []
    for turn in range(12):
        began = time.perf_counter()
        backend.wait(backend.launch(replaced(work, turn)))
        spent.append(time.perf_counter() - began)
    return statistics.median(spent) * 1e3


def replaced(work: Any, step: int) -> Any:
    from dataclasses import replace

    return replace(work, step=step)


def graph_ms(backend: CudaBackend, rows: int) -> float:
    graphs, padded = backend._programs[0].graphs._graphs, bucket_decode_rows(rows)
    graph = next(graph for shape, graph in graphs.items() if not shape.tiles and shape.decodes == padded)
    with torch.cuda.stream(backend._gpu.stream):
        return seconds(graph.replay, 20) * 1e3


def launch_ms(backend: CudaBackend, work: Any) -> float:
    """The host's part, with nothing to wait for."""
    spent = []
    for turn in range(12):
        began = time.perf_counter()
        ticket = backend.launch(replaced(work, turn))
        spent.append(time.perf_counter() - began)
        backend.wait(ticket)
    return statistics.median(spent) * 1e3


def without_programmatic_launch(backend: CudaBackend, work: Any, rows: int) -> float:
    """The graph's time when every kernel waits for the end of the one before it."""
    before = pdl.enabled
    try:
        pdl.enabled = False
        backend._programs[0].graphs.forget()
        for turn in range(2):
            backend.wait(backend.launch(replaced(work, turn)))
        return graph_ms(backend, rows)
    finally:
        pdl.enabled = before
        backend._programs[0].graphs.forget()


def profile(bench: Bench) -> Figures:
    """Which kernels the time goes to."""
    found = {}
    backend = bench.backend
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    works = {f"decode {rows}": decode_batch(rows, 768, bench.num_blocks, 0) for rows in (1, 64, 256)}
    tokens = bench.dice.integers(1000, 100_000, 2048).tolist()
    works["prefill 2048"] = greedy_batch([Chunk(tokens, 0, list(range(128)), 0, 1)])
    works["64 rows and 384 tokens"] = mixed_batch(64, 384, bench.num_blocks)
    for name, work in works.items():
        for turn in range(3):
            backend.wait(backend.launch(replaced(work, turn)))
        with torch.profiler.profile(activities=activities) as profiler:
            backend.wait(backend.launch(replaced(work, 9)))
        rows = [(e.key, e.count, e.device_time_total / 1e3) for e in profiler.key_averages() if e.device_time_total]
        rows.sort(key=lambda row: -row[2])
        found[name] = [{"kernel": key[:90], "count": count, "ms": ms} for key, count, ms in rows[:16]]
        say(f"profile of {name}: {sum(ms for *_, ms in rows):.3f} ms in kernels")
        for key, count, ms in rows[:12]:
            say(f"  {ms:8.3f} ms {count:5d} x {ms / count * 1e3:8.1f} us  {key[:90]}")
    return found


def shortage(bench: Bench) -> Figures:
    """All of the device's memory is taken away while rows answer: they go on, what needs more fails and says why, and
    later requests are answered."""
    engine = bench.engine(STEP_TOKENS)
    plain = bench.requests(4, 128, 200)
    follow(engine, plain, 20)
    taken = take_memory()
    costly = SamplingParams(temperature=0.9, top_p=0.9, logprobs=20, presence_penalty=0.5, ignore_eos=True, seed=1)
    wanting = [request._replace(sampling=costly) for request in bench.requests(8, 600, 20)]
    ends = follow(engine, wanting)
    taken.clear()
    torch.cuda.empty_cache()
    ends |= follow(engine, later := bench.requests(2, 64, 20))
    told = {
        name: sorted(ends.get(request.id, "none") for request in requests)
        for name, requests in (("answering", plain), ("wanting more", wanting), ("later", later))
    }
    say(f"shortage: {told}")
    return told


def take_memory() -> list[Any]:
    held, size = [], 1 << 30
    while size >= 1 << 16:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    say(f"{torch.cuda.mem_get_info()[0] >> 20} MiB left")
    return held


def follow(engine: Engine, requests: list[Request], steps: int = 5000) -> dict[int, str]:
    """How requests end, of those that do within so many steps."""
    for request in requests:
        engine.add(request)
    ends = {}
    for _ in range(steps):
        for event in engine.step():
            if not isinstance(event, Tokens):
                ends[event.seq] = event.code if isinstance(event, Failed) else "finished"
        if engine.idle:
            break
    return ends


CELLS: dict[str, Callable[[Bench], Figures]] = {
    **KERNEL_CELLS,
    "library_attention": library_attention,
    **DELTA_CELLS,
    "mla": mla,
    "kv8_prefill": kv8_prefill,
    "step": step,
    "shared": shared,
    "host_tier": host_tier,
    "deterministic": deterministic,
    "profile": profile,
    "decode1": decode1,
    "prefill": prefill,
    "shortage": shortage,
    "batch64": batch(64, 9000, (384, 512)),
    "batch256": batch(256, 12_800, (384, 512)),
}


def over_http(cell: Callable[[Subject], Figures], subject: Subject) -> Callable[[Bench], Figures]:
    def call(bench: Bench) -> Figures:
        bench.release()
        return cell(subject)

    return call


def main(description: str) -> None:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cells", default=",".join([*CELLS, "start", "http64", "http256"]))
    parser.add_argument("--json", default="cuda.json")
    parser.add_argument("--layers", type=int, default=0, help="fewer, to look at one thing quickly")
    parser.add_argument("--weights", default="bf16", choices=KINDS, help="format of the random weights")
    parser.add_argument("--shape", default="llama8b", choices=SHAPES, help="of the model in cells over HTTP")
    parser.add_argument("--serve", default="", help="more options for penstock serve, with spaces between")
    given = parser.parse_args()
    subject = Subject(given.weights, given.shape, given.layers, options=tuple(given.serve.split()))
    cells = CELLS | {name: over_http(cell, subject) for name, cell in HTTP_CELLS.items()}
    names = given.cells.split(",")
    if unknown := set(names) - cells.keys():
        parser.error(f"unknown cells {sorted(unknown)}; there are {', '.join(cells)}")
    properties = torch.cuda.get_device_properties(0)
    report: Figures = {
        "device": properties.name,
        "torch": torch.__version__,
        "weights": given.weights,
        "shape": given.shape,
        "cells": {},
    }
    bench = Bench(given.layers or 32, given.weights)
    for name in names:
        say(f"== {name}")
        began = time.perf_counter()
        try:
            report["cells"][name] = cells[name](bench)
        except Exception:
            report["cells"][name] = {"error": traceback.format_exc()}
            say(traceback.format_exc())
        report["cells"][name]["cell seconds"] = time.perf_counter() - began
        Path(given.json).write_text(json.dumps(report, indent=1))
        say(f"== {name} took {time.perf_counter() - began:.1f} s")

"""The steps of `precision.py` that need a GPU (or, for a few tokens, Triton's interpreter)."""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from precision_inputs import ANSWER, greedy
from precision_model import Array, Values, read, shuffled, tensors, truth

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend
from penstock.backend.cuda.quantized_weights import QuantizedMatrix
from penstock.backend.cuda.weights import DenseMatrix
from penstock.engine.assemble import assemble
from penstock.model.families.llama import build
from penstock.model.load import load_model, open_checkpoint
from penstock.model.packer import Packer
from penstock.types import Limits

Figures = dict[str, Any]
BLOCK = 16
BEGAN = time.perf_counter()


class Kind(NamedTuple):
    format: str  # of the checkpoint
    quantize: str = ""
    kv: str = "auto"
    timed: str = ""  # what random_weights.py calls it; empty: as the format


KINDS = {
    "bf16": Kind("BF16", timed="bf16"),
    "fp8 weights": Kind("BF16", quantize="fp8", timed="fp8"),
    "fp8 KV": Kind("BF16", kv="fp8", timed="bf16"),
    "int8 KV": Kind("BF16", kv="int8", timed="bf16"),
    "fp8 weights and KV": Kind("BF16", quantize="fp8", kv="fp8", timed="fp8"),
    "int4": Kind("BF16", quantize="int4", timed="int4"),
    **{name: Kind(name) for name in ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_1", "Q4_0")},
}


def run(given: argparse.Namespace) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    inputs = json.loads(given.inputs.read_text())
    kinds = given.kinds.split(",") if given.kinds else list(KINDS)
    skip = given.skip.split(",")
    report: Figures = {"device": device_name(given.device), "torch": torch.__version__, "kinds": {k: {} for k in kinds}}
    if "kl" not in skip:
        windows = torch.tensor(inputs["tokens"]).view(-1, 512)[:, : given.window]
        measure_kl(read(given.model, given.device), windows.to(given.device), given, kinds, report)
    if "greedy" not in skip:
        report["greedy"] = compare_greedy(given, inputs)
        save(report, given.json)
    if "speed" not in skip:
        for name in kinds:
            report["kinds"][name] |= speed(KINDS[name], given.layers)
            say(f"{name}: {report['kinds'][name]}")
            save(report, given.json)
    print(table(report))


def save(report: Figures, path: Path) -> None:
    path.write_text(json.dumps(report, indent=1) + "\n")


def say(line: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f}] {line}", flush=True)


def device_name(device: str) -> str:
    return str(torch.cuda.get_device_name()) if device == "cuda" else "Triton's interpreter"


def forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- KL ----


def measure_kl(model: Values, windows: Array, given: argparse.Namespace, kinds: list[str], report: Figures) -> None:
    wanted = torch.stack([truth(model, window) for window in windows])  # [W, T, vocab]
    other = shuffled(model)
    moved = torch.stack([divergence(wanted[i], truth(other, window)) for i, window in enumerate(windows)])
    report["tokens"] = int(windows.numel())
    report["perplexity"] = float(torch.exp(-next_tokens(wanted, windows).mean()))
    report["KL of the shuffled model in 32 bits"] = float(moved.mean())
    say(f"{windows.numel()} tokens, perplexity {report['perplexity']:.2f}; shuffled: KL {moved.mean():.1e}")
    if moved.mean() > 1e-6:
        raise SystemExit("the shuffled model is not the same model")
    for name in kinds:
        report["kinds"][name] |= kl_of(KINDS[name], other, windows, wanted, given.device)
        say(f"{name}: {report['kinds'][name]}")
        save(report, given.json)


def next_tokens(logprobs: Array, windows: Array) -> Array:
    """Log-probabilities of the tokens that follow."""
    return logprobs[:, :-1].gather(-1, windows[:, 1:, None].long())


def kl_of(kind: Kind, model: Values, windows: Array, wanted: Array, device: str) -> Figures:
    count, length = windows.shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter's products do not know bfloat16
    backend = CudaBackend(512, 64, device=device, dtype=dtype, quantize=kind.quantize, kv=kind.kv)
    backend.load(build(model.spec, Packer(tensors(model, kind.format), backend)))  # type: ignore[arg-type]
    width = -(-length // BLOCK)
    backend.reserve_kv(count * width, BLOCK)
    tables = np.arange(count * width).reshape(count, width).tolist()
    prompt, same = [], []
    for window, truths in zip(windows, wanted, strict=True):
        got = logprobs(backend, [Chunk(window.tolist(), 0, tables[0])], device)
        prompt.append(divergence(truths, got))
        same.append(truths.argmax(-1) == got.argmax(-1))
    answer = []
    for at in range(length):
        chunks = [Chunk([int(window[at])], at, tables[row], row) for row, window in enumerate(windows)]
        answer.append(divergence(wanted[:, at], logprobs(backend, chunks, device)))
    backend.close()
    del backend
    forget()
    return {
        "KL, prompt": float(torch.cat(prompt).mean()),
        "KL, answer": float(torch.cat(answer).mean()),
        "KL, prompt, 99 %": float(torch.cat(prompt).quantile(0.99)),
        "same top token": float(torch.cat(same).float().mean()),
    }


def logprobs(backend: CudaBackend, chunks: list[Chunk], device: str) -> Array:
    return torch.log_softmax(torch.from_numpy(backend.logits(greedy_batch(chunks))).to(device), -1)


def divergence(truths: Array, got: Array) -> Array:  # [rows]
    return (truths.exp() * (truths - got)).sum(-1)


# ---- speed ----


def speed(kind: Kind, layers: int) -> Figures:
    """In the shape of Llama-3.1-8B, with random weights."""
    from cells import decode_batch, generate, llama8b, whole_ms
    from random_weights import RandomWeights

    from penstock.types import Request, SamplingParams

    backend = CudaBackend(512, 64, kv=kind.kv)
    weights = Counted(RandomWeights(backend._packer.target.workspace, kind.timed or kind.format.lower()))
    backend.load(build(llama8b(layers), weights))  # type: ignore[arg-type]
    blocks = 64 * 128 + 64
    backend.reserve_kv(blocks, BLOCK)
    limits = Limits(16384, 64, 512, BLOCK, blocks, 128256)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    dice = np.random.default_rng(0)
    for turn, count in enumerate((8, 8, 257)):
        prompt = tuple(dice.integers(1000, 100_000, 128).tolist())
        figures = generate(assemble(backend, limits, depth=backend.depth), [Request(turn, prompt, params, count)])
    many = decode_batch(64, 2048, blocks, 0)
    for _ in range(3):
        backend.wait(backend.launch(many))
    found = {
        "weights, GB": weights.bytes / 1e9,
        "KV, bytes a token": backend.memory_needs().kv_bytes_per_token,
        "one stream, tok/s": 256 / (figures["seconds"] - figures["ttft_ms"]["p50"] / 1e3),
        "64 rows at 2048 tokens, ms a step": whole_ms(backend, many),
    }
    backend.close()
    del backend, weights
    forget()
    return found


class Counted:
    """A packer that knows how much memory its matrices take."""

    def __init__(self, weights: Any) -> None:
        self._weights = weights
        self.vector = weights.vector
        self.bytes = 0

    def matrix(self, *parts: tuple[str, int], width: int) -> Any:
        weight = self._weights.matrix(*parts, width=width)
        self.bytes += bytes_of(weight)
        return weight


def bytes_of(weight: Any) -> int:
    if isinstance(weight, DenseMatrix):
        return int(weight.weight.nbytes)
    parts = weight.parts if isinstance(weight, QuantizedMatrix) else [weight.weight]
    return sum(part.bytes for part in parts)


# ---- greedy answers ----


def compare_greedy(given: argparse.Namespace, inputs: Figures) -> list[Figures]:
    """The file as it is, against the CPU backend's answers to the same prompts."""
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float16
    backend = CudaBackend(512, 64, device=given.device, dtype=dtype)
    checkpoint = open_checkpoint(given.model)
    backend.load(load_model(checkpoint, backend))
    backend.reserve_kv(256, BLOCK)
    backend._packer.target.workspace.transfer.finish()
    limits = Limits(2048, 64, 512, BLOCK, 256, checkpoint.spec.vocab)
    found = []
    count = ANSWER if given.device == "cuda" else 3
    for id, (prompt, cpu) in enumerate(zip(inputs["prompts"], inputs["answers"], strict=True)):
        answer = greedy(assemble(backend, limits, depth=backend.depth), id, prompt, count)
        found.append(compared(answer, cpu))
        say(f"greedy {id}: {found[-1]}")
    backend.close()
    del backend
    forget()
    return found


def compared(ours: Figures, cpu: Figures) -> Figures:
    """Up to the first token that differs, and there by how many nats each prefers its own."""
    pairs = zip(ours["tokens"], cpu["tokens"], strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    common = len(ours["tokens"]) if at is None else at
    moved = [abs(ours["top"][i][0][1] - cpu["top"][i][0][1]) for i in range(common)]
    entry: Figures = {
        "equal tokens": common,
        "of": len(ours["tokens"]),
        "largest change of a logprob": max(moved, default=0),
    }
    if at is not None:
        mine, other = ours["tokens"][at], cpu["tokens"][at]
        entry |= {"gap on cuda": gap(ours["top"][at], mine, other), "gap on cpu": gap(cpu["top"][at], other, mine)}
    return entry


def gap(top: list[Any], chosen: int, other: int) -> float | None:
    """None: the other is not among the likeliest."""
    known = {int(token): float(value) for token, value in top}
    return round(known[chosen] - known[other], 5) if other in known and chosen in known else None


def table(report: Figures) -> str:
    names = ("weights, GB", "one stream, tok/s", "64 rows at 2048 tokens, ms a step", "KL, prompt", "KL, answer")
    lines = ["| precision | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for kind, figures in report["kinds"].items():
        lines.append(f"| {kind} | " + " | ".join(shown(figures.get(name)) for name in names) + " |")
    return "\n".join(lines)


def shown(value: float | None) -> str:
    return "" if value is None else f"{value:.5f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"

"""A model in fewer bits, as a file."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from penstock.cli import options
from penstock.cli.command import Argument, Option, WrongUsage
from penstock.cli.evaluate import diverge, print_divergence, read_text
from penstock.cli.terminal import DownloadBar, note, obtain, print_json, readable_size

if TYPE_CHECKING:
    from penstock.model.gguf.export import Export
    from penstock.planning.evaluation import Divergence


def quantize(
    model: options.Model,
    out: Annotated[str, Argument(metavar="OUT.gguf", help="The file to write.")],
    to: Annotated[
        str, Option(help="q8_0, q6_k, q5_k, q4_k, q5_1, q5_0, q4_1, q4_0, or plain values: f32, bf16, f16.")
    ] = "q4_k",
    again: Annotated[bool, Option(help="Also what is quantized already: its errors add up.")] = False,
    force: Annotated[bool, Option(help="Overwrite OUT.gguf.")] = False,
    report: Annotated[
        str, Option(help="A text file: tells what quantizing cost on it, as `penstock eval kl` does.")
    ] = "",
    threads: options.Threads = 0,
    json: options.Json = False,
) -> None:
    """Write a model as a GGUF file with quantized weights.

      penstock quantize ./Llama-3.2-1B-Instruct llama.q4_k.gguf
      penstock quantize ./folder model.q8_0.gguf --to q8_0 --report book.txt
      penstock quantize model.bf16.gguf model.q6_k.gguf --to q6_k --json

    From a Hugging Face folder or a GGUF file, with tokenizer and chat template: llama.cpp reads it too. Embeddings and
    output head are kept finer than the rest; norms and biases stay as they are.
    """
    words = read_text(report) if report else ""
    target = _target(out, force)
    path = obtain(model)
    began = time.perf_counter()
    made = _export(path, to, again, threads)
    _write(target, made)
    took = time.perf_counter() - began
    for remark in made.notes:
        note(remark)
    facts = _facts(path, target, made) | {"seconds": round(took, 2)}
    found = _report(target, path, words, threads) if report else None
    if json:
        print_json(facts | ({"kl": asdict(found)} if found else {}))
        return
    shares = ", ".join(f"{name} {share:.1%}" for name, share in facts["formats"].items())
    print(f"{target}  {readable_size(facts['size'])} of {readable_size(facts['size_before'])}, {took:.1f} s: {shares}")
    if found:
        print_divergence(found)


def _target(out: str, force: bool) -> Path:
    target = Path(out).expanduser()
    if target.suffix != ".gguf":
        raise WrongUsage(f"a GGUF file is written: its name ends in .gguf, not as {out} does")
    if target.is_dir() or not target.parent.is_dir():
        raise WrongUsage(f"{out} is a folder, or its folder is missing")
    if target.exists() and not force:
        raise WrongUsage(f"{out} is there already; --force overwrites it")
    return target


def _export(path: Path, to: str, again: bool, threads: int) -> Export:
    from penstock.backend.cpu.quantize import quantize as encode
    from penstock.config import available_threads
    from penstock.model.gguf.export import TARGETS, export

    if to not in TARGETS:
        raise WrongUsage(f"--to takes one of {', '.join(TARGETS)}; got {to}")
    count = threads or available_threads()
    return export(path, to, lambda tensor, format: encode(tensor, format, count), again)


def _write(target: Path, made: Export) -> None:
    from penstock.model.gguf.writer import write_gguf

    bar, done = DownloadBar(), 0
    total = sum(tensor.size for tensor in made.tensors)

    def advance(_: str, size: int) -> None:
        nonlocal done
        done += size
        bar(f"writing {target.name}", done, total)

    try:
        write_gguf(target, made.keys, made.tensors, advance)
    finally:
        bar.stop()


def _report(target: Path, path: Path, words: str, threads: int) -> Divergence:
    from penstock.config import Config

    return diverge(Config(model=str(target), threads=threads), path, words)


def _facts(path: Path, target: Path, made: Export) -> dict[str, Any]:
    from penstock.store import size_of

    counts: Counter[str] = Counter()
    for tensor in made.tensors:
        counts[tensor.format.name] += prod(tensor.shape)
    shares = {name: count / counts.total() for name, count in counts.most_common()}
    return {
        "path": str(target),
        "size": target.stat().st_size,
        "size_before": size_of(path),
        "tensors": len(made.tensors),
        "formats": shares,
        "notes": list(made.notes),
    }

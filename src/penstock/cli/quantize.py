"""Implements `penstock quantize`, which writes a model as a quantized GGUF file."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from penstock.cli.evaluate import diverge, print_divergence, read_text
from penstock.cli.framework import options
from penstock.cli.framework.command import Argument, Option, UsageError
from penstock.cli.terminal import DownloadBar, note, obtain, print_json, readable_size

if TYPE_CHECKING:
    from penstock.model.gguf.export import Export
    from penstock.planning.evaluation import Divergence


def quantize(
    model: options.ModelRef,
    out: Annotated[str, Argument(metavar="OUT.gguf", help="File to write.")],
    to: Annotated[
        str, Option(help="Format: q8_0, q6_k, q5_k, q4_k, q5_1, q5_0, q4_1, q4_0, or plain f32, bf16, f16.")
    ] = "q4_k",
    again: Annotated[bool, Option(help="Also quantize weights that are already quantized. Errors add up.")] = False,
    force: Annotated[bool, Option(help="Overwrite OUT.gguf if it exists.")] = False,
    report: Annotated[
        str, Option(help="Text file on which to measure the loss of quality, as in `penstock eval kl`.")
    ] = "",
    json: options.Json = False,
    *,
    engine: options.ExportSettings,
) -> None:
    """Write a model as a GGUF file with quantized weights.

      penstock quantize ./Llama-3.2-1B-Instruct llama.q4_k.gguf
      penstock quantize ./folder model.q8_0.gguf --to q8_0 --report book.txt
      penstock quantize model.bf16.gguf model.q6_k.gguf --to q6_k --json

    MODEL is a Hugging Face folder or a GGUF file. The new file includes the tokenizer and the chat template, and
    llama.cpp can read it. Embeddings and the output head get more bits than the rest; norms and biases are not
    quantized.
    """
    text = read_text(report) if report else ""
    target = _target(out, force)
    path = obtain(model)
    began = time.perf_counter()
    exported = _export(path, to, again, engine)
    write_export(target, exported)
    took = time.perf_counter() - began
    for remark in exported.notes:
        note(remark)
    facts = _facts(path, target, exported) | {"seconds": round(took, 2)}
    found = _report(target, path, text, engine) if report else None
    if json:
        print_json(facts | ({"kl": asdict(found)} if found else {}))
        return
    shares = ", ".join(f"{name} {share:.1%}" for name, share in facts["formats"].items())
    print(f"{target}  {readable_size(facts['size'])} of {readable_size(facts['size_before'])}, {took:.1f} s: {shares}")
    if found:
        print_divergence(found)


def _target(out: str, force: bool) -> Path:
    """Returns the output path; raises UsageError if it is not usable."""
    target = Path(out).expanduser()
    if target.suffix != ".gguf":
        raise UsageError(f"the name of the file to write must end in .gguf; got {out}")
    if target.is_dir() or not target.parent.is_dir():
        raise UsageError(f"{out} cannot be written: it is a folder, or its folder does not exist")
    if target.exists() and not force:
        raise UsageError(f"{out} exists; --force overwrites it")
    return target


def _export(path: Path, to: str, again: bool, engine: dict[str, Any]) -> Export:
    from penstock.backend.cpu.quantize import quantize as encode
    from penstock.config import available_threads, configure
    from penstock.model.gguf.export import TARGETS, export

    if to not in TARGETS:
        raise UsageError(f"--to takes one of {', '.join(TARGETS)}; got {to}")
    config = configure(path, engine)
    count = config.threads or available_threads()
    return export(
        path,
        to,
        lambda tensor, format: encode(tensor, format, count),
        again=again,
        changes=config.config,
        strict=config.strict_config,
    )


def write_export(target: Path, exported: Export) -> None:
    from penstock.model.gguf.writer import write_gguf

    bar, done = DownloadBar(), 0
    total = sum(tensor.size for tensor in exported.tensors)

    def advance(_: str, size: int) -> None:
        nonlocal done
        done += size
        bar(f"writing {target.name}", done, total)

    try:
        write_gguf(target, exported.keys, exported.tensors, advance)
    finally:
        bar.stop()


def _report(target: Path, path: Path, text: str, engine: dict[str, Any]) -> Divergence:
    from penstock.config import configure

    return diverge(configure(target, engine), path, text)


def _facts(path: Path, target: Path, exported: Export) -> dict[str, Any]:
    from penstock.store import size_of

    counts: Counter[str] = Counter()
    for tensor in exported.tensors:
        counts[tensor.format.name] += prod(tensor.shape)
    shares = {name: count / counts.total() for name, count in counts.most_common()}
    return {
        "path": str(target),
        "size": target.stat().st_size,
        "size_before": size_of(path),
        "tensors": len(exported.tensors),
        "formats": shares,
        "notes": list(exported.notes),
    }

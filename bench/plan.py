"""What `penstock plan` expects beside what is measured: one stream, the first token of a prompt, several streams.

    python bench/plan.py SmolLM2-135M-Instruct.Q4_1.gguf gemma-3-270m-q4_k_m.gguf
    python bench/plan.py --random BF16 --random Q4_K --quantize fp8 --json plan.json

--random FORMAT writes a model of the shape of Llama-3.1-8B with random weights to a temporary folder: 16 GB in BF16.
--quantize is for the plain ones, which are also run as they are. The machine is measured anew, first of all.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "gpu"))

import random_model

from penstock.backend import resolve_defaults
from penstock.config import Config
from penstock.engine.build import build_engine
from penstock.engine.engine import Engine
from penstock.model.load import open_checkpoint
from penstock.model.tensor import PLAIN
from penstock.planning.calibration import measure
from penstock.planning.forecast import Forecast, make_forecast
from penstock.planning.roofline import MachineProfile
from penstock.types import Request, SamplingParams, Tokens

ANSWER = {1: 128, 8: 256, 32: 512}  # long enough for all to answer at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--random", action="append", default=[], help="a format: of the shape of Llama-3.1-8B")
    parser.add_argument("--quantize", action="append", default=[])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rates = Rates()
    with tempfile.TemporaryDirectory() as folder:
        found = [
            compare(path, quantize, args.prompt, rates)
            for path in (*args.models, *written(args.random, Path(folder)))
            for quantize in ("", *(args.quantize if is_plain(path) else ()))
        ]
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


class Rates:
    """The machine, measured as far as it was asked about."""

    def __init__(self) -> None:
        self.machine: MachineProfile | None = None

    def __call__(self, config: Config, name: str, kinds: list[str]) -> MachineProfile:
        missing = [kind for kind in kinds if self.machine is None or kind not in self.machine.matmuls]
        if missing:
            self.machine = measure(config, missing, self.machine)
            print(f"{name}: {self.machine}", file=sys.stderr)
        assert self.machine
        return self.machine


def written(formats: list[str], folder: Path) -> Iterator[Path]:
    for format in formats:
        path = folder / format / (f"{format}.gguf" if format not in PLAIN else "folder")
        if path.suffix:
            random_model.write_gguf(path, random_model.LLAMA_8B, format)
        else:
            random_model.write_folder(path, random_model.LLAMA_8B)
        yield path


def is_plain(path: Path) -> bool:
    return any(
        tensor.format.name in PLAIN for tensor in open_checkpoint(path).tensors.values() if len(tensor.shape) > 1
    )


def compare(path: Path, quantize: str, prompt: int, rates: Rates) -> dict[str, Any]:
    checkpoint = open_checkpoint(path)
    config = resolve_defaults(
        Config(model=str(path), quantize=quantize, max_len=min(4096, checkpoint.spec.max_len)), checkpoint.fp8
    )
    expected = make_forecast(config, checkpoint, prompt, rates)
    room = 16 << 30 if config.device == "cuda" else 0  # the models before this one are in memory still
    engine = build_engine(replace(config, kv_memory=room), checkpoint)
    figures = list(rows(expected, engine, prompt))
    engine.close()
    name = path.name + (f" as {quantize}" if quantize else "")
    for what, foreseen, got in figures:
        print(
            f"{name:45}{what:28}{foreseen:>10,.1f} expected {got:>10,.1f} measured  {foreseen / got - 1:+.0%}",
            flush=True,
        )
    return {"model": name, "figures": figures}


def rows(expected: Forecast, engine: Engine, prompt: int) -> Iterator[tuple[str, float, float]]:
    assert expected.speed
    dice = random.Random(1)
    for _ in range(2):  # kernels are compiled and graphs captured
        generate(engine, dice, 1, prompt, 4)
    first = min(generate(engine, dice, 1, prompt, 1)[0] for _ in range(3))
    yield f"prompt of {prompt}, tok/s", prompt / expected.speed.first_token, prompt / first
    for count in ANSWER:
        for _ in range(3 if count > 1 else 0):
            generate(engine, dice, count, prompt, 8)
        got = max(generate(engine, dice, count, prompt, ANSWER[count])[1] for _ in range(3 if count == 1 else 1))
        yield f"{count} streams, tok/s", expected.speed.together[count], got


def generate(engine: Engine, dice: random.Random, count: int, prompt: int, answer: int) -> tuple[float, float]:
    """Seconds to the last first token, and tokens a second while all answer: the median of those steps."""
    params = SamplingParams(temperature=0, ignore_eos=True)
    for i in range(count):
        engine.add(Request(dice.getrandbits(40) + i, tuple(dice.choices(range(1000, 9000), k=prompt)), params, answer))
    begun = now = time.perf_counter()
    started: set[int] = set()
    gaps, first = [], 0.0
    while not engine.idle:
        answered = {event.seq for event in engine.step() if isinstance(event, Tokens)}
        last, now = now, time.perf_counter()
        if answered - started:
            first = now - begun
        elif len(answered) == count:
            gaps.append(now - last)
        started |= answered
    return first, count / statistics.median(gaps) if gaps else 0.0


if __name__ == "__main__":
    main()

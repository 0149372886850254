"""One cell of `cpu.py` or `yardstick.py` on an engine in this process; prints its figures as JSON.

    python bench/inprocess.py ENGINE CELL MODEL THREADS SEED [DEVICE]

Run by the interpreter that has the engine: Penstock's own, or that of OpenVINO GenAI or transformers, so only the
standard library is imported until the engine is known. All get the same token ids and go through the same clock.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Prompts = Sequence[list[int]]
REPEATS = 3  # of cells that take less than a second; the median counts


class Timing(NamedTuple):
    first: float  # seconds from asking to the first token of the first prompt
    total: float


Generate = Callable[[Prompts, int], Timing]


def open_penstock(model: str, threads: int, device: str) -> Generate:
    from penstock.config import Config
    from penstock.engine.build import open_engine
    from penstock.types import Request, SamplingParams, Tokens

    engine = open_engine(Config(model=model, device=device, threads=threads, max_len=2048, speculation="off"))
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    ids = iter(range(1 << 30))

    def generate(prompts: Prompts, count: int) -> Timing:
        began, first = time.perf_counter(), 0.0
        for prompt in prompts:
            engine.add(Request(next(ids), tuple(prompt), params, count))
        while not engine.idle:
            spoke = any(isinstance(event, Tokens) and event.tokens for event in engine.step())
            first = first or spoke * (time.perf_counter() - began)
        return Timing(first, time.perf_counter() - began)

    return generate


def open_openvino(model: str, threads: int, device: str) -> Generate:
    import numpy as np
    import openvino
    import openvino_genai as genai

    pipeline = genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)  # a larger step budget gained nothing

    def generate(prompts: Prompts, count: int) -> Timing:
        config = genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
        ids = np.array(prompts, np.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        began = time.perf_counter()
        result = pipeline.generate(inputs, config)
        total = time.perf_counter() - began
        if any(len(tokens) != count for tokens in result.tokens):
            raise RuntimeError(f"asked for {count} tokens each, got {[len(tokens) for tokens in result.tokens]}")
        return Timing(result.perf_metrics.get_ttft().mean / 1000, total)

    return generate


def open_transformers(model: str, threads: int, device: str) -> Generate:
    """Prompts of one call are one batch, padded on the left; on a CPU weights are float32, on a GPU bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    path, dtype = Path(model), torch.bfloat16 if device.startswith("cuda") else torch.float32
    place = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    network = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, **place).to(device).eval()
    network.generation_config.eos_token_id = None  # answers have the length that is asked for

    def generate(prompts: Prompts, count: int) -> Timing:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        asked = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        times: list[float] = []

        def note_time(ids: Any, scores: Any, **_: Any) -> Any:
            if not times:
                ids[0, -1].item()  # a GPU has computed it
                times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=device)

        began = time.perf_counter()
        with torch.inference_mode():
            out = network.generate(input_ids=ids, attention_mask=mask, stopping_criteria=[note_time], **asked).cpu()
        total = time.perf_counter() - began
        if out.shape != (len(prompts), longest + count):
            raise RuntimeError(f"asked for {count} tokens each, got {out.shape[1] - longest}")
        return Timing(times[0] - began, total)

    return generate


def decode(generate: Generate, dice: random.Random) -> dict[str, float]:
    def speed() -> float:
        timing = generate(prompts(dice, 1, 128), 129)
        return 128 / (timing.total - timing.first)

    return {"tok/s": statistics.median(speed() for _ in range(REPEATS))}


def prefill(generate: Generate, dice: random.Random) -> dict[str, float]:
    return {"tok/s": statistics.median(512 / generate(prompts(dice, 1, 512), 1).total for _ in range(REPEATS))}


def batch(count: int) -> Callable[[Generate, random.Random], dict[str, float]]:
    def run(generate: Generate, dice: random.Random) -> dict[str, float]:
        return {"tok/s": count * 128 / generate(prompts(dice, count, 128), 128).total}

    return run


def requests64(generate: Generate, dice: random.Random) -> dict[str, float]:
    """64 requests at once, as a queue of mixed prompts has them; all answers have one length, as a batch wants it."""
    asked = [prompts(dice, 1, dice.randint(32, 224))[0] for _ in range(64)]
    timing = generate(asked, 64)
    return {"tok/s": 64 * 64 / timing.total, "first token s": timing.first}


def prefix(generate: Generate, dice: random.Random) -> dict[str, float]:
    shared = prompts(dice, 1, 1500)[0]
    return {"s": generate([shared + tail for tail in prompts(dice, 32, 32)], 64).total}


def prompts(dice: random.Random, count: int, length: int) -> list[list[int]]:
    return [dice.choices(range(1000, 9000), k=length) for _ in range(count)]


ENGINES = {"penstock": open_penstock, "openvino": open_openvino, "transformers": open_transformers}
CELLS = {"decode": decode, "prefill": prefill, "batch8": batch(8), "batch32": batch(32), "prefix": prefix}
CELLS |= {"requests64": requests64}


def main() -> None:
    engine, cell, model, threads, seed, *device = sys.argv[1:]
    dice = random.Random(int(seed))
    generate = ENGINES[engine](model, int(threads), *(device or ["cpu"]))
    generate(prompts(dice, 1, 64), 8)
    print(json.dumps(CELLS[cell](generate, dice)))


if __name__ == "__main__":
    main()

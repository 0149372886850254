"""Compares reranking with onnxruntime: 100 documents of 100 to 200 tokens, the same weights, the same threads.

    python bench/rerank.py export ENCODER FOLDER     a BERT encoder gets a random head; needs torch and transformers
    python bench/rerank.py FOLDER --threads 2 --rounds 5

Both sides get token ids and give logits. Ours go through the engine, as they are and quantized at load (`q8_0`).
onnxruntime runs one document at a time, which needs no padding, batches of 16 sorted by length, and batches of 32 as
the documents come; in float32, and with weights in int8 (dynamic). Sides take turns. The best of all rounds counts:
neighbours only ever add time. On a busy machine, processor time with one thread says more (`--threads 1`).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from quiet import Clock, others_since

from penstock import LLM

QUERY, DOCUMENTS = 16, 100  # tokens of the query, documents
WAYS = {"one by one": (1, True), "16, sorted": (16, True), "32, unsorted": (32, False)}
Run = Callable[[], np.ndarray]


class Spent(NamedTuple):
    """Holds the seconds that a run took."""

    wall: float
    processor: float  # of all threads


def main() -> None:
    if sys.argv[1:2] == ["export"]:
        return export(Path(sys.argv[2]), Path(sys.argv[3]))
    args = arguments()
    prompts = pairs()
    sides = ours(args, prompts) | theirs(args, prompts)
    print(f"{processor()}, {args.threads} threads, {sum(map(len, prompts))} tokens in {len(prompts)} documents")
    check({name: run() for name, run in sides.items()})
    times: dict[str, list[Spent]] = {name: [] for name in sides}
    start = Clock.now()
    for _ in range(args.rounds):
        for name, run in sides.items():
            began = Spent(time.perf_counter(), time.process_time())
            run()
            times[name].append(Spent(time.perf_counter() - began.wall, time.process_time() - began.processor))
    tell(times)
    print(f"others used {others_since(start):.0%} of the machine meanwhile")


def tell(times: dict[str, list[Spent]]) -> None:
    """Prints the best seconds of each side, their spread, and how many times faster ours are than each of theirs."""
    own = [name for name in times if name.startswith("penstock")]
    for kind in Spent._fields:
        best = {name: min(getattr(each, kind) for each in spent) for name, spent in times.items()}
        most = {name: max(getattr(each, kind) for each in spent) for name, spent in times.items()}
        print(f"\n{kind + ' seconds':34} {'best':>7} {'worst':>7} " + " ".join(f"{name:>17}" for name in own))
        for name in times:
            ratios = " ".join(f"{best[name] / best[each]:16.2f}x" for each in own)
            print(f"{name:34} {best[name]:7.3f} {most[name]:7.3f} {ratios}", flush=True)


def check(logits: dict[str, np.ndarray]) -> None:
    """Prints how far each side's logits are from float32's, as a share of their spread."""
    exact = logits["onnxruntime float32, one by one"]
    for name, found in logits.items():
        print(f"{name:34} differs by at most {np.abs(found - exact).max() / exact.std():.1e} of the logits' deviation")


def pairs() -> list[list[int]]:
    """Returns prompts of random tokens: a query, the same in all, and a document of 100 to 200 tokens."""
    random = np.random.default_rng(0)
    query = random.integers(1000, 30000, QUERY).tolist()
    sizes = random.integers(100 - QUERY, 201 - QUERY, DOCUMENTS)
    return [[101, *query, 102, *random.integers(1000, 30000, size - 3).tolist(), 102] for size in sizes]


def ours(args: argparse.Namespace, prompts: Sequence[list[int]]) -> dict[str, Run]:
    """Returns our ways: weights as they are, and quantized at load."""

    def side(quantize: str) -> Run:
        llm = LLM(args.folder, device="cpu", threads=args.threads, quantize=quantize)

        def run() -> np.ndarray:
            pending = [llm._maker.classification(second_marked(llm, prompt)) for prompt in prompts]
            llm._complete(pending, False)
            return np.stack([np.frombuffer(each.choices[0].pooled, "<f4") for each in pending])[:, 0]

        return run

    return {f"penstock {kind}": side(quantize) for kind, quantize in (("float32", ""), ("q8_0", "q8_0"))}


def second_marked(llm: LLM, prompt: Sequence[int]) -> list[int]:
    """Returns the prompt with the token ids of the second text."""
    begins = QUERY + 2
    return [*prompt[:begins], *(token + llm._maker.limits.second_text for token in prompt[begins:])]


def theirs(args: argparse.Namespace, prompts: Sequence[list[int]]) -> dict[str, Run]:
    """Returns onnxruntime's ways."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = args.threads
    found: dict[str, Run] = {}
    for kind, file in (("float32", "model.onnx"), ("int8", "model_int8.onnx")):
        session = onnxruntime.InferenceSession(str(args.folder / file), options, providers=["CPUExecutionProvider"])
        for way, (size, by_length) in WAYS.items():
            found[f"onnxruntime {kind}, {way}"] = batches(session, prompts, size, by_length)
    return found


def batches(session: Any, prompts: Sequence[list[int]], size: int, by_length: bool) -> Run:
    """Returns a run over padded batches."""
    order = sorted(range(len(prompts)), key=lambda at: len(prompts[at])) if by_length else list(range(len(prompts)))
    groups = [order[first : first + size] for first in range(0, len(order), size)]

    def run() -> np.ndarray:
        logits = np.empty(len(prompts), np.float32)
        for group in groups:
            ids, mask, types = np.zeros((3, len(group), max(len(prompts[at]) for at in group)), np.int64)
            for row, at in enumerate(group):
                ids[row, : len(prompts[at])] = prompts[at]
                mask[row, : len(prompts[at])] = 1
                types[row, QUERY + 2 : len(prompts[at])] = 1
            given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
            logits[group] = session.run(None, given)[0][:, 0]
        return logits

    return run


def export(encoder: Path, folder: Path) -> None:
    """Writes a classifier with a random head as safetensors, as ONNX, and as ONNX with weights in int8."""
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from transformers import BertForSequenceClassification

    torch.manual_seed(1)
    model = BertForSequenceClassification.from_pretrained(encoder, num_labels=1, attn_implementation="eager")
    model.classifier.weight.data.normal_(0, 0.2)
    model.eval().float().save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(encoder / file, folder / file)
    names = ("input_ids", "attention_mask", "token_type_ids")
    example = torch.ones(2, 9, dtype=torch.long)
    torch.onnx.export(
        model,
        (example, example, torch.zeros_like(example)),
        str(folder / "model.onnx"),
        input_names=list(names),
        output_names=["logits"],
        dynamic_axes={name: {0: "batch", 1: "tokens"} for name in names},
        dynamo=False,
    )
    quantize_dynamic(str(folder / "model.onnx"), str(folder / "model_int8.onnx"), weight_type=QuantType.QInt8)


def processor() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else "an unknown processor"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""What computing in few bits costs: mean KL divergence to the fp32 reference, ours and llama.cpp's, on the same tokens.

    python bench/quality.py TEXT MODEL ... --llama-dir DIR [--chunks 16] [--json FILE] [--report PAGE]

llama-perplexity cuts TEXT into windows of 512 tokens and saves its log-probabilities for the last 255 predictions of
each (`--save-all-logits`). We read tokens and log-probabilities back from that file, run the very same windows through
our reference (NumPy, fp32, of the same GGUF weights) and through the CPU backend, and apply one formula to both:

    KL(reference || engine), the mean over positions

That file holds log-probabilities in 16 bits over the 16 nats below each row's largest and cuts off what lies lower. So
that both are judged alike, ours goes through the same form, and the sum runs over tokens within 15 nats of the
reference's best: what that leaves out has a probability below 3e-7 each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import report
from numpy.typing import NDArray

from penstock.config import Config
from penstock.model.gguf.reader import read_gguf
from penstock.planning.evaluation import Scorer, divergence, log_softmax, standard_error

Floats = NDArray[np.float64]
Result = dict[str, Any]

WINDOW = 512
SCORED = WINDOW // 2 - 1  # predictions of a window that llama-perplexity saves
CUT = 16.0  # nats below the largest that its file keeps


class Saved(NamedTuple):
    """A file of llama-perplexity."""

    tokens: NDArray[np.int32]  # [windows, WINDOW]
    rows: NDArray[np.uint16]  # [windows, SCORED, vocab + 4] scale and lowest value as two floats, then the codes

    def logprobs(self, window: int, vocab: int) -> Floats:  # [SCORED, vocab]
        head = np.ascontiguousarray(self.rows[window, :, :4]).view(np.float32).astype(np.float64)
        return self.rows[window, :, 4 : 4 + vocab] * head[:, :1] + head[:, 1:]


class Score(NamedTuple):
    kl: float
    kl_p99: float
    same_top: float
    beyond: float  # llama.cpp's mean, from position to position
    beyond_error: float  # its standard error


def main() -> None:
    args = arguments()
    results = []
    for model in args.models:
        results += [{"model": model.stem, "engine": name} | score._asdict() for name, score in compare(model, args)]
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    text = table(results)
    if args.report:
        report.fill(args.report, "quality", text)
    print(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--llama-dir", type=Path, required=True, help="the folder of llama-perplexity")
    parser.add_argument("--chunks", type=int, default=16, help=f"windows; {SCORED} scored tokens each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", type=Path, metavar="PAGE", help="put the table into this page")
    return parser.parse_args()


def compare(model: Path, args: argparse.Namespace) -> Iterator[tuple[str, Score]]:
    with tempfile.TemporaryDirectory() as folder:
        saved = run_llama(model, args, Path(folder) / "logits")
        begin_alike(saved.tokens, model)
        reference = Scorer(Config(model=str(model), device="ref"), WINDOW)
        ours = Scorer(Config(model=str(model), device="cpu", threads=args.threads), WINDOW)
        divergences: dict[str, list[Floats]] = {"penstock": [], "llama.cpp": []}
        same: dict[str, list[Floats]] = {"penstock": [], "llama.cpp": []}
        for index, tokens in enumerate(saved.tokens):
            truth = log_softmax(reference.logits([tokens]))
            answers = {
                "penstock": sixteen_bits(log_softmax(ours.logits([tokens]))),
                "llama.cpp": saved.logprobs(index, truth.shape[1]),
            }
            for name, answer in answers.items():
                divergences[name].append(divergence(truth, answer, within=CUT - 1))
                same[name].append(truth.argmax(1) == answer.argmax(1))
            say(f"{model.stem} window {index + 1}/{len(saved.tokens)}")
    theirs = np.concatenate(divergences["llama.cpp"])
    for name, parts in divergences.items():
        yield name, score(np.concatenate(parts), theirs, np.concatenate(same[name]))


def score(kl: Floats, theirs: Floats, same: Floats) -> Score:
    beyond = kl - theirs
    error = standard_error(beyond)
    return Score(float(kl.mean()), float(np.quantile(kl, 0.99)), float(same.mean()), float(beyond.mean()), error)


def run_llama(model: Path, args: argparse.Namespace, target: Path) -> Saved:
    command = [args.llama_dir / "llama-perplexity", "-m", model, "-f", args.text, "-c", str(WINDOW), "-fa", "on"]
    command += ["--chunks", str(args.chunks), "-t", "1", "--save-all-logits", target]  # threads would change nothing
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not target.exists():
        raise SystemExit(f"llama-perplexity left with {done.returncode}: {done.stderr[-500:]}")
    return read_saved(target)


def read_saved(path: Path) -> Saved:
    magic, window, vocab, windows = np.fromfile(path, np.dtype("S8, i4, i4, i4"), 1)[0]
    if magic != b"_logits_" or window != WINDOW:
        raise SystemExit(f"{path} begins with {magic!r} and windows of {window}, not b'_logits_' and {WINDOW}")
    tokens = np.fromfile(path, np.int32, windows * WINDOW, offset=20).reshape(windows, WINDOW)
    wide = vocab + vocab % 2 + 4
    rows = np.memmap(path, np.uint16, "r", 20 + tokens.nbytes, (int(windows), SCORED, int(wide)))
    return Saved(tokens, rows)


def begin_alike(tokens: NDArray[np.int32], model: Path) -> None:
    """llama-perplexity begins every window with the text's first token if that is a beginning-of-text token."""
    if tokens[0, 0] == read_gguf(model).metadata.get("tokenizer.ggml.bos_token_id"):
        tokens[:, 0] = tokens[0, 0]


def sixteen_bits(logprobs: Floats) -> Floats:
    """As llama-perplexity would have saved them."""
    high = logprobs.max(axis=1, keepdims=True)
    low = np.maximum(logprobs.min(axis=1, keepdims=True), high - CUT)
    scale = (high - low) / 65535
    saved: Floats = np.rint((np.maximum(logprobs, low) - low) / scale) * scale + low
    return saved


def table(results: list[Result]) -> str:
    rows = [
        f"| {r['model']} | {r['engine']} | {r['kl']:.5f} | {beyond(r)} | {r['kl_p99']:.4f} | {r['same_top']:.2%} |"
        for r in results
    ]
    head = "| file | engine | mean KL | beyond llama.cpp's | 99th percentile | same top token |"
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


def beyond(result: Result) -> str:
    return f"{result['beyond']:+.5f} ± {result['beyond_error']:.5f}" if result["beyond_error"] else ""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""Ours, llama.cpp and OpenVINO GenAI on the same GGUF files, alternately in one run.

    python bench/cpu.py MODEL[=CELLS] ... --llama-dir DIR --openvino-python PYTHON
    python bench/cpu.py smollm2.gguf tinyllama.gguf=decode,prefill --rounds 5 --json figures.json
    python bench/cpu.py --from figures.json more.json --plot docs/performance.svg --report docs/performance.md

Every figure comes from a fresh process. A round runs each engine once, beginning with another one each time; a ratio is
the median over rounds of ours to the peer's run beside it, so that a machine that slows down for a while harms both.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import report
from peers import Figures, LlamaCpp, OpenVino, Peer, Penstock, Unable
from quiet import Clock, others_since, wait_for_quiet

CELLS = tuple(report.TITLES)


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are taken along
    results = join([json.loads(path.read_text()) for path in args.source]) if args.source else measure_all(args)
    if args.plot:
        args.plot.write_text(report.plot(results))
    if args.report:
        report.fill(args.report, "measured", report.table(results))
        report.fill(args.report, "behind", report.behind(results))
    print(report.table(results))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL[=CELLS]", help=f"cells: {','.join(CELLS)}; by default all")
    parser.add_argument("--cells", default=",".join(CELLS), help="for models that name none")
    parser.add_argument("--llama-dir", type=Path, help="the folder of llama-bench, llama-server and their siblings")
    parser.add_argument("--openvino-python", type=Path, help="an interpreter that has openvino_genai")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--others", type=float, default=0.1, help="share of the machine that others may have meanwhile")
    parser.add_argument("--tries", type=int, default=3, help="to get a figure with no more than that")
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for quiet before each try")
    parser.add_argument("--read-gbs", type=float, default=0, help="the machine's read speed in GB/s, for the limits")
    parser.add_argument("--int8-tops", type=float, default=0, help="its int8 speed in 10¹² operations a second")
    parser.add_argument(
        "--from", dest="source", type=Path, nargs="+", metavar="JSON", help="show these figures; measure nothing"
    )
    parser.add_argument("--json", type=Path, help="write the figures here, after every cell")
    parser.add_argument("--plot", type=Path, metavar="SVG")
    parser.add_argument("--report", type=Path, metavar="PAGE", help="put the table into this page")
    args = parser.parse_args()
    if bool(args.models) == bool(args.source):
        parser.error("give models to measure, or --from")
    return args


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    work = [(model, cell) for text in args.models for model, cell in cells_of(text, args.cells)]
    peers = compared(args)
    results = {
        "date": time.strftime("%Y-%m-%d"),
        "threads": args.threads,
        "peers": [peer.name for peer in peers],
        "limits": limits({model for model, _ in work}, args),
        "figures": [],
    }
    for model, cell in work:
        results["figures"] += measure(peers, model, cell, args)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


def join(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs as one: rounds of the same cell follow each other."""
    whole = runs[0]
    for run in runs[1:]:
        whole["peers"] += [peer for peer in run["peers"] if peer not in whole["peers"]]
        whole["limits"] |= run["limits"]
        whole["figures"] += run["figures"]
    return whole


def cells_of(text: str, default: str) -> Iterator[tuple[Path, str]]:
    name, _, cells = text.partition("=")
    for cell in (cells or default).split(","):
        if cell not in CELLS:
            raise SystemExit(f"unknown cell {cell!r}: use some of {', '.join(CELLS)}")
        if not (path := Path(name)).is_file():
            raise SystemExit(f"no such file: {path}")
        yield path, cell


def compared(args: argparse.Namespace) -> list[Peer]:
    peers: list[Peer] = [Penstock(args.threads)]
    if args.llama_dir:
        peers.append(LlamaCpp(args.llama_dir, args.threads))
    else:
        say("llama.cpp is left out: no --llama-dir")
    if args.openvino_python:
        peers.append(OpenVino(args.openvino_python, args.threads))
    else:
        say("OpenVINO GenAI is left out: no --openvino-python")
    return peers


def limits(models: set[Path], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    if not (args.read_gbs and args.int8_tops):
        return {}
    machine = report.Machine(read=args.read_gbs * 1e9, int8=args.int8_tops * 1e12)
    return {model.stem: report.limits(model, machine) for model in models}


def measure(peers: list[Peer], model: Path, cell: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    able = list(peers)
    for round in range(args.rounds):
        first = round % len(peers)
        for peer in [*peers[first:], *peers[:first]]:
            if peer not in able:
                continue
            what = f"{model.stem}, {cell}, {peer.name}, round {round + 1} of {args.rounds}"
            try:
                figures, others = quietly(partial(measure_one, peer, model, cell, round), args, what)
            except (Unable, subprocess.TimeoutExpired) as error:
                able.remove(peer)
                say(f"{what}: no figure: {error}")
                continue
            for unit, value in figures.items():
                key = {"model": model.stem, "cell": cell, "peer": peer.name, "unit": unit}
                yield key | {"value": value, "others": others}


def quietly(take: Callable[[], Figures], args: argparse.Namespace, what: str) -> tuple[Figures, float]:
    """Figures taken while others had little of the machine, and how much; of several tries the quietest."""
    tries: list[tuple[float, Figures]] = []
    for _ in range(args.tries):
        wait_for_quiet(args.others, args.patience)
        start = Clock.now()
        figures = take()
        tries.append((others_since(start), figures))
        say(f"{what}: {words(figures)} (others had {tries[-1][0]:.0%} of the machine)")
        if tries[-1][0] <= args.others:
            break
    others, figures = min(tries, key=lambda one: one[0])
    return figures, others


def measure_one(peer: Peer, model: Path, cell: str, seed: int) -> Figures:
    if cell != "neighbour":
        return peer.measure(cell, model, seed)
    with neighbour():
        return peer.measure("decode", model, seed)


@contextmanager
def neighbour() -> Iterator[None]:
    """A process that would keep one core busy all the time."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def words(figures: Figures) -> str:
    return ", ".join(f"{value:.4g} {unit}" for unit, value in figures.items())


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""Measures what the prefill budget costs prompts and spares answers, on a clock of processor time.

  python bench/prefill_budget.py
  python bench/prefill_budget.py --usual 50:12 75:12 100:12 --rounds 5

An engine of one thread runs in this process, and its clock counts the time that the process computes: other work on the
machine hardly shows. Cells: 16 clients with prompts of 128 and of 512 tokens, each of which sends its next request when
it is answered, and two prompts of 4,000 tokens beside four streams. Usual targets (MS:STEPS, see core/step_cost.py)
take turns; the first is what ratios are of.
"""

# ruff: noqa: E402
from __future__ import annotations

import time

time.perf_counter = time.process_time  # before anyone else takes it

import argparse
import random
from collections.abc import Sequence
from statistics import median

from penstock.config import configure
from penstock.core.step_cost import CostModel
from penstock.engine.build import build_engine
from penstock.engine.engine import Engine
from penstock.engine.model_loading import open_configured
from penstock.store import DEFAULT, fetch
from penstock.types import Request, SamplingParams, Tokens

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
STREAMS, STREAM_TOKENS, LONG, LONGS = 4, 4000, 4000, 2
CLIENTS, ANSWER = 16, 48


class Clients:
    """Sends requests to an engine and notes when their tokens come."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.random = random.Random()
        self.sent: dict[int, float] = {}
        self.came: dict[int, list[float]] = {}

    def send(self, prompt: int, answer: int) -> int:
        id = len(self.sent) + 1
        tokens = tuple(self.random.randrange(1000, 40_000) for _ in range(prompt))
        self.sent[id], self.came[id] = time.perf_counter(), []
        self.engine.add(Request(id, tokens, GREEDY, answer))
        return id

    def step(self) -> None:
        events, now = self.engine.step(), time.perf_counter()
        for event in events:
            if isinstance(event, Tokens):
                self.came[event.seq] += [now] * len(event.tokens)

    def gaps(self, ids: Sequence[int], since: float = 0.0) -> list[float]:
        """Returns the milliseconds between tokens of these requests."""
        pairs = [pair for id in ids for pair in zip(self.came[id], self.came[id][1:], strict=False)]
        return sorted(1e3 * (later - earlier) for earlier, later in pairs if earlier > since)

    def ttft(self, ids: Sequence[int]) -> float:
        """Returns the median of the milliseconds to the first token."""
        return 1e3 * median(self.came[id][0] - self.sent[id] for id in ids)


def loop(clients: Clients, prompt: int, count: int) -> dict[str, float]:
    """Lets clients send so many requests, one after the other each."""
    began, sent = time.perf_counter(), list[int]()
    waiting = set[int]()
    while waiting or len(sent) < count:
        while len(waiting) < CLIENTS and len(sent) < count:
            sent.append(clients.send(prompt, ANSWER))
            waiting.add(sent[-1])
        clients.step()
        waiting = {id for id in waiting if len(clients.came[id]) < ANSWER}
    seconds, gaps = time.perf_counter() - began, clients.gaps(sent)
    return {"tok/s": count * ANSWER / seconds, "TTFT": clients.ttft(sent), "ITL p99": gaps[int(0.99 * len(gaps))]}


def beside(clients: Clients) -> dict[str, float]:
    """Sends long prompts while streams are answered."""
    streams = [clients.send(32, STREAM_TOKENS) for _ in range(STREAMS)]
    while min(len(clients.came[id]) for id in streams) < 32:
        clients.step()
    began, sent = time.perf_counter(), list[int]()
    for _ in range(LONGS):
        sent.append(clients.send(LONG, 2))
        while len(clients.came[sent[-1]]) < 2:
            clients.step()
    seconds, gaps = time.perf_counter() - began, clients.gaps(streams, began)
    for id in streams:
        clients.engine.abort(id)
    clients.step()
    tokens = len(gaps) / seconds
    return {"tok/s": tokens, "TTFT": clients.ttft(sent), "ITL p99": gaps[int(0.99 * len(gaps))]}


CELLS = {
    f"{CLIENTS} clients, 128 in": lambda clients: loop(clients, 128, 3 * CLIENTS),
    f"{CLIENTS} clients, 512 in": lambda clients: loop(clients, 512, 2 * CLIENTS),
    f"{LONG:,} in beside {STREAMS} streams": beside,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT)
    parser.add_argument("--usual", nargs="*", default=[""], metavar="MS:STEPS", help="by default the engine's own")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    options = {"threads": 1, "max_len": 8192, "kv_memory": 768 << 20, "speculation": "off"}
    config = configure(fetch(args.model), options)
    engine = build_engine(config, open_configured(config))
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    clients = Clients(engine)
    for number in range(-1, args.rounds):
        for cell, run in CELLS.items():
            for usual in args.usual[:: 1 if number % 2 else -1]:
                if usual:
                    itl, steps = usual.split(":")
                    CostModel.USUAL_ITL, CostModel.USUAL_STEPS = float(itl) / 1e3, float(steps)
                clients.random.seed(f"{cell} {usual} {number}")
                found.setdefault((cell, usual), []).append(run(clients))
    for (cell, usual), rounds in found.items():
        base = found[cell, args.usual[0]]
        figures = []
        for name in rounds[0]:
            values = [each[name] for each in rounds[1:]]  # the first round is for learning
            ratio = median(each[name] / other[name] for each, other in zip(rounds[1:], base[1:], strict=True))
            figures.append(f"{name} {median(values):.1f} ({min(values):.1f} to {max(values):.1f}), {ratio:.3f}")
        print(f"{cell}, {usual or 'as it is'}: {'; '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()

"""Measures what preemption wastes: KV memory for a quarter of what the requests need, with and without host memory
under it. Answers must be the same.

    python bench/preemption.py --model smollm2 --requests 48 --prompt 192 --answer 128
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from penstock.config import configure
from penstock.engine.build import open_engine
from penstock.store import fetch
from penstock.types import Finished, Report, Request, SamplingParams, Tokens


class Outcome(NamedTuple):
    """Holds what a run computed, and how."""

    seconds: float
    answers: dict[int, list[int]]
    reports: list[Report]
    stats: Any


def run(model: Path, requests: list[Request], **options: Any) -> Outcome:
    """Answers all requests with a new engine."""
    engine = open_engine(configure(model, {"device": "cpu", "speculation": "off"} | options))
    answers = {request.id: list[int]() for request in requests}
    reports = []
    began = time.perf_counter()
    for request in requests:
        engine.add(request)
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Tokens):
                answers[event.seq] += event.tokens
            if isinstance(event, Finished) and event.report is not None:
                reports.append(event.report)
    outcome = Outcome(time.perf_counter() - began, answers, reports, engine.stats())
    engine.close()
    return outcome


def main() -> None:
    """Runs the same requests with all the memory that they need, and with a quarter of it in both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, a folder or a name that the store knows")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=192, help="tokens of a prompt, on average")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer, on average")
    given = parser.parse_args()
    random = Random(7)
    path = Path(given.model) if Path(given.model).exists() else fetch(given.model)
    requests = []
    for id in range(given.requests):
        prompt = tuple(
            random.randrange(1000, 40000) for _ in range(random.randint(given.prompt // 2, given.prompt * 3 // 2))
        )
        answer = random.randint(given.answer // 2, given.answer * 3 // 2)
        requests.append(Request(id, prompt, SamplingParams(temperature=0), answer))
    tokens = sum(len(request.prompt) + request.max_tokens for request in requests)
    probe = open_engine(configure(path, {"device": "cpu", "max_rows": 1, "max_len": 64}))
    token_bytes = len(probe._backend.kv.export_blocks([0])) // probe.limits.block_size
    probe.close()
    need = tokens * token_bytes
    most = max(len(request.prompt) + request.max_tokens for request in requests)
    print(f"{given.requests} requests of {tokens} tokens: {need / 1e6:.0f} MB of KV")
    print("| KV | RAM | preemptions | recomputed tokens | of all | copied out, in (blocks) | seconds |")
    print("|---|---|---|---|---|---|---|")
    answers = []
    for share, ram in ((1, 0), (4, 0), (4, need)):
        options = {"kv_memory": max(need // share, 2 * most * token_bytes), "max_rows": given.requests, "kv_ram": ram}
        outcome = run(path, requests, **options)
        answers.append(outcome.answers)
        preemptions = sum(report.preemptions for report in outcome.reports)
        recomputed = sum(report.recomputed for report in outcome.reports)
        print(
            f"| 1/{share} | {ram / 1e6:.0f} MB | {preemptions} | {recomputed} | {recomputed / tokens:.1%} "
            f"| {outcome.stats.copied_out}, {outcome.stats.copied_in} | {outcome.seconds:.1f} |",
            flush=True,
        )
    assert all(each == answers[0] for each in answers), "answers differ"


if __name__ == "__main__":
    main()

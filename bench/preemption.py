"""Measures what preemption wastes: KV memory for a quarter of what the requests need, with and without host memory
under it. Answers must be the same.

Each answer ends by itself, at a token that was chosen for it. Requests allow either exactly as many tokens as that
takes, or many more, as clients do: then the engine has only the lengths that it has learned to go by.

    python bench/preemption.py --model smollm2 --requests 48 --prompt 192 --answer 128 --max-tokens 1024
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

    def row(self, tokens: int) -> str:
        """Returns the rest of a table's row, for requests that have so many tokens in all."""
        preemptions = sum(report.preemptions for report in self.reports)
        recomputed = sum(report.recomputed for report in self.reports)
        copied = f"{self.stats.copied_out}, {self.stats.copied_in}"
        return f"| {preemptions} | {recomputed} | {recomputed / tokens:.1%} | {copied} | {self.seconds:.1f} |"


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


def ending_by_itself(request: Request, answer: list[int]) -> Request:
    """Returns the request with a token that ends the answer where that token first occurs, as late as there is one.
    The most tokens that it may have are then as many as it has."""
    firsts = {token: at for at, token in reversed(list(enumerate(answer)))}
    last = max(firsts, key=firsts.__getitem__)
    return request._replace(stop_ids=frozenset({last}), max_tokens=firsts[last] + 1)


def make_requests(given: argparse.Namespace) -> list[Request]:
    """Returns requests of random tokens, with random lengths of prompts and answers."""
    random, requests = Random(7), []
    for id in range(given.requests):
        prompt = tuple(
            random.randrange(1000, 40000) for _ in range(random.randint(given.prompt // 2, given.prompt * 3 // 2))
        )
        answer = random.randint(given.answer // 2, given.answer * 3 // 2)
        requests.append(Request(id, prompt, SamplingParams(temperature=0), answer))
    return requests


def bytes_of_a_token(path: Path) -> int:
    """Returns the bytes of a token's KV."""
    probe = open_engine(configure(path, {"device": "cpu", "max_rows": 1, "max_len": 64}))
    try:
        return len(probe.backend.kv.export_blocks([0])) // probe.limits.block_size
    finally:
        probe.close()


def main() -> None:
    """Runs the same requests with all the memory that they need, and with a quarter of it in both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, a folder or a name that the store knows")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=192, help="tokens of a prompt, on average")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer, on average")
    parser.add_argument("--max-tokens", type=int, default=1024, help="tokens that a generous request allows")
    given = parser.parse_args()
    path = Path(given.model) if Path(given.model).exists() else fetch(given.model)
    asked = make_requests(given)
    whole = run(path, asked, max_rows=given.requests).answers
    exact = [ending_by_itself(request, whole[request.id]) for request in asked]
    generous = [request._replace(max_tokens=given.max_tokens) for request in exact]
    tokens, token_bytes = sum(len(each.prompt) + each.max_tokens for each in exact), bytes_of_a_token(path)
    need = tokens * token_bytes
    print(f"{given.requests} requests of {tokens} tokens: {need / 1e6:.0f} MB of KV")
    print("| max_tokens | KV, of need | RAM | preemptions | recomputed tokens | of all | copied out, in | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    expected = {each.id: whole[each.id][: each.max_tokens] for each in exact}
    for name, requests in (("exact", exact), (str(given.max_tokens), generous)):
        least = 2 * token_bytes * max(len(each.prompt) + each.max_tokens for each in requests)
        for share, ram in ((1, 0), (4, 0), (4, need)):
            memory = max(need // share, least)  # the longest that is allowed has to fit
            outcome = run(path, requests, kv_memory=memory, max_rows=given.requests, kv_ram=ram)
            print(f"| {name} | {memory / need:.2f} | {ram / 1e6:.0f} MB {outcome.row(tokens)}", flush=True)
            assert outcome.answers == expected, "answers differ"


if __name__ == "__main__":
    main()

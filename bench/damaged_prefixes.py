"""Restores prompts from files in which random bits were flipped, and counts wrong tokens:
`python bench/damaged_prefixes.py --restores 100000`. The fake backend's answers show what its KV holds."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from penstock.backend.fake import FakeBackend, continuation
from penstock.core.step_cost import PromptCost
from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.engine.kv_disk import loading
from penstock.engine.kv_disk.segment import BlockLayout
from penstock.engine.kv_disk.store import SegmentStore
from penstock.types import Failed, Finished, Limits, Request, SamplingParams, Tokens

LIMITS = Limits(max_len=64, max_rows=64, step_tokens=512, block_size=4, num_blocks=512, vocab=997, host_places=512)
PROMPTS = 50
PROMPT_TOKENS, ANSWER_TOKENS = 18, 3
LIMIT = 1 << 20  # bytes on disk


def open_server(folder: Path) -> Engine:
    """Returns an engine that begins with what is on disk."""
    backend = FakeBackend(LIMITS.vocab)
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    layout = BlockLayout(bytes(16), LIMITS.block_size, 1, len(backend.kv.export_blocks([0])))
    store = SegmentStore(folder, layout, LIMIT)
    store.open()
    return assemble(backend, LIMITS, kv_store=store)


def ask(engine: Engine, prompts: list[tuple[int, ...]], counts: Counter[str]) -> list[list[int]]:
    """Returns the answers to prompts, which are asked all at once, and counts the tokens that were reused."""
    answers: list[list[int]] = [[] for _ in prompts]
    for id, prompt in enumerate(prompts):
        engine.add(Request(id, prompt, SamplingParams(temperature=0), ANSWER_TOKENS))
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Tokens):
                answers[event.seq] += event.tokens
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
            if isinstance(event, Finished) and event.report is not None:
                counts["restored"] += "disk" in dict(event.report.reused)
                counts["tokens reused"] += event.report.cached
    return answers


def flip(data: bytes, chance: random.Random) -> bytes:
    """Returns the bytes with a few random bits flipped, or many; some are cut off at times."""
    damaged = bytearray(data)
    for _ in range(chance.choice((1, 1, 3, 30, 300))):
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    return bytes(damaged[: chance.randrange(len(data))] if chance.random() < 0.05 else damaged)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restores", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, counts = random.Random(options.seed), Counter[str]()
    logging.disable()  # it would say what is damaged
    PromptCost.FEW, loading.LEAST = 1 << 62, 60.0  # the fake computes faster than any disk
    prompts = [tuple(chance.randrange(LIMITS.vocab) for _ in range(PROMPT_TOKENS)) for _ in range(PROMPTS)]
    expected = [continuation(prompt, ANSWER_TOKENS, LIMITS.vocab) for prompt in prompts]
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        engine = open_server(folder)
        ask(engine, prompts, Counter())
        engine.close()
        [path] = folder.glob("*/*.kv")
        whole = path.read_bytes()
        for _ in range(-(-options.restores // PROMPTS)):
            for written in folder.glob("*/*.kv"):
                written.unlink()
            path.write_bytes(flip(whole, chance))
            engine = open_server(folder)
            answers = ask(engine, prompts, counts)
            counts["asked"] += len(prompts)
            counts["wrong"] += sum(got != want for got, want in zip(answers, expected, strict=True))
            counts.update(dict(engine.stats().disk.skipped))
            engine.close()
    print(", ".join(f"{name} {count:,}" for name, count in counts.items()))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""What structured output costs.

    python bench/structured.py MODEL [--streams 16] [--tokens 128] [--rounds 5]

It measures streams held to a schema against free ones, alternately, with the same prompts, in tokens a second. Which
schemas can be used is counted by schemas.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from penstock import LLM, SamplingParams
from penstock.types import Grammar

PEOPLE = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "about": {"type": "string", "maxLength": 200},
            "tags": {"type": "array", "items": {"enum": ["kind", "quiet", "tall", "old"]}, "maxItems": 3},
        },
        "required": ["name", "age", "about", "tags"],
        "additionalProperties": False,
    },
}
KINDS = {
    "free": None,
    "schema": Grammar("json", json.dumps(PEOPLE)),
    "any JSON": Grammar("json", '{"type": "array", "minItems": 1000}'),
}


def throughput(model: str, streams: int, tokens: int, rounds: int) -> None:
    """Every stream has just so many tokens, whatever it is held to."""
    with LLM(model, max_len=1024) as llm:
        prompts = [f"A list of the people in house {number}, as JSON:\n" for number in range(streams)]
        rates: dict[str, list[float]] = {name: [] for name in KINDS}
        for round in range(-1, rounds):  # the first one compiles
            for name, grammar in KINDS.items():
                params = SamplingParams(
                    temperature=0.8, seed=round + 1, max_tokens=tokens, ignore_eos=True, grammar=grammar
                )
                began = time.perf_counter()
                made = sum(len(answer.tokens) for answer in llm.generate(prompts, params))
                if round >= 0:
                    rates[name].append(made / (time.perf_counter() - began))
        stats = llm._engine.stats()
    free = statistics.median(rates["free"])
    for name, values in rates.items():
        middle = statistics.median(values)
        print(
            f"{name:9} {middle:7.1f} tokens/s  {middle / free:6.1%} of free  ({min(values):.1f} to {max(values):.1f})"
        )
    mask = stats.mask_seconds / stats.masks * 1e6
    print(f"{stats.masks} masks of {mask:.1f} us each; {stats.forced_tokens} tokens forced")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    told = parser.parse_args()
    throughput(told.model, told.streams, told.tokens, told.rounds)

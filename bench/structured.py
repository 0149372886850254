"""What structured output costs.

    python bench/structured.py MODEL [--streams 16] [--tokens 128] [--rounds 5]
    python bench/structured.py MODEL --schemas FILE.jsonl.gz

The first measures streams held to a schema against free ones, alternately, with the same prompts, in tokens a second.
The second compiles every schema of a file of JSON lines ({"schema": ..., "tests": [{"data": ..., "valid": ...}]}),
walks each test's data through its grammar, and says what was refused and why.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams
from penstock.engine.grammar import Grammars
from penstock.errors import PenstockError
from penstock.model.load import load_text
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


def schemas(model: str, path: Path) -> None:
    tokenizer = load_text(Path(model)).tokenizer
    grammars = Grammars(lambda: tokenizer, tokenizer.vocab_size)
    refused: Counter[str] = Counter()
    seconds, wrong, walked = [], [], 0
    for line in gzip.decompress(path.read_bytes()).splitlines():
        entry = json.loads(line)
        began = time.perf_counter()
        compiling = grammars.compile(Grammar("json", json.dumps(entry["schema"])))
        compiling.wait(60)
        seconds.append(time.perf_counter() - began)
        try:
            matcher = compiling.matcher()
        except PenstockError as error:
            refused[error.message[:100]] += 1
            continue
        for test in entry["tests"]:
            walked += 1
            ids = tokenizer.encode(json.dumps(test["data"], ensure_ascii=False))
            if follows(matcher.deep_copy(), ids) != test["valid"]:
                wrong.append((entry.get("name") or entry["description"], test["valid"]))
    count = len(seconds)
    middle, slow = statistics.median(seconds) * 1e3, sorted(seconds)[int(count * 0.99)] * 1e3
    print(f"{count - refused.total()} of {count} schemas compile, in {middle:.1f} ms (median), {slow:.0f} ms (99 %)")
    for reason, times in refused.most_common():
        print(f"  {times:4} refused: {reason}")
    print(f"{walked} instances: {walked - len(wrong)} as told, {Counter(valid for _, valid in wrong)} not")
    for name, valid in wrong:
        print(f"  {name}: {'valid but refused' if valid else 'invalid but accepted'}")


def follows(matcher: Any, ids: list[int]) -> bool:
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schemas", type=Path)
    told = parser.parse_args()
    if told.schemas:
        schemas(told.model, told.schemas)
    else:
        throughput(told.model, told.streams, told.tokens, told.rounds)

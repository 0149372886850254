"""Compares answers with and without drafts: tokens, log-probabilities and reasons to stop must be the same.

    python bench/exactness.py MODEL [--requests 10000] [--tokens 48] [--batch 250]

Requests of mixed sampling, penalties, grammars, stops and log-probabilities are answered on the CPU by two engines, one
with drafts (`--speculation`, auto by default) and one without. Prompts repeat themselves, and each other, so that much
is drafted. The exit status is 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from random import Random
from typing import Any

from penstock import LLM, SamplingParams, StructuredOutputsParams
from penstock.llm.outputs import RequestOutput
from penstock.types import DraftCounts

LINES = (
    "Once upon a time there was a small dog who liked to play with a red ball in the park.",
    "Lily saw a big tree. The tree was tall. Lily wanted to climb the tree.",
    'Items: {"name": "ball", "price": 3}, {"name": "car", "price": 12}, {"name": "kite", "price": 7},',
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\n",
    "One two three one two three one two three one two",
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "price": {"type": "integer"}},
    "required": ["name", "price"],
    "additionalProperties": False,
}
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.8, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"temperature": 0.3, "logit_bias": {300: 2.0, 310: -5.0}},
)
FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"stop": ("."), "include_stop_str_in_output": True},
    {"stop": ("dog", "\n\n")},
    {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    {"structured_outputs": StructuredOutputsParams(regex=r"(one|two|three)( (one|two|three)){3,20}")},
    {"bad_words": ("ball", "tree")},
    {"min_tokens": 8, "stop": (",")},
)


def main() -> None:
    args = arguments()
    options: dict[str, Any] = {"threads": args.threads, "max_rows": args.rows}
    drafting = LLM(args.model, speculation=args.speculation, **options)
    plain = LLM(args.model, speculation="off", **options)
    found: Counter[str] = Counter()
    for first in range(0, args.requests, args.batch):
        numbers = range(first, min(first + args.batch, args.requests))
        prompts, params = zip(*(request(number, args.tokens) for number in numbers), strict=True)
        sides = [llm.generate(list(prompts), list(params), use_tqdm=False) for llm in (drafting, plain)]
        for number, one, other in zip(numbers, *sides, strict=True):
            found["tokens"] += len(other.outputs[0].token_ids)
            if told(one) != told(other):
                found["differ"] += 1
                print(f"request {number} differs:\n  {told(one)}\n  {told(other)}")
    counts = draft_counts(drafting)
    drafted, accepted = sum(each.drafted for each in counts), sum(each.accepted for each in counts)
    print(
        f"{found['differ']} of {args.requests:,} answers differ; {found['tokens']:,} tokens, "
        f"of which {accepted:,} were accepted of {drafted:,} that were drafted"
    )
    sys.exit(1 if found["differ"] else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer, at most")
    parser.add_argument("--batch", type=int, default=250, help="requests that are sent at once")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--speculation", default="auto")
    return parser.parse_args()


def request(number: int, tokens: int) -> tuple[str, SamplingParams]:
    """Returns the prompt and the parameters of a request, which its number decides."""
    random = Random(number)
    prompt = " ".join(random.choice(LINES) for _ in range(random.randint(1, 3)))
    chosen = SAMPLING[number % len(SAMPLING)] | FORMS[number // len(SAMPLING) % len(FORMS)]
    logprobs = random.choice((None, None, 0, 3))
    return prompt, SamplingParams(seed=number, max_tokens=random.randint(8, tokens), logprobs=logprobs, **chosen)


def draft_counts(llm: LLM) -> tuple[DraftCounts, ...]:
    """Returns what became of drafts, as `/metrics` of a server tells it."""
    return llm._engine.inner.engine.stats().drafts


def told(output: RequestOutput) -> tuple[Any, ...]:
    """Returns what a request was told."""
    choice = output.outputs[0]
    return list(choice.token_ids), choice.text, choice.logprobs, choice.finish_reason, choice.stop_reason


if __name__ == "__main__":
    main()

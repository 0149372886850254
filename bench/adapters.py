"""Measures what adapters (LoRA) cost on a CPU: as many clients as adapters against the model alone.

    python bench/adapters.py MODEL ADAPTER [--clients 8] [--threads 2] [--rounds 5]

ADAPTER is one PEFT folder or GGUF file. It is registered under as many names as there are clients, so that each has a
slot and memory of its own. Sides take turns; the best of all rounds counts, because neighbours only ever add time. On a
busy machine, processor time with one thread says more (`--threads 1`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import NamedTuple

from quiet import Clock, others_since

from penstock import LLM, SamplingParams

PROMPT = 32  # tokens
ANSWER = 128


class Spent(NamedTuple):
    """Holds the seconds that a run took."""

    wall: float
    processor: float  # of all threads


def main() -> None:
    args = arguments()
    with LLM(args.model, threads=args.threads, max_rows=args.clients, max_adapters=args.clients + 1) as llm:
        names = [f"adapter {client}" for client in range(args.clients)]
        for name in names:
            llm.register_adapter(name, args.adapter)
        sides: dict[str, list[str | None]] = {
            "no adapter": [None] * args.clients,
            "one adapter": [names[0]] * args.clients,
            f"{args.clients} adapters": [*names],
        }
        for chosen in sides.values():
            run(llm, chosen, 2)
        times: dict[str, list[Spent]] = {side: [] for side in sides}
        start = Clock.now()
        for _ in range(args.rounds):
            for side, chosen in sides.items():
                times[side].append(run(llm, chosen, ANSWER))
        tell(times, args.clients)
        load = min(first_use(llm, args.adapter, number) for number in range(args.rounds))
        print(f"first use of an adapter: {1000 * load:.0f} ms longer than the next")
        print(f"others used {others_since(start):.0%} of the machine meanwhile")


def run(llm: LLM, adapters: Sequence[str | None], tokens: int) -> Spent:
    """Answers one prompt with each adapter, all at once, without the prefix cache."""
    prompts = [[100 + client, *range(1000, 999 + PROMPT)] for client in range(len(adapters))]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    llm.reset_prefix_cache()
    began = Spent(time.perf_counter(), time.process_time())
    llm.generate(prompts, sampling, use_tqdm=False, lora_request=list(adapters))
    return Spent(time.perf_counter() - began.wall, time.process_time() - began.processor)


def tell(times: dict[str, list[Spent]], clients: int) -> None:
    """Prints the tokens each side makes in a second, and its share of the speed without adapters."""
    best = {side: Spent(*map(min, zip(*spent, strict=True))) for side, spent in times.items()}
    plain = next(iter(best.values()))
    for side, spent in best.items():
        print(
            f"{side:>12}: {clients * ANSWER / spent.wall:7.1f} tokens/s, {plain.wall / spent.wall:4.0%}; "
            f"processor time {spent.processor:.2f} s, {plain.processor / spent.processor:4.0%}"
        )


def first_use(llm: LLM, path: str, number: int) -> float:
    """Returns the seconds that the first request with an adapter takes longer than the second."""
    name = f"new {number}"
    llm.register_adapter(name, path)
    seconds = [run(llm, [name], 1).wall for _ in range(3)]
    llm.unregister_adapter(name)
    return seconds[0] - min(seconds[1:])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("adapter")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()

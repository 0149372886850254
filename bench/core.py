"""Measures what the scheduler costs: microseconds of plan + commit per running row.

    python bench/core.py            a table
    python bench/core.py --json     for machines

No model runs: rows decode against a backend that answers at once, so all the time is the scheduler's own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from penstock.core import Scheduler, Sequence, SequenceParams
from penstock.types import Limits, RowResult, StepResult

AIM = 4.0  # microseconds per row at 256 rows


def measure(rows: int, prompt: int, steps: int) -> list[float]:
    """Returns the seconds of plan + commit for each of `steps` decode steps of `rows` sequences."""
    limits = Limits(
        max_len=prompt + 4 * steps,
        max_rows=rows,
        step_tokens=rows * (prompt + 1),
        block_size=16,
        num_blocks=rows * ((prompt + 4 * steps) // 16 + 1),
        vocab=1000,
    )
    scheduler = Scheduler(limits)
    for id in range(rows):
        scheduler.add(
            Sequence(id, (id % 1000, *range(1, prompt)), 3 * steps, SequenceParams(stop_ids=frozenset({999})))
        )
    answer = RowResult(tokens=(7,))
    seconds = []
    for _ in range(2 * steps):
        began = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        result = StepResult(plan.step, (answer,) * len(plan.rows))
        answered = time.perf_counter()
        scheduler.commit(plan, result)
        seconds.append(time.perf_counter() - answered + planned - began)
    assert len(scheduler.running) == rows
    return seconds[steps:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = []
    for rows in args.rows:
        per_row = [second * 1e6 / rows for second in measure(rows, args.prompt, args.steps)]
        low, median, high = statistics.quantiles(per_row, n=20)[0], statistics.median(per_row), max(per_row)
        results.append({"rows": rows, "us_per_row": median, "p5": low, "max": high})
    if args.json:
        print(json.dumps({"aim_us_per_row": AIM, "results": results}))
        return
    print(f"{'rows':>6} {'µs per row':>12} {'p5':>8} {'max':>8}   (aim at 256 rows: {AIM} µs)")
    for r in results:
        print(f"{r['rows']:>6} {r['us_per_row']:>12.2f} {r['p5']:>8.2f} {r['max']:>8.2f}")


if __name__ == "__main__":
    main()

"""Writes tests/core/data/traces.json: when requests of two public traces arrive and how long they are.

    python scripts/make_trace_excerpt.py FOLDER

FOLDER has AzureLLMInferenceTrace_conv.csv (Azure public dataset, CC-BY 4.0) and mooncake_conversation_trace.jsonl.gz
(Mooncake, Apache-2.0). Of each, the first requests are taken: milliseconds from the first, prompt and answer tokens.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path

COUNT = 150  # requests of each trace
OUT = Path(__file__).parents[1] / "tests" / "core" / "data" / "traces.json"

Entry = tuple[int, int, int]


def azure(path: Path) -> Iterator[Entry]:
    """Yields the requests of the Azure trace."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        first = None
        for row in rows:
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or at
            passed = round((at - first).total_seconds() * 1000)
            yield passed, int(row["ContextTokens"]), int(row["GeneratedTokens"])


def mooncake(path: Path) -> Iterator[Entry]:
    """Yields the requests of the Mooncake trace."""
    with gzip.open(path, "rt") as file:
        for line in file:
            entry = json.loads(line)
            yield entry["timestamp"], entry["input_length"], entry["output_length"]


def main() -> None:
    folder = Path(sys.argv[1])
    traces = {
        "azure": list(islice(azure(folder / "AzureLLMInferenceTrace_conv.csv"), COUNT)),
        "mooncake": list(islice(mooncake(folder / "mooncake_conversation_trace.jsonl.gz"), COUNT)),
    }
    OUT.write_text(json.dumps(traces, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()

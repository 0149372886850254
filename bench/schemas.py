"""Counts which real JSON schemas can be used for structured output, and whether grammars tell valid from invalid.

    python bench/schemas.py DIR

DIR has files of JSON lines, gzipped or not, as jsonschemabench writes them: a schema and tests, each with data and
whether that is valid. Each instance is walked through the grammar byte by byte, compact and as json.dumps writes it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from penstock.engine.grammars.grammar import WHITESPACE
from penstock.errors import InvalidGrammar
from penstock.text.grammar.json_schema import RewrittenSchema, rewrite
from penstock.text.grammar.schema_validator import first_problem

SPACINGS: tuple[dict[str, Any], ...] = ({"separators": (",", ":")}, {})


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.jsonl*")):
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        yield from (row for line in text.splitlines() if "schema" in (row := json.loads(line)))


class Walker:
    """Walks instances through the grammar of one schema."""

    def __init__(self, tokenizer: LLTokenizer, rewritten: RewrittenSchema) -> None:
        text = json.dumps({} if rewritten.schema is True else rewritten.schema)
        grammar = LLMatcher.grammar_from_json_schema(text, defaults=WHITESPACE)  # type: ignore[arg-type]
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def accepts(self, value: Any, spacing: dict[str, Any]) -> bool:
        matcher = self._matcher.deep_copy()
        tokens = list(json.dumps(value, ensure_ascii=False, **spacing).encode("utf-8", "replace"))
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-v", "--verbose", action="store_true", help="name each schema that is not as it should be")
    asked = parser.parse_args()
    tokenizer, counts, slowest = LLTokenizer("byte"), Counter[str](), 0.0
    for row in rows_of(asked.folder):
        counts["schemas"] += 1
        began = time.perf_counter()
        found, problems = check(tokenizer, row)
        slowest = max(slowest, time.perf_counter() - began)
        counts.update(found)
        for problem in problems if asked.verbose else ():
            print(f"{row.get('name', row.get('description'))}: {problem}")
    for name, count in counts.items():
        print(f"{count:6d} {name}")
    print(f"{slowest:6.2f} s for the slowest schema and its instances")


def check(tokenizer: LLTokenizer, row: dict[str, Any]) -> tuple[Counter[str], list[str]]:
    """Returns counts of one schema and its instances, and what is not as it should be."""
    try:
        rewritten = rewrite(json.dumps(row["schema"]))
    except InvalidGrammar as error:
        return Counter(refused=1), [f"refused: {error}"]
    walker = Walker(tokenizer, rewritten)
    counts = Counter(accepted=1)
    counts["accepted, and every keyword is enforced by the grammar"] += not rewritten.unenforced
    counts["accepted, and every keyword is enforced or checked"] += not rewritten.unchecked
    problems = [f"not enforced: {', '.join(rewritten.unenforced)}"] if rewritten.unenforced else []
    for test in row.get("tests", ()):
        walked = [walker.accepts(test["data"], spacing) for spacing in SPACINGS]
        checked = first_problem(test["data"], rewritten.normal) is None
        if test["valid"]:
            counts["valid instances"] += 1
            counts["valid instances that a grammar refuses"] += not all(walked)
            counts["valid instances that the check refuses"] += not checked
            problems += [] if all(walked) else [f"refuses a valid instance: {json.dumps(test['data'])[:300]}"]
            continue
        counts["invalid instances"] += 1
        missed = any(walked) and not rewritten.unchecked and (checked or not rewritten.unenforced)
        counts["invalid instances that are taken for valid"] += missed
        problems += [f"accepts an invalid instance: {json.dumps(test['data'])[:300]}"] if missed else []
    return counts, problems


if __name__ == "__main__":
    main()

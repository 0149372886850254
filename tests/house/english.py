"""Counts the patterns that make English read like a translation, in docstrings, comments and documents, by folder.

`python -m tests.house.english` writes the counts to english.json. Run it after a change that lowers one of them;
`python -m tests.house.english show` prints the places.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import penstock

SOURCES = Path(penstock.__file__).parent
PROJECT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("english.json")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
PATTERNS = {
    "a what-clause as a noun": r"\b[Ww]hat (is|was|has|it|a|no|others?|comes|leaves|needs)\b",
    "Returns what": r"\b(Returns|Says|Holds|Takes|Gives|Tells) what\b",
    "whoever, whatever": r"\b([Ww]hoever|[Ww]hatever|Whose|Who )\b",
    "that of, those of": r"\b(that|those) of\b",
    "so many, as much": r"\b(so|as) (many|much)\b",
    "things that speak": r"\b(says|tells|told|is said)\b",
    "Has it done, lets it go": r"^(Has|Lets) ",
    "a negated noun": r"\b(is|are|has) no [a-z]+",
    "notes, goes on, in place of": r"\b([Tt]akes note|goes on|go on|in place of)\b",
    "beside, alone": r"\b(beside|alone)\b",
    "a comment that continues the name": r"^# (that|of|for|to|with|by) ",
}


@cache
def counted() -> dict[str, dict[str, int]]:
    """Returns the number of matches, by folder and pattern."""
    counts: dict[str, Counter[str]] = {}
    for place, text in texts():
        for name, pattern in PATTERNS.items():
            if found := len(re.findall(pattern, text)):
                counts.setdefault(place.partition(":")[0], Counter())[name] += found
    return {folder: dict(sorted(counter.items())) for folder, counter in sorted(counts.items())}


def texts() -> Iterator[tuple[str, str]]:
    """Yields folder:file:line and a docstring, a comment, or a line of a document."""
    for path in sorted(SOURCES.rglob("*.py")):
        name = path.relative_to(SOURCES)
        folder = f"src/{name.parts[0].removesuffix('.py')}"
        yield from ((f"{folder}:{name}:{line}", text) for line, text in prose(path.read_text()))
    for path in sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md")]):
        name = path.relative_to(PROJECT)
        if "measurements" not in name.parts:
            folder = "docs" if "docs" in name.parts else "root"
            plain = re.sub(r"```.*?```|`[^`]*`", "", path.read_text(), flags=re.DOTALL)
            yield from ((f"{folder}:{name}:{line}", text) for line, text in enumerate(plain.splitlines(), 1))


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and text of each docstring and comment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def show() -> None:
    """Prints every match."""
    for place, text in texts():
        for name, pattern in PATTERNS.items():
            for match in re.finditer(pattern, text):
                print(f"{place}: {name}: {text[max(match.start() - 20, 0) : match.end() + 40]!r}")


if __name__ == "__main__":
    if sys.argv[1:] == ["show"]:
        show()
    else:
        RECORDED.write_text(json.dumps(counted(), indent=2, sort_keys=True) + "\n")

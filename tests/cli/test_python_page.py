"""Runs the examples of docs/python.md as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
EXAMPLES = re.findall(r"^## ([^\n]*)\n```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
ABOUT = {
    "Generate": r"The capital of France is -> .*\nOne, two, three, -> ",
    "Chat and streaming": r"\S",
    "Structured output": r'\{\s*"year":\s*-?\d+.*\d\d\d\d-\d\d\n$',
    "Embeddings, scores and labels": r"576\nTrue\n",
    "Beam search": r"\[\('The capital of France is Paris.*', -\d+\.\d+\), \('The capital of France is",
    "asyncio": r"\S",
}


def test_every_example_is_known() -> None:
    assert [title for title, _ in EXAMPLES] == list(ABOUT)


@pytest.fixture(scope="session")
def outputs(smollm2: Path) -> dict[str, str]:
    """What each example prints. They run in one process, which imports everything once."""
    mark = "\n-- example --\n"
    code = f"print({mark!r})\n".join(example for _, example in EXAMPLES)
    code = code.replace('"smollm2"', repr(str(smollm2)))  # which may lie elsewhere
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return dict(zip(ABOUT, done.stdout.split(f"{mark}\n"), strict=True))


@pytest.mark.parametrize("title", ABOUT)
def test_an_example_prints_what_it_is_about(outputs: dict[str, str], title: str) -> None:
    assert re.search(ABOUT[title], outputs[title], re.DOTALL), outputs[title]

"""Tests that what the documents name exists, and that their lines can be read in a terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "penstock"
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]
MEASUREMENTS = ROOT / "docs" / "measurements"  # name files as they were called on the day of the page
FOLDERS = {path.name for base in (ROOT, SOURCES) for path in base.iterdir() if path.is_dir()}
MAX_COLUMNS = 125


def id_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]


def named_paths(text: str) -> set[str]:
    """Returns what stands in backticks and looks like a path of this repository: `core/policy.py`, `backend/ref`."""
    spans = re.findall(r"`([\w.*{},/-]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return {span for span in spans if "/" in span.strip("/") and span.split("/")[0] in FOLDERS}


def exists(path: str) -> bool:
    choices = re.search(r"\{([^}]*)\}", path)
    if choices:
        return all(exists(path.replace(choices.group(), choice)) for choice in choices.group(1).split(","))
    return any(list(base.glob(path.rstrip("/"))) for base in (ROOT, SOURCES))


@pytest.mark.parametrize("page", [page for page in PAGES if MEASUREMENTS not in page.parents], ids=id_of)
def test_paths_named_in_documents_exist(page: Path) -> None:
    assert {path for path in named_paths(page.read_text()) if not exists(path)} == set()


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_lines_are_wrapped(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose)  # a link is as long as its text
    assert not [line for line in shown.splitlines() if len(line) > MAX_COLUMNS and not line.startswith("|")]

"""Builds the site of the documents, strictly, where MkDocs is installed: `pip install '.[docs]'`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from scripts.site_hooks import outside, prepare

ROOT = Path(__file__).parents[2]
PAGE = PurePosixPath("start/laptop.md")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="builds the site with mkdocs-material")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        build, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_on_the_site_and_can_be_searched_for(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.parent.relative_to(site) for path in site.rglob("index.html")}
    assert {page.parent if page.name == "index" else page for page in pages} == built
    searched = {
        entry["location"].partition("#")[0]
        for entry in json.loads((site / "search/search_index.json").read_text())["docs"]
    }
    assert len(searched) == len(built)


def test_the_site_asks_nobody_else_for_anything(site: Path) -> None:
    loads = re.compile(r'<(?:script|img|iframe|source)[^>]*\ssrc="?(?:https?:)?//|<link[^>]*href="?(?:https?:)?//')
    assert [page for page in site.rglob("*.html") if loads.search(page.read_text())] == []
    assert [sheet for sheet in site.rglob("*.css") if re.search(r"url\(\W?(?:https?:)?//", sheet.read_text())] == []


def test_lists_are_lists(site: Path) -> None:
    """Python's Markdown reads what code hosts read as a list as one paragraph, unless the hooks prepare it."""
    assert [page for page in site.rglob("*.html") if re.search(r"^\s*- ", page.read_text(), re.MULTILINE)] == []


def test_links_that_leave_the_documents_become_text_or_lead_to_the_source() -> None:
    text = "See [a\ntest](../../tests/house/test_site.py) and [models](../models.md#names).\n"
    assert prepare(text, PAGE) == "See a\ntest and [models](../models.md#names).\n"
    there = "See [a\ntest](https://host/x/tests/house/test_site.py) and [models](../models.md#names).\n"
    assert prepare(text, PAGE, "https://host/x/") == there
    assert outside(PAGE, "../../src/penstock") == "src/penstock"
    assert outside(PAGE, "../gpu.md") is None


def test_lists_are_prepared_and_code_is_not() -> None:
    text = "One:\n- a\n  - b\n    more\n\n```\n- c\n  - d [e](../../f)\n```\n"
    assert prepare(text, PAGE) == "One:\n\n- a\n    - b\n        more\n\n```\n- c\n  - d [e](../../f)\n```\n"

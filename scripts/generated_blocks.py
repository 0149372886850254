"""Writes those blocks of a page that are made of the code. Each lies between two comments that name it; the rest of the
page is prose, and is edited there."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

COLUMNS = 120
Blocks = Mapping[str, Callable[[], str]]


def render(page: Path, blocks: Blocks, script: str) -> str:
    """Returns the page with its blocks written anew."""
    text = page.read_text(encoding="utf-8")
    for name, make in blocks.items():
        begin, end = f"<!-- {name}: written by scripts/{script} -->", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not (found and ended):
            sys.exit(f"{page} lacks the comments {begin} and {end}: put them where the block belongs")
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    return text


def write(pages: Mapping[Path, Blocks], script: str) -> None:
    """Writes the blocks of all pages; with --check on the command line, exits with an error if one is not current."""
    for page, blocks in pages.items():
        new = render(page, blocks, script)
        if sys.argv[1:] != ["--check"]:
            page.write_text(new, encoding="utf-8")
        elif new != page.read_text(encoding="utf-8"):
            sys.exit(f"{page} is not current: run python scripts/{script}")


def wrapped(text: str) -> str:
    """Returns a paragraph, or an item of a list, in lines of the page's width."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

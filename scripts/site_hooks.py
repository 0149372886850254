"""Prepares pages of docs/ for MkDocs: they are written as code hosts read them, which differs in two ways.

- A code host finds ../src/penstock/errors.py; a site of docs/ has no such page. Links that leave docs/ become plain
  text, or lead to PENSTOCK_SOURCE_URL (such as https://host/owner/penstock/blob/main) if that is set.
- A code host nests lists by two spaces, and lets them follow a paragraph at once. Python's Markdown wants four spaces,
  and an empty line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import PurePosixPath
from typing import Any

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s#:]+)(#[^()\s]*)?\)")
ITEM = re.compile(r"([-*]|\d+\.) ")
FENCE = re.compile(r"( *)(```+|~~~+)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """MkDocs calls this with the text of each page."""
    return prepare(markdown, PurePosixPath(page.file.src_uri), os.environ.get("PENSTOCK_SOURCE_URL", ""))


def prepare(markdown: str, path: PurePosixPath, source_url: str = "") -> str:
    """Returns a page's text as MkDocs reads it. `path` is the page's own, from docs/."""

    def link(found: re.Match[str]) -> str:
        target = outside(path, found[3])
        if target is None or found[1]:
            return found[0]
        return f"[{found[2]}]({source_url.rstrip('/')}/{target})" if source_url else found[2]

    runs = groupby(indented(markdown.splitlines()), key=lambda line: line[1])  # a link's text may go over two lines
    texts = ((prose, "\n".join(line for line, _ in run)) for prose, run in runs)
    return "\n".join(LINK.sub(link, text) if prose else text for prose, text in texts) + "\n"


def outside(page: PurePosixPath, link: str) -> str | None:
    """Returns where a link leads, from the top of the repository, if that is outside of docs/; else None."""
    parts: list[str] = ["docs", *page.parent.parts]
    for part in link.split("/"):
        if part == "..":
            parts.pop()
        elif part not in (".", ""):
            parts.append(part)
    return None if parts[:1] == ["docs"] else "/".join(parts)


def indented(lines: list[str]) -> Iterator[tuple[str, bool]]:
    """Yields each line with twice its indent, and whether it is prose. Fenced blocks move as a whole."""
    fence, shift, paragraph = "", 0, False  # paragraph: what follows the last empty line began as one
    for before, line in pairwise(["", *lines]):
        found, item = FENCE.match(line), ITEM.match(line.lstrip())
        if not fence and paragraph and item:
            yield "", True
        paragraph = not item and (paragraph or not before)
        if fence:
            yield " " * shift + line if line else line, False
            if found and line.strip() == fence:
                fence = ""
        elif found:
            fence, shift = found[2], len(found[1])
            yield " " * shift + line, False
        else:
            yield " " * (len(line) - len(line.lstrip(" "))) + line, True

"""Prints a streamed answer to a terminal, with its Markdown rendered."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.cli.terminal import print_piece, without_echo
from penstock.system.printing import stripped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.markdown import Markdown

FENCES = ("```", "~~~")


def print_answer(pieces: Iterable[str]) -> None:
    """Prints pieces of text as they arrive: rendered on a terminal, else unchanged."""
    if sys.stdout.isatty():
        return _print_rendered(pieces)
    for piece in pieces:
        print_piece(piece)
    print(flush=True)


def _print_rendered(pieces: Iterable[str]) -> None:
    """Renders the current block again with each piece, until the next one begins."""
    from rich.console import Console
    from rich.live import Live

    console, text = Console(highlight=False), ""
    drawn = Live(console=console, transient=True, auto_refresh=False, vertical_overflow="crop")
    with without_echo(), drawn as live:
        try:
            for piece in pieces:
                done, text = split_blocks(text + stripped(piece))
                for block in done:
                    _print(console, block)
                live.update(_rendered(text), refresh=True)
        finally:
            live.update("")
            _print(console, text)


def split_blocks(text: str) -> tuple[list[str], str]:
    """Splits a Markdown text into complete blocks and the rest. A blank line ends a block, except within fenced code or
    a list.
    """
    done: list[str] = []
    begun: list[str] = []
    fence = ""
    lines = text.splitlines(keepends=True)
    for at, line in enumerate(lines):
        begun.append(line)
        mark = line.strip()[:3]
        if mark in FENCES and fence in ("", mark):
            fence = "" if fence else mark
        following = lines[at + 1] if at + 1 < len(lines) else ""
        if not fence and not line.strip() and line.endswith("\n") and following.strip() and not _goes_on(following):
            done.append("".join(begun))
            begun = []
    return done, "".join(begun)


def _goes_on(line: str) -> bool:
    return line[0] in " \t-*+" or line.lstrip()[:1].isdigit()


def _rendered(text: str) -> Markdown:
    from rich.markdown import Markdown

    return Markdown(text, code_theme="ansi_dark")


def _print(console: Console, block: str) -> None:
    if block.strip():
        console.print(_rendered(block))

"""Prints to the terminal. stdout is for answers; everything else goes to stderr."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.system.printing import escaped, escaped_json, print_to_stderr, stripped

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table

    from penstock.llm.outputs import RequestOutput
    from penstock.store import Advisor

IN_PIPES = 10_000  # columns
MIN_WIDTH = 50  # characters per line, even in a narrower terminal
LINES = 24  # Rich ignores the width of a dumb terminal without lines


def note(text: str) -> None:
    print_to_stderr(text)


def note_ending(output: RequestOutput) -> None:
    count = len(output.tokens)
    if output.outputs[0].stop_reason == "repetition":
        note(
            f"(the answer repeated itself and was ended after {count} tokens; "
            "--temperature 0.7 avoids it, --no-loop-guard disables this)"
        )
    elif output.finish_reason == "length":
        note(f"(the answer was cut off after {count} tokens)")


def print_json(value: Any) -> None:
    print(escaped_json(json.dumps(value, ensure_ascii=False)))


def line_width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else IN_PIPES


def print_table(table: Table) -> None:
    from rich.console import Console

    for column in table.columns:
        column._cells = [escaped(str(cell)) for cell in column.cells]
    Console(file=sys.stdout, highlight=False, markup=False, width=line_width(), height=LINES).print(table)


def print_piece(piece: str) -> None:
    """Prints a piece of an answer to stdout: on a terminal without control characters, else unchanged."""
    sys.stdout.write(stripped(piece) if sys.stdout.isatty() else piece)
    sys.stdout.flush()


def print_filled(text: str, first: str = "", after: int | None = None) -> None:
    """Wraps a text without breaking words, which may be paths. The first line begins with `first`, the others with
    `after` blanks, by default its length.
    """
    from textwrap import TextWrapper

    indent = " " * (len(first) if after is None else after)
    wrapper = TextWrapper(max(line_width(), MIN_WIDTH), first, indent, break_long_words=False, break_on_hyphens=False)
    print(wrapper.fill(escaped(text)))


def readable_size(size: float) -> str:
    """Formats a number of bytes in a suitable unit, such as "98.4 MB"."""
    if size < 1000:
        return f"{size:.0f} B"
    power = min(int(log10(size)) // 3, 4)
    return f"{size / 1000**power:.3g} {' kMGT'[power]}B"


def progress_bar(*columns: ProgressColumn) -> Progress:
    """Returns a bar on stderr, with these columns behind it; it is disabled outside of terminals."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    description = TextColumn("{task.description}", markup=False)
    return Progress(
        description, BarColumn(), *columns, console=console, transient=True, disable=not console.is_terminal
    )


class DownloadBar:
    """Shows the progress of a download on stderr: a bar on a terminal, else a line per stage."""

    def __init__(self) -> None:
        self.what = ""
        self._bar: Progress | None = None

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if self._bar is None:
            self._bar = self._start()
        if what != self.what and self._bar.disable:
            note(what)
        self.what = what
        self._bar.update(self._bar.task_ids[0], description=what, completed=done, total=total)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _start(self) -> Progress:
        from rich.progress import DownloadColumn, TimeRemainingColumn

        bar = progress_bar(DownloadColumn(), TimeRemainingColumn())
        bar.add_task("", total=None)
        bar.start()
        return bar


@contextmanager
def without_echo() -> Iterator[None]:
    """Disables the terminal's echo, so that typed text does not disturb the drawing. The next reader still
    receives it.
    """
    if sys.platform == "win32" or sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    import termios

    terminal = sys.stdin.fileno()
    shown = termios.tcgetattr(terminal)
    hidden = [*shown[:3], shown[3] & ~termios.ECHO, *shown[4:]]
    termios.tcsetattr(terminal, termios.TCSANOW, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, shown)


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Shows a progress bar on stderr, if that is a terminal. Yields a function that counts one more of `total`."""
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    with progress_bar(MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def obtain(ref: str, advisor: Advisor | None = None) -> Path:
    """Returns a model's local path, downloading it first if needed. `advisor` plans which files fit."""
    from penstock.store import fetch, size_of

    bar = DownloadBar()
    try:
        path = fetch(ref, progress=bar, advisor=advisor)
    finally:
        bar.stop()
    if bar.what:
        note(f"fetched {ref} ({readable_size(size_of(path))}) to {path}")
    return path

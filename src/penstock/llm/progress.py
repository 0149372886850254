"""Shows how many prompts of a call are done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ShowProgress = bool | Callable[..., Any]  # a callable makes a bar as tqdm does


@contextmanager
def progress_bar(wanted: ShowProgress, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that counts so many more prompts as done, and shows the count on stderr: where it was not
    turned off and, unless the caller brings the bar, stderr is a terminal."""
    if not wanted or not total:
        yield lambda _: None
        return
    given: dict[str, Any] = {"total": total, "desc": "Processed prompts", "dynamic_ncols": True}
    if callable(wanted):
        bar = wanted(**given)
    else:
        from tqdm import tqdm  # type: ignore[import-untyped]  # comes with huggingface-hub

        bar = tqdm(**given, disable=None)
    with bar:
        yield bar.update

"""Shows the number of completed prompts of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ShowProgress = bool | Callable[..., Any]  # a callable makes a bar like tqdm


@contextmanager
def progress_bar(wanted: ShowProgress, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that adds completed prompts, and shows the count on stderr, unless it is turned off or stderr
    is not a terminal. A callable `wanted` makes the bar itself.
    """
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

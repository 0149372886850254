"""Reports the progress of a download."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int | None], None]
"""Takes the current action, the bytes done and the total (None: unknown); may be called from another thread."""


def silent(what: str, done: int, total: int | None) -> None:
    """Reports nothing."""


@contextmanager
def watching(done: Callable[[], int], what: str, total: int | None, progress: Progress) -> Iterator[None]:
    """Reports progress while another program downloads. pip and the hub's client have no stable way to report it, but
    both write to files, whose bytes `done` counts.
    """
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(0.1):
            progress(what, done(), total)

    progress(what, 0, total)
    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

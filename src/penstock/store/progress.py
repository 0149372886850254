"""How far a fetch has come, told to whoever asked for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, bytes done and bytes in all (None: not known), at times from another thread."""


def silent(what: str, done: int, total: int | None) -> None:
    pass


@contextmanager
def watching(done: Callable[[], int], what: str, total: int | None, progress: Progress) -> Iterator[None]:
    """Reports the bytes done while another program does them: neither pip nor the hub's client tells how far it is in
    a way that all their versions share, but both fill files."""
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

"""Reads files in a thread of its own while steps run: adapters, and weights that take the place of others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from penstock.errors import PenstockError

T = TypeVar("T")


class Reading(Generic[T]):
    """Waits for work in a thread; `result` returns its result. Errors other than PenstockError become a `failure`."""

    def __init__(self, work: Callable[[], T], failure: type[PenstockError]) -> None:
        self._work = work
        self._failure = failure
        self.begun = False
        self._done = threading.Event()
        self._result: T | None = None
        self._error: PenstockError | None = None

    @property
    def ready(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float) -> None:
        self._done.wait(seconds)

    def run(self) -> None:
        self.begun = True
        try:
            self._result = self._work()
        except PenstockError as error:
            self._error = error
        except Exception as error:  # work that nobody finishes would keep requests waiting for ever
            self._error = self._failure(f"the files could not be read: {type(error).__name__}: {error}")
        self._done.set()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class Reader:
    """Reads in a thread with this name, which starts with the first thing to read."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Reading[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def read(self, reading: Reading[Any]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(reading)

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (reading := self._queue.get()) is not None:
            reading.run()

"""Writes files of packed weights in a thread, while nothing is computed."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Generator
from math import inf

from penstock.backend.cpu.packed_file import PackedFile

QUIET_SECONDS = 0.05  # without a step before anything is written: between two tokens nothing is
LAST_SECONDS = 0.5  # at the end, so that a command with one answer leaves its file too
NICENESS = 10  # engines of other models go first


class WriteBehind:
    """Writes files in turn once a first step has been computed, so that no first token waits for them."""

    def __init__(self) -> None:
        self._unwritten: deque[Generator[None, None, None]] = deque()  # the first of them has been begun, maybe
        self._resumes = inf  # when there will have been no step for QUIET_SECONDS
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def __bool__(self) -> bool:
        return bool(self._unwritten)

    def add(self, file: PackedFile) -> None:
        """Adds a file to be written, with its weights as they are now. Called before the first step."""
        self._unwritten.append(file.write())

    def pause(self) -> None:
        self._resumes = inf

    def resume(self) -> None:
        self._resumes = time.monotonic() + QUIET_SECONDS
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="penstock-write-behind", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Writes the rest if that is quick, and gives up the files that it is not enough for."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
            ends = time.monotonic() + LAST_SECONDS
            while self._unwritten and time.monotonic() < ends:
                self._write_piece()
        for pieces in self._unwritten:
            pieces.close()

    def _write(self) -> None:
        if sys.platform == "linux":  # where threads have priorities of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while self._unwritten and self._waited_for_quiet():
            self._write_piece()

    def _waited_for_quiet(self) -> bool:
        """Waits until no step has been computed for a while; returns False if the end comes first."""
        while not self._ending.is_set() and (left := self._resumes - time.monotonic()) > 0:
            self._ending.wait(min(left, QUIET_SECONDS))
        return not self._ending.is_set()

    def _write_piece(self) -> None:
        try:
            next(self._unwritten[0])
        except (StopIteration, BlockingIOError, FileExistsError):  # written, by this process or another
            self._unwritten.popleft()
        except OSError as error:
            import logging  # takes longer than packing most models

            logging.getLogger(__name__).info("packed weights are not cached: %s", error)
            self._unwritten.popleft()

"""Renders templates in a process of its own, which is killed when a template takes too much, and started again."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from penstock.errors import ContextTooLong, InvalidRequest
from penstock.templates import render_worker as child
from penstock.templates.limits import CPU_SECONDS, WALL_SECONDS

COMMAND = (sys.executable, "-m", child.__name__)
ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "SYSTEMROOT")
TIMED_OUT = -27  # the exit code after SIGPROF
ATTEMPTS = 2  # if something other than the template may have ended the process
LOOK_SECONDS = 1.0  # between two looks at a child that has not answered
THREADS = 4  # in which callers wait: what they do beside waiting, such as encoding, overlaps


class RenderProcess:
    """Renders templates one after the other, in a child that is started when it is first needed. `threads` is where
    callers on an event loop can wait for it: those of one process do not hold up those of another."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(THREADS, "penstock-render")
        self._lock = Lock()
        self._children: list[_Child] = []  # at most one; whoever comes next may have it when this is gone
        weakref.finalize(self, _hand_on, self._children).atexit = False

    def warm_up(self) -> None:
        """Starts the child, so that the first chat does not wait for its imports."""
        with self._lock:
            self._started()

    def render(self, source: str, given: Mapping[str, Any]) -> str:
        """Returns what the template writes; raises InvalidRequest if it fails or takes too much."""
        message = pickle.dumps((source, given), pickle.HIGHEST_PROTOCOL)
        with self._lock:
            for _ in range(ATTEMPTS):
                try:
                    return _text(*self._started().ask(message))
                except _Ended as ending:
                    self._children.clear()
                    if ending.too_slow:
                        raise _refusal(f"it takes longer than {CPU_SECONDS:g} seconds, the limit") from None
        raise _refusal("it ended the process that rendered it")

    def _started(self) -> _Child:
        if not self._children:
            try:
                self._children.append(_spare.pop())
            except IndexError:
                self._children.append(_Child())
        return self._children[0]


class IsolatedTemplate:
    """Renders one template in a process of its own."""

    def __init__(self, source: str, process: RenderProcess) -> None:
        self._source = source
        self._process = process

    def render(self, given: Mapping[str, Any]) -> str:
        return self._process.render(self._source, given)


class _Ended(Exception):
    """Says that the child has ended, or had to be killed."""

    def __init__(self, *, too_slow: bool) -> None:
        self.too_slow = too_slow


class _Child:
    """Represents a running child. It ends with this object, or with this process: both close its standard input."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair()
        self._link.settimeout(WALL_SECONDS)
        kept = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        with theirs:
            self._process = _start(theirs, kept)
        self._end = weakref.finalize(self, _end, self._process, self._link)

    def ask(self, message: bytes) -> tuple[int, bytearray]:
        """Returns the answer to a message; raises _Ended if there is none."""
        answer, too_slow = None, False
        with suppress(OSError):
            child.send(self._link, child.REQUEST, message)
            try:
                self._wait()
                answer = child.receive(self._link)
            except TimeoutError:
                too_slow = True
        if answer is not None:
            return answer
        if not too_slow:
            too_slow = _exit_code(self._process) == TIMED_OUT
        self._end()
        raise _Ended(too_slow=too_slow)

    def _wait(self) -> None:
        """Returns when the answer begins to come. Raises TimeoutError after WALL_SECONDS, and OSError as soon as the
        child stands still: that is not the template's doing."""
        deadline, time_before = time.monotonic() + WALL_SECONDS, None
        self._link.settimeout(LOOK_SECONDS)
        while True:
            try:
                self._link.recv(1, socket.MSG_PEEK)
            except TimeoutError:
                processor_time = _idle_time(self._process.pid)
                if time.monotonic() > deadline:
                    raise
                if processor_time is not None and processor_time == time_before:
                    raise OSError("the child stands still") from None
                time_before = processor_time
            else:
                return self._link.settimeout(WALL_SECONDS)


def _idle_time(pid: int) -> int | None:
    """Returns the processor time of a process that is stopped or waits for something, in ticks; None if it computes, or
    if this system has no such files."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12]) if fields[0] in "ST" else None


def _start(link: socket.socket, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a child whose standard input is the socket. Windows has pipes only there: one that describes it."""
    if sys.platform == "win32":
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(link.share(process.pid))
        return process
    return subprocess.Popen(
        COMMAND, stdin=link.fileno(), stdout=subprocess.DEVNULL, env=environment, start_new_session=True
    )


_spare: deque[_Child] = deque(maxlen=1)  # a child that nobody uses: models come and go faster than it would start


def _hand_on(children: list[_Child]) -> None:
    _spare.extend(children)


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        return None


def _end(process: subprocess.Popen[bytes], link: socket.socket) -> None:
    link.close()
    process.kill()
    process.wait()


def _text(kind: int, body: bytearray) -> str:
    text = body.decode("utf-8", "surrogatepass")
    match kind:
        case child.TEXT:
            return text
        case child.TOO_LONG:
            raise ContextTooLong(text, param="messages")
        case child.WRONG_TEMPLATE:
            raise InvalidRequest(text)
    raise InvalidRequest(text, param="messages")


def _refusal(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the model's chat template was stopped on these messages: {reason}", param="messages")

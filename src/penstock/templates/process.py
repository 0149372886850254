"""Renders templates in a separate process, which is killed and restarted if a template exceeds its limits."""

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
from penstock.templates import CPU_SECONDS, WALL_SECONDS
from penstock.templates import render_worker as child

COMMAND = (sys.executable, "-m", child.__name__)
ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "SYSTEMROOT")
TIMED_OUT = -27  # the exit code after SIGPROF
ATTEMPTS = 2  # retries if the process may have ended for another reason
LOOK_SECONDS = 1.0  # poll interval of a child that has not answered
THREADS = 4  # callers wait in them, and overlap other work such as encoding


class RenderProcess:
    """Renders templates one after the other, in a child that is started on demand. Callers on an event loop wait in
    `threads`, so that callers of other processes are not blocked.
    """

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(THREADS, "penstock-render")
        self._lock = Lock()
        self._children: list[_Child] = []  # at most one; shared with the next owner after this object's end
        weakref.finalize(self, _hand_on, self._children).atexit = False

    def warm_up(self) -> None:
        """Starts the child early, so that the first chat does not wait for its imports."""
        with self._lock:
            self._started()

    def render(self, source: str, given: Mapping[str, Any]) -> str:
        """Renders a template; raises InvalidRequest if it fails or exceeds its limits."""
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
    """Renders one template in a separate process."""

    def __init__(self, source: str, process: RenderProcess) -> None:
        self._source = source
        self._process = process

    def render(self, given: Mapping[str, Any]) -> str:
        return self._process.render(self._source, given)


class _Ended(Exception):
    """Signals that the child has ended or had to be killed."""

    def __init__(self, *, too_slow: bool) -> None:
        self.too_slow = too_slow


class _Child:
    """Represents a running child. It ends with this object or this process, since both close its standard input."""

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
        """Waits until the answer begins. Raises TimeoutError after WALL_SECONDS, or OSError as soon as the child is
        stopped, which is not the template's fault.
        """
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
    """Returns the processor time in ticks of a stopped or waiting process; None if it is computing, or if the system
    lacks the information.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12]) if fields[0] in "ST" else None


def _start(link: socket.socket, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a child with the socket as standard input. Windows only supports pipes there, so the socket is passed
    through one.
    """
    if sys.platform == "win32":
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(link.share(process.pid))
        return process
    return subprocess.Popen(
        COMMAND, stdin=link.fileno(), stdout=subprocess.DEVNULL, env=environment, start_new_session=True
    )


_spare: deque[_Child] = deque(maxlen=1)  # an unused child for the next model


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

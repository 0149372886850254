"""Runs in the process that renders templates: reads chats from its standard input, a socket, and returns their texts.

The operating system enforces the limits, so templates cannot evade them: an allocation beyond the limit fails, and a
rendering beyond its processor time ends the process (SIGPROF).
"""

from __future__ import annotations

import pickle
import signal
import socket
import struct
import sys
from contextlib import suppress
from functools import lru_cache
from typing import Any

from penstock.errors import ContextTooLong, InvalidRequest
from penstock.templates import CPU_SECONDS, MEMORY
from penstock.templates.template import Template

HEADER = struct.Struct("<BI")  # message type and the size of its data
REQUEST, TEXT, REFUSED, TOO_LONG, WRONG_TEMPLATE = range(5)
GRACE = 0.5  # seconds after the sandbox's own limit, whose error is more specific
MAX_COMPILED = 32


def main() -> None:
    _limit_memory()
    with _standard_input() as link:
        while (request := receive(link)) is not None:
            _limit_time(CPU_SECONDS + GRACE)
            kind, text = _render(*pickle.loads(request[1]))
            _limit_time(0)
            send(link, kind, text.encode("utf-8", "surrogatepass"))


def _standard_input() -> socket.socket:
    if sys.platform == "win32":
        return socket.fromshare(sys.stdin.buffer.read())
    return socket.socket(fileno=0)


def _limit_memory() -> None:
    """Limits this process's memory and file sizes where the system supports that. On Windows, the sandbox's own limits
    apply, and the parent kills a process that takes too long.
    """
    try:
        import resource
    except ImportError:
        return
    with suppress(OSError, ValueError):  # macOS refuses a limit below its own mappings
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _limit_time(seconds: float) -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _render(source: str, given: dict[str, Any]) -> tuple[int, str]:
    try:
        return TEXT, _compiled(source).render(given)
    except ContextTooLong as error:
        return TOO_LONG, error.message
    except InvalidRequest as error:
        return WRONG_TEMPLATE if error.param is None else REFUSED, error.message


_compiled = lru_cache(maxsize=MAX_COMPILED)(Template)


def send(link: socket.socket, kind: int, body: bytes) -> None:
    link.sendall(HEADER.pack(kind, len(body)) + body)


def receive(link: socket.socket) -> tuple[int, bytearray] | None:
    """Returns the next message; None at the end."""
    header = _read(link, HEADER.size)
    if header is None:
        return None
    kind, size = HEADER.unpack(header)
    body = _read(link, size)
    return None if body is None else (kind, body)


def _read(link: socket.socket, size: int) -> bytearray | None:
    """Reads `size` bytes; None if the other side ends before."""
    read, whole = 0, bytearray(size)
    while read < size:
        count = link.recv_into(memoryview(whole)[read:])
        if not count:
            return None
        read += count
    return whole


if __name__ == "__main__":
    main()

"""Runs in the process that renders templates: reads chats from its standard input, a socket, and writes their texts.

The limits are the operating system's, so nothing that a template calls can get around them: an allocation beyond the
limit fails, and a rendering beyond its processor time ends the process (SIGPROF).
"""

from __future__ import annotations

import pickle
import resource
import signal
import socket
import struct
from functools import lru_cache
from typing import Any

from penstock.errors import ContextTooLong, InvalidRequest
from penstock.templates.limits import CPU_SECONDS, MEMORY
from penstock.templates.template import Template

HEADER = struct.Struct("<BI")  # of a message in either direction: what it is, and how many bytes follow
REQUEST, TEXT, REFUSED, TOO_LONG, WRONG_TEMPLATE = range(5)
GRACE = 0.5  # seconds beyond the limit that the sandbox keeps, whose error says more
MAX_COMPILED = 32


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with socket.socket(fileno=0) as link:
        while (request := receive(link)) is not None:
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS + GRACE)
            kind, text = _render(*pickle.loads(request[1]))
            signal.setitimer(signal.ITIMER_PROF, 0)
            send(link, kind, text.encode("utf-8", "surrogatepass"))


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
    """Returns so many bytes, or None if the other side ends before."""
    read, whole = 0, bytearray(size)
    while read < size:
        count = link.recv_into(memoryview(whole)[read:])
        if not count:
            return None
        read += count
    return whole


if __name__ == "__main__":
    main()

"""Keeps the server below the system's limit on open files: beyond it, no connection could be accepted."""

from __future__ import annotations

import asyncio
import errno
import logging
from contextlib import suppress
from time import monotonic
from typing import Any

try:
    import resource
except ImportError:  # Windows limits no such thing
    resource = None  # type: ignore[assignment]

MOST = 2**16  # the limit is raised to this, where the system allows it
RESERVED = 128  # files other than connections: models, uploads, engines, the log
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SECONDS_BETWEEN_WARNINGS = 60.0

log = logging.getLogger(__name__)


def raise_limit() -> int:
    """Raises this process's limit on open files to what the system allows, and returns how many connections leave room
    for other files."""
    if resource is None:
        return MOST - RESERVED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # some systems have a lower limit of their own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    limit = MOST if soft == resource.RLIM_INFINITY else soft
    return limit - min(RESERVED, limit // 2)


class FullTable:
    """Handles what goes wrong on an event loop: that no file can be opened is one warning a minute, not a traceback
    for each connection that cannot be accepted."""

    def __init__(self) -> None:
        self._quiet_until = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in FULL:
            return loop.default_exception_handler(context)
        if monotonic() >= self._quiet_until:
            self._quiet_until = monotonic() + SECONDS_BETWEEN_WARNINGS
            log.warning("connections cannot be accepted now: %s; raise the limit on open files (ulimit -n)", error)

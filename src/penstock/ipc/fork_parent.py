"""Prepares the process that forks a server's engines, which imports this (see launchers.py). It ends with the server,
also if it is stopped then, and not by a SIGTERM that a service manager sends to every process: its engines would be
lost."""

from __future__ import annotations

import ctypes
import signal
from contextlib import suppress

PR_SET_PDEATHSIG = 1

with suppress(AttributeError, OSError):  # only Linux has it
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)

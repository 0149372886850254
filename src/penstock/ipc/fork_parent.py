"""Is imported by the process that forks a server's engines (see launchers.py). That ends with the server, not by a
SIGTERM that a service manager sends to every process: its engines would be lost."""

from __future__ import annotations

import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)

"""The `penstock` command. Each subcommand imports what it needs when it runs, so that `--help` is fast."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Runs the command line of this process. It imports the rest of the command, so that Ctrl-C meanwhile is no error
    either."""
    _open_closed_streams()
    try:
        from penstock.cli.app import app
    except KeyboardInterrupt:
        sys.exit(130)  # as app does
    app()


def _open_closed_streams() -> None:
    """Opens the null device in place of each standard stream that is closed, as a daemon's may be. Without it, the next
    socket or file takes the stream's number, and what other processes print goes there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode))

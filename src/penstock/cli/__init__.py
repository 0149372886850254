"""Holds the `penstock` command. Each subcommand imports its dependencies when it runs, so `--help` is fast."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Runs the command line of this process. Imports the rest late, so that Ctrl-C during the import exits cleanly."""
    _open_closed_streams()
    try:
        from penstock.cli.app import app
    except KeyboardInterrupt:
        sys.exit(130)  # the same as in app
    app()


def _open_closed_streams() -> None:
    """Replaces closed standard streams, as a daemon may have, by the null device. Otherwise the next socket or file
    would take the stream's number and receive other processes' output.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode))

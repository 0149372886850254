"""The `penstock` command. Each command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

from penstock.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    app()

"""The `penstock` command. Each subcommand imports what it needs when it runs, so that `--help` is fast."""

from __future__ import annotations

from penstock.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    app()

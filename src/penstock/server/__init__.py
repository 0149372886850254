"""Serves HTTP: turns requests of several dialects into token requests, and events into their answers."""

from __future__ import annotations

from penstock.server.app import Setup, create_app, serve
from penstock.server.batch.archive import Space

__all__ = ["Setup", "Space", "create_app", "serve"]

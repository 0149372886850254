"""HTTP: requests in the dialects clients speak become token requests, and events become their answers."""

from __future__ import annotations

from penstock.server.app import create_app, serve
from penstock.server.archive import Space

__all__ = ["Space", "create_app", "serve"]

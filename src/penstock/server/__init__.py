"""HTTP: requests in the dialects clients speak become token requests, and events become their answers."""

from __future__ import annotations

from penstock.server.app import Setup, create_app, serve
from penstock.server.batch.archive import Space

__all__ = ["Setup", "Space", "create_app", "serve"]

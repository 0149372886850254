"""HTTP: requests in the dialects clients speak become token requests, and events become their answers."""

from __future__ import annotations

from penstock.server.app import create_app, serve

__all__ = ["create_app", "serve"]

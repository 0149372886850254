"""Declares the dialect: one route, whose code is imported at its first request."""

from __future__ import annotations

from penstock.server.http.endpoint import Dialect, RouteEntry

DIALECT = Dialect(
    "ask",
    __package__,
    (RouteEntry("POST", "/ask", ".endpoints:ask", ".endpoints:ASK"),),
    title="Ask",
)

"""Finds the dialects: each folder here is one, and other packages add theirs as entry points in `penstock.dialects`.

A folder's `__init__.py` declares its `DIALECT`, and imports nothing heavy for that. No dialect imports another.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from penstock.plugins import plugins
from penstock.server.http.endpoint import Dialect

BUSIEST = ("openai", "anthropic", "responses", "ollama")  # their routes are tried first


@cache
def dialects() -> tuple[Dialect, ...]:
    """Returns all dialects, in the order in which their routes are tried."""
    names = sorted((module.name for module in iter_modules(__path__) if module.ispkg), key=_place)
    own = [import_module(f"{__name__}.{name}").DIALECT for name in names]
    return (*own, *(plugin.load(Dialect) for plugin in plugins("penstock.dialects")))


def _place(name: str) -> tuple[int, str]:
    return BUSIEST.index(name) if name in BUSIEST else len(BUSIEST), name


def load_busiest() -> None:
    """Imports the dialect that most servers are asked in, so that its first request does not wait for it."""
    for dialect in dialects():
        if dialect.name == BUSIEST[0]:
            dialect.load()

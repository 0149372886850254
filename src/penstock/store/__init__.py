"""Where models come from and where they lie: fetch, find, list, remove."""

from __future__ import annotations

from penstock.store.places import Entry, home, sha256_of, size_of
from penstock.store.progress import Progress
from penstock.store.refs import ALIASES, DEFAULT
from penstock.store.store import entries, fetch, find, remove

__all__ = [
    "ALIASES",
    "DEFAULT",
    "Entry",
    "Progress",
    "entries",
    "fetch",
    "find",
    "home",
    "remove",
    "sha256_of",
    "size_of",
]

"""Where models come from and where they lie: fetch, find, list, remove, and make of others."""

from __future__ import annotations

from penstock.store.blobs import Upload, blob_path
from penstock.store.derived import Made, all_made, check_name, forget_unused_blobs, made_called, make, unmake
from penstock.store.places import Entry, home, sha256_of, size_of
from penstock.store.progress import Progress
from penstock.store.refs import ALIASES, DEFAULT
from penstock.store.store import entries, fetch, find, find_made, made_entry, made_path, remove

__all__ = [
    "ALIASES",
    "DEFAULT",
    "Entry",
    "Made",
    "Progress",
    "Upload",
    "all_made",
    "blob_path",
    "check_name",
    "entries",
    "fetch",
    "find",
    "find_made",
    "forget_unused_blobs",
    "home",
    "made_called",
    "made_entry",
    "made_path",
    "make",
    "remove",
    "sha256_of",
    "size_of",
    "unmake",
]

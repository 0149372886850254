"""Finds the model of the server that a derived model is under another name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock import store
from penstock.server.models.entry import ModelEntry
from penstock.store import DerivedModel


def serves(name: str, path: Path | None, derived: DerivedModel) -> bool:
    """Returns whether a derived model is the model of this name and path under another name."""
    if derived.base and derived.base == name:
        return True
    return path is not None and store.derived_path(derived) == path


def base_of(entries: Iterable[ModelEntry], derived: DerivedModel) -> ModelEntry | None:
    """Returns which of the models a derived one is under another name; None: there is none."""
    return next((entry for entry in entries if serves(entry.name, entry.source.path, derived)), None)

"""Says where a model of the server comes from, and what loading it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config import AdapterOption
from penstock.ipc.client import EngineClient
from penstock.store import DerivedModel
from penstock.text import Text

Discover = Callable[[], "Sequence[ModelSource] | None"]
"""Returns all models that a server has now; None if they are the same as the last time."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Describes a model that can be loaded. Nothing is read before it is."""

    name: str
    make_client: Callable[[], EngineClient]  # makes a client whose engine is not started yet
    load_text: Callable[[], Text]
    path: Path | None = None  # the model's files, if known
    derived: DerivedModel | None = None  # whose settings it has
    expected_bytes: Callable[[], int] = lambda: 0  # estimate from its files
    adapters: tuple[AdapterOption, ...] = ()  # loaded when its engine starts
    fixed: bool = True  # the server has it to its end; else it may go while the server runs
    check: Callable[[], None] = lambda: None  # raises if the headers of its files are wrong

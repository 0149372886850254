"""Says where a model of the server comes from, and what loading it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.config import AdapterOption
from penstock.ipc.client import EngineClient
from penstock.store import DerivedModel
from penstock.text import Text


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Describes a model that can be loaded. Nothing is read before it is."""

    name: str
    make_client: Callable[[], EngineClient]  # of an engine that is not started yet
    load_text: Callable[[], Text]
    path: Path | None = None  # of the model's files, if known
    derived: DerivedModel | None = None  # whose settings it has
    bytes: int = 0  # that its weights and its KV cache are expected to take
    adapters: tuple[AdapterOption, ...] = ()  # that its engine has when it starts

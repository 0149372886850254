"""Represents one model of the server in whatever state it is."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.server.models.ledger import Loaded
from penstock.server.models.source import ModelSource
from penstock.server.served_model import ServedModel

FOR_EVER = float("inf")


class ModelState(StrEnum):
    STORED = "stored"  # only its files are there
    LOADING = "loading"
    AWAKE = "awake"
    ASLEEP = "asleep"  # it was told to give its memory back, and wakes when it is asked for
    UNLOADING = "unloading"


@dataclass(slots=True)
class ModelEntry:
    """Holds a model's state and who uses it. The pool alone changes it."""

    source: ModelSource
    state: ModelState = ModelState.STORED
    served: ServedModel | None = None  # while it is loaded
    error: str = ""  # why it could not be loaded the last time
    bytes: int = 0  # that it takes now
    users: int = 0  # requests that use it or wait for it
    last_used: float = field(default_factory=time.monotonic)
    expires: float = FOR_EVER  # when it is unloaded if nobody uses it, by the monotonic clock
    pinned: bool = False  # a request asked for it to stay for ever
    loading: asyncio.Task[ServedModel] | None = None
    variants: dict[str, ServedModel] = field(default_factory=dict)  # those derived from it, by digest, while loaded

    adapters: frozenset[str] = frozenset()  # names of those that it had when it was last loaded

    @property
    def name(self) -> str:
        return self.source.name

    def has_adapter(self, name: str) -> bool:
        """Returns whether a name means the model with one of its adapters: `adapter` or `model:adapter`."""
        if self.served is not None:
            return bool(self.served.adapters_named(name))
        return name in self.adapters or name.removeprefix(f"{self.name}:") in self.adapters

    @property
    def awake(self) -> ServedModel | None:
        """Returns the model, if requests can use it now."""
        return self.served if self.state is ModelState.AWAKE else None

    @property
    def busy(self) -> bool:
        """Returns whether it has something to do. An answer may outlive the request that asked for it."""
        if self.state in (ModelState.LOADING, ModelState.UNLOADING) or self.users:
            return True
        return self.served is not None and self.served.client.in_flight > 0

    def loaded(self) -> Loaded:
        """Returns what the ledger needs to know of it."""
        return Loaded(self.name, self.bytes, self.last_used, self.busy, self.pinned)

    def keep(self, seconds: float) -> None:
        """Says that it was used now, and how long it stays from now on if nobody uses it."""
        self.last_used = time.monotonic()
        self.expires = self.last_used + seconds

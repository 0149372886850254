"""Represents one model of the server, loaded or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.config import AdapterOption
from penstock.server.models.ledger import Loaded
from penstock.server.models.served_model import UNLISTED, ServedModel
from penstock.server.models.source import ModelSource
from penstock.types import AdapterInfo, AdapterUse, WeightState

FOR_EVER = float("inf")


class ModelState(StrEnum):
    STORED = "stored"  # only its files are there
    LOADING = "loading"
    AWAKE = "awake"
    ASLEEP = "asleep"  # it has given its memory back, and wakes when it is asked for; its engine may stay
    UNLOADING = "unloading"


@dataclass(slots=True)
class ModelEntry:
    """Holds a model's state and its users. Only the pool changes it."""

    source: ModelSource
    state: ModelState = ModelState.STORED
    served: ServedModel | None = None  # while it is loaded
    error: str = ""  # why it could not be loaded the last time
    reserved: int = 0  # bytes that it takes, or will when it is loaded, without its adapters
    removed: bool = False  # its files are gone: so is it when it is unloaded
    host_bytes: int = 0  # pinned host memory that the weights of a sleeping model take, besides
    users: int = 0  # requests that use it or wait for it
    last_used: float = field(default_factory=time.monotonic)
    expires: float = FOR_EVER  # when it is unloaded if nobody uses it, by the monotonic clock
    pinned: bool = False  # a request asked for it to stay for ever
    loading: asyncio.Task[ServedModel] | None = None
    variants: dict[str, ServedModel] = field(default_factory=dict)  # those derived from it, by digest, while loaded
    kept_adapters: dict[str, AdapterOption] = field(init=False)  # restored at the next load
    kept_weights: WeightState = field(default_factory=WeightState)  # the same of weights, and of a pause
    adapter_scales: dict[str, float] = field(default_factory=dict)  # default adapters of requests

    def __post_init__(self) -> None:
        self.kept_adapters = {option.name: option for option in self.source.adapters}

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def bytes(self) -> int:
        """Returns the memory that it takes now: weights, KV cache and loaded adapters. While it sleeps, adapters do not
        count."""
        adapters = self.awake is not None and self.awake.client.stats.adapter_bytes
        return self.reserved + adapters

    @property
    def adapters(self) -> Mapping[str, AdapterInfo | AdapterOption]:
        """Returns the adapters that requests may name, by name, whether it is loaded or not."""
        return self.kept_adapters if self.served is None else self.served.client.adapters

    @property
    def listed_adapters(self) -> list[AdapterInfo | AdapterOption]:
        return [adapter for name, adapter in self.adapters.items() if not name.startswith(UNLISTED)]

    @property
    def default_adapters(self) -> tuple[AdapterUse, ...]:
        """Returns the adapters of requests that say nothing about adapters."""
        scales = self.adapter_scales.items()
        return tuple(AdapterUse(name, scale) for name, scale in scales if scale and name in self.adapters)

    def adapter_named(self, name: str) -> str:
        """Returns the adapter that a model's name stands for, as `adapter` or `model:adapter`; empty: for none."""
        for each in (name, name.removeprefix(f"{self.name}:")):
            for adapter in (each, each.removesuffix(":latest")):
                if adapter in self.adapters:
                    return adapter
        return ""

    @property
    def awake(self) -> ServedModel | None:
        return self.served if self.state is ModelState.AWAKE else None

    @property
    def engine_died(self) -> bool:
        """Returns whether it sleeps and its engine, which was to stay, has died."""
        return self.state is ModelState.ASLEEP and self.served is not None and self.served.client.hello is None

    @property
    def needed(self) -> int:
        """Returns the bytes that it takes once it is awake: its engine's figure, or an estimate."""
        hello = self.served.client.hello if self.served is not None else None
        return (hello.limits.memory if hello is not None else 0) or self.source.expected_bytes()

    @property
    def busy(self) -> bool:
        """Returns whether it has something to do. An answer may outlive the request that asked for it."""
        if self.state in (ModelState.LOADING, ModelState.UNLOADING) or self.users:
            return True
        return self.served is not None and self.served.client.in_flight > 0

    @property
    def busy_or_loaded(self) -> bool:
        """Returns whether it is loaded, or somebody waits for it to be."""
        return self.busy or self.served is not None

    def loaded(self) -> Loaded:
        return Loaded(self.name, self.bytes, self.last_used, self.busy, self.pinned)

    def keep(self, seconds: float) -> None:
        """Says that it was used now, and how long it stays from now on if nobody uses it."""
        self.last_used = time.monotonic()
        self.expires = self.last_used + seconds

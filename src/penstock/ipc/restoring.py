"""Keeps the adapters, the weights and the pause that engines got since their start, and brings a new engine to the same
state."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from penstock.errors import EngineUnavailable, PenstockError
from penstock.types import AdapterInfo, AdapterList, Event, Hello, WeightState
from penstock.types.messages import (
    Control,
    Pause,
    RegisterAdapter,
    Resume,
    Sleep,
    UnregisterAdapter,
    UpdateWeights,
    Wake,
)

log = logging.getLogger(__name__)


class EngineSettings:
    """The state of a client's engines, as far as control messages change it."""

    def __init__(self) -> None:
        self.adapters: dict[str, AdapterInfo] = {}
        self.forgotten: set[str] = set()  # adapters that were unregistered
        self.weights = WeightState()
        self.asleep = False

    def note(self, message: Control[Any], answer: Event) -> None:
        match message, answer:
            case RegisterAdapter(), AdapterList(_, (info,)):
                self.adapters[info.name] = info
                self.forgotten.discard(info.name)
            case UnregisterAdapter(name), _:
                self.adapters.pop(name, None)
                self.forgotten.add(name)
            case ((Sleep() | Wake()), _):
                self.asleep = isinstance(message, Sleep)
            case _, WeightState():
                self.weights = answer

    def missing(self, hello: Hello, weights: WeightState) -> EngineChanges:
        known = {(info.name, info.path, info.scale) for info in hello.adapters}
        missing = [each for each in self.adapters.values() if (each.name, each.path, each.scale) not in known]
        forgotten = [info.name for info in hello.adapters if info.name in self.forgotten]
        return EngineChanges(missing, forgotten, weights)


class EngineChanges(NamedTuple):
    """The changes that an engine still needs."""

    adapters: Sequence[AdapterInfo] = ()  # adapters to register
    forgotten: Sequence[str] = ()  # adapters to unregister
    weights: WeightState = WeightState()

    def __bool__(self) -> bool:
        return bool(self.adapters or self.forgotten or self.weights.updates or self.weights.paused)

    async def tell(self, ask: Callable[[Control[Any]], Awaitable[Event]]) -> None:
        """Sends the changes to an engine with `ask`. An adapter or weights that cannot be read any more are left out:
        requests for such an adapter fail, and answers name the weights that computed them. Raises EngineUnavailable if
        the engine has died meanwhile."""
        for name, path, scale, *_ in self.adapters:
            await _try(ask(RegisterAdapter(name, path, scale, replace=True)))
        for name in self.forgotten:
            await _try(ask(UnregisterAdapter(name)))
        weights = self.weights
        if weights.updates or weights.paused:
            await ask(Pause())
        if weights.updates:
            await _try(ask(UpdateWeights(weights.path, weights.version, number=weights.updates)))
        if weights.updates and not weights.paused:
            await ask(Resume())


async def _try(telling: Awaitable[object]) -> None:
    try:
        await telling
    except EngineUnavailable:
        raise
    except PenstockError as error:
        log.error("the engine that was started is not as the one before: %s", error)

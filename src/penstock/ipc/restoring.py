"""Brings an engine that has just started to the state of others: the adapters, the weights and the pause that these
were told of since they were started."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from penstock.errors import EngineUnavailable, PenstockError
from penstock.types import AdapterInfo, Event, WeightState
from penstock.types.messages import Control, Pause, RegisterAdapter, Resume, UnregisterAdapter, UpdateWeights

log = logging.getLogger(__name__)


class EngineChanges(NamedTuple):
    """Holds what an engine has to be told."""

    adapters: Sequence[AdapterInfo] = ()  # to register
    forgotten: Sequence[str] = ()  # adapters to unregister
    weights: WeightState = WeightState()

    def __bool__(self) -> bool:
        """Returns whether there is anything to tell."""
        return bool(self.adapters or self.forgotten or self.weights.updates or self.weights.paused)

    async def tell(self, ask: Callable[[Control[Any]], Awaitable[Event]]) -> None:
        """Tells an engine, which `ask` sends control messages to. What cannot be read any more is left out: requests
        for such an adapter fail, and answers tell which weights computed them. Raises EngineUnavailable if the engine
        has died meanwhile."""
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

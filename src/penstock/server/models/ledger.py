"""Decides which loaded models make room for others. It is pure: time and sizes come in as numbers.

A model's size is one number: its weights, its KV cache, its adapters and its engine's other memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Loaded(NamedTuple):
    """Describes a model that takes memory."""

    name: str
    bytes: int
    last_used: float
    busy: bool = False  # it answers requests, or is being loaded
    pinned: bool = False  # it was asked to stay for ever


class Budget(NamedTuple):
    """Says how much all loaded models may take together."""

    bytes: int
    models: int  # 0: any number


class Unload(NamedTuple):
    """Says that there is room once these models are unloaded; there may be none to unload."""

    names: tuple[str, ...]


class Wait(NamedTuple):
    """Asks to wait until one of these models is idle."""

    names: tuple[str, ...]


class Refuse(NamedTuple):
    """Says that there will be no room, and why."""

    reason: str


Decision = Unload | Wait | Refuse


def make_room(name: str, needed: int, loaded: Sequence[Loaded], budget: Budget) -> Decision:
    """Returns how a model gets `needed` bytes: idle models are unloaded, the least recently used first; busy ones are
    waited for; pinned ones stay."""
    if needed > budget.bytes:
        return Refuse(f"{name} needs {_size(needed)} and all models together may take {_size(budget.bytes)}")
    pinned = [model for model in loaded if model.pinned]
    if not _fits(needed, pinned, budget):
        names = ", ".join(model.name for model in pinned)
        return Refuse(f"{name} needs {_size(needed)}, and models that stay loaded for ever leave too little: {names}")
    idle = sorted((model for model in loaded if not model.pinned and not model.busy), key=lambda each: each.last_used)
    for count in range(len(idle) + 1):
        leaving = idle[:count]
        if _fits(needed, [model for model in loaded if model not in leaving], budget):
            return Unload(tuple(model.name for model in leaving))
    return Wait(tuple(model.name for model in loaded if model.busy and not model.pinned))


def excess(loaded: Sequence[Loaded], budget: Budget) -> tuple[str, ...]:
    """Returns the idle models to unload because models have grown beyond the budget: those first that were not used for
    the longest time, and never the one that was used last."""
    over = sum(model.bytes for model in loaded) - budget.bytes
    leaving = []
    for model in sorted(loaded, key=lambda each: each.last_used)[:-1]:
        if over > 0 and not model.busy and not model.pinned:
            leaving.append(model.name)
            over -= model.bytes
    return tuple(leaving)


def _fits(needed: int, staying: Sequence[Loaded], budget: Budget) -> bool:
    few = not budget.models or len(staying) < budget.models
    return few and needed + sum(model.bytes for model in staying) <= budget.bytes


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB"

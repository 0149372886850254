"""Defines what requests and answers say about adapters (LoRA). `types` has all of it."""

from __future__ import annotations

from typing import NamedTuple


class AdapterUse(NamedTuple):
    """Names a registered adapter (LoRA) that a request is computed with, and what its update is multiplied by."""

    name: str
    scale: float = 1.0  # besides the scale that it was registered with


class AdapterInfo(NamedTuple):
    """Describes a registered adapter."""

    name: str
    path: str
    scale: float
    rank: int  # the highest of its matrices
    digest: str = ""  # of its contents; empty until it was loaded once
    loaded: bool = False  # it is in a slot of the backend now


class AdapterList(NamedTuple):
    """Answers a control message about adapters: the one that was registered, or all that are."""

    seq: int  # the message's id
    adapters: tuple[AdapterInfo, ...]


class AdapterRequests(NamedTuple):
    """Counts the requests that name an adapter and have not ended."""

    name: str
    running: int  # those whose adapter is in its slot
    waiting: int  # those that wait for a slot

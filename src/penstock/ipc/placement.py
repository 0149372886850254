"""Describes the placement of requests on several engines, and the state of each engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from penstock.types import Stats

RELAYED = 0  # stands for a request of which another server has a number of its own


class RequestPlacement(NamedTuple):
    """Says which of several engines was sent a request."""

    replica: str  # the engine's name
    why: str  # the decision in words
    costs: Mapping[str, float] = {}  # the parts of its cost, in milliseconds
    cached: int = 0  # tokens of the prompt that the engine is believed to hold
    resumed: bool = False  # another engine had the request before
    source: str = ""  # the engine whose blocks it reads; empty: none
    computing: str = ""  # the engine that computes the prompt for it; empty: it does that itself
    waited: float = 0.0  # seconds, until an engine had room
    decided: float = 0.0  # seconds that the decision took


class ScaleStatus(NamedTuple):
    """Says how many engines a fleet is to have, and why."""

    wanted: int
    least: int  # lower bound
    most: int  # upper bound; equal to `least`: no autoscaling
    reason: str = ""  # reason, if the number follows from the load


class FleetFigures(NamedTuple):
    """Describes several engines as one, as the client of all sees them."""

    waiting: int = 0  # requests that wait until an engine has room
    waited_seconds: float = 0.0  # total wait of all requests
    scale: ScaleStatus | None = None  # None: not known
    decisions: Mapping[str, Mapping[str, int]] = {}  # how often a fleet has decided what: pulls, splits, turns


class ReplicaFigures(NamedTuple):
    """Describes one of several engines as it is now, and counts what became of it and of its requests."""

    name: str
    state: str
    stats: Stats  # as it said last
    queued_tokens: int  # uncached prompt tokens that it owes: as it said, and of requests sent since
    kv_tokens: int  # tokens of the KV cache that its requests need, counted in the same way
    routed: int = 0  # requests that it was sent
    resumed: int = 0  # routed requests that another engine had before
    promised: int = 0  # tokens that it was believed to hold of their prompts, once it has answered
    told: int = 0  # tokens that it has reused of the same prompts
    restarts: int = 0  # engine processes after its first
    lost: int = 0  # connections that ended without a farewell
    deaths: Mapping[str, int] = {}  # deaths by kind: crashed or killed
    refused: Mapping[str, int] = {}  # attempts to join it that failed, by reason

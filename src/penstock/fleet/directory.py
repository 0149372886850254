"""Defines the directory of a fleet's replicas, and its source."""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import StrEnum
from typing import NamedTuple, Protocol


class ReplicaState(StrEnum):
    """The states of a replica."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # it gets nothing new, and answers what it has
    ENDED = "ended"


class ReplicaInfo(NamedTuple):
    """Describes a replica: one engine, restarted under the same name when it dies."""

    name: str  # such as smollm2-0
    address: str = ""  # where clients join its engine; empty while that starts
    pid: int = 0  # the engine process
    epoch: int = 0  # changes at each start of the engine
    state: ReplicaState = ReplicaState.STARTING
    host: str = ""  # the machine
    reason: str = ""  # why it has ended or cannot start


class Death(NamedTuple):
    """Tells how an engine died."""

    replica: str
    epoch: int
    crashed: bool  # False: it was killed from outside
    suspects: tuple[tuple[str, int], ...]  # whom it was working on: the client's name and the request's id


class Directory(NamedTuple):
    """Lists the replicas of a fleet."""

    version: int
    replicas: tuple[ReplicaInfo, ...]
    deaths: tuple[Death, ...] = ()  # the last few


class DirectorySource(Protocol):
    """Tells a gateway which replicas there are."""

    @property
    def secret(self) -> str:
        """Returns the secret with which gateways join engines."""

    async def start(self) -> Directory:
        """Returns the directory once a replica is ready; raises what keeps all of them from starting."""

    def changes(self) -> AsyncIterator[Directory]:
        """Yields the directory whenever it has changed."""

    async def close(self) -> None:
        """Ends the fleet, if this process has started it."""

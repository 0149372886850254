"""Starts keepers on this machine, or (ray_ground.py) on the machines of a Ray cluster."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Protocol

import msgspec

from penstock.fleet.forks import KEEPER, ForkRequest, fork, start_forking
from penstock.fleet.steward_wire import FleetSpec, KeeperSpec

LOCAL, RAY = "local", "ray"
ELSEWHERE = "192.0.2.1"  # stands for any other machine
LOOPBACK = "127.0.0.1"
Lost = Callable[[str, str], None]


class Ground(Protocol):
    """Starts keepers. They outlive the steward, and say who they are to the next one."""

    async def start(self, keeper: KeeperSpec) -> None:
        """Starts a keeper; raises what keeps it from starting."""

    async def forget(self, name: str) -> None:
        """Frees the resources of a replica that has ended."""

    async def close(self) -> None: ...


def steward_address(folder: str, ground: str) -> str:
    """Returns the address of the steward's socket, which every steward of the fleet has: a file of the fleet's folder,
    or a port of this machine where keepers are on others."""
    if ground == LOCAL:
        return f"ipc://{folder}/steward"
    with socket.socket() as free:
        free.bind(("", 0))
        return f"tcp://{own_address()}:{free.getsockname()[1]}"


def own_address(other: str = ELSEWHERE) -> str:
    """Returns the address of this machine by which another one can reach it. Nothing is sent there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 1))
        except OSError:
            return LOOPBACK  # without a network
        return str(probe.getsockname()[0])


def forks_of(folder: str, revision: int) -> str:
    """Returns the socket of the process that forks keepers and engines of a revision. Another revision may be another
    version of the program, so it has a process of its own."""
    return f"{folder}/forks.{revision}"


class LocalGround:
    """Starts keepers as processes of this machine. `lost` is called with a keeper's name and the reason when one ends
    that was started here."""

    def __init__(self, lost: Lost) -> None:
        self._lost = lost
        self._watching: dict[str, asyncio.Task[None]] = {}

    async def start(self, keeper: KeeperSpec) -> None:
        await asyncio.to_thread(start_forking, keeper.forks)
        child = await fork(keeper.forks, ForkRequest(KEEPER, msgspec.Raw(msgspec.json.encode(keeper))))

        async def watch() -> None:
            code = await child.wait()
            self._lost(keeper.name, f"its keeper {child.pid} ended with code {code}")

        self._watching[keeper.name] = asyncio.create_task(watch())

    async def forget(self, name: str) -> None:
        if task := self._watching.pop(name, None):
            task.cancel()

    async def close(self) -> None:
        for name in list(self._watching):
            await self.forget(name)


def make_ground(spec: FleetSpec, lost: Lost) -> Ground:
    if spec.ground == LOCAL:
        return LocalGround(lost)
    from penstock.fleet.ray_ground import RayGround

    return RayGround(spec)

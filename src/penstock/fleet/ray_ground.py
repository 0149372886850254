"""Starts keepers on the machines of a Ray cluster. Ray only chooses the machine and starts the keeper there.

Each replica has a placement group, and in it a detached actor that starts the keeper. The keeper and its engine are not
children of Ray's processes: they outlive those, and the keeper reports to the steward itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from penstock.backend.devices import device_kind, in_order
from penstock.config import AUTO, Config, available_memory
from penstock.errors import ConfigError, EngineUnavailable
from penstock.fleet.forks import KEEPER, ForkRequest, fork, start_forking
from penstock.fleet.ground import forks_of
from penstock.fleet.machine_share import cluster_threads, cpu_share, gpu_share
from penstock.fleet.steward_wire import FleetSpec, KeeperSpec

NAMESPACE = "penstock"
STARTED_HERE = "local"  # Ray's word for a cluster that is started on this machine, and ends with this process
CONNECT_SECONDS = 5.0
PLACE_SECONDS = 60.0  # limit for Ray to find room for a replica
START_SECONDS = 60.0  # limit for an actor to start a keeper
HEAD_SECONDS = "86400"  # without Ray's head, after which a driver gives up; Ray's own default is 60


class RayGround:
    """Starts keepers by actors. This process is the only one of the fleet that is a driver of Ray."""

    def __init__(self, spec: FleetSpec) -> None:
        self._spec = spec
        self._connecting = asyncio.Lock()
        self._ray: Any = None

    async def start(self, keeper: KeeperSpec) -> None:
        ray = await self._connected()
        await asyncio.to_thread(_place, ray, self._spec, keeper)

    async def forget(self, name: str) -> None:
        if self._ray is None and not self._spec.adopt:
            return  # nothing was placed
        ray = await self._connected()
        await asyncio.to_thread(_remove, ray, self._spec.name, name)

    async def close(self) -> None:
        if self._ray is not None:
            await asyncio.to_thread(self._ray.shutdown)

    async def _connected(self) -> Any:
        """Returns Ray once this process is its driver; raises what keeps it from being one."""
        async with self._connecting:
            if self._ray is None:
                self._ray = await asyncio.to_thread(_connect, self._spec.ray)
        return self._ray


class KeeperActor:
    """Starts a keeper on the machine where Ray has placed it, and stands for what the replica has of that machine."""

    def __init__(self) -> None:
        self._keeper: object = None

    def start(self, keeper: bytes) -> int:
        """Starts the keeper; returns its process id."""
        spec = on_this_machine(msgspec.json.decode(keeper, type=KeeperSpec))
        child = asyncio.run(fork(spec.forks, ForkRequest(KEEPER, msgspec.Raw(msgspec.json.encode(spec)))))
        return child.pid


def on_this_machine(spec: KeeperSpec) -> KeeperSpec:
    """Returns the spec with this machine's folder, its fork process, and the GPU that Ray has given to this actor."""
    import ray

    named = hashlib.sha256(spec.secret.encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"penstock-fleet-{os.getuid()}-{named}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to another user: remove it")
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # it names this actor's GPU, and the process forks for others too
    forks = forks_of(str(folder), spec.revision)
    start_forking(forks)
    return msgspec.structs.replace(spec, folder=str(folder), forks=forks, config=shared(spec.config, ray.get_gpu_ids()))


def shared(config: Config, gpus: Sequence[int | str]) -> Config:
    """Returns the config of an engine that may share this machine: on the GPU from Ray, or with the memory share that
    its threads leave room for."""
    options = {name: getattr(config, name) for name in ("threads", "kv_memory", "kv_ram")}
    if gpus:
        kind = next(kind for kind in in_order() if kind.cluster_resource == "GPU")
        here = len(list(Path("/dev").glob("nvidia[0-9]*")))
        return replace(config, device=f"{kind.name}:{gpus[0]}", **gpu_share(max(here, 1), options, available_memory()))
    cores = os.cpu_count() or 1
    engines = max(cores // (config.threads or cores), 1)
    return replace(config, **cpu_share(engines, options, cores, available_memory()))


def with_threads(ray: Any, spec: FleetSpec, keeper: KeeperSpec) -> KeeperSpec:
    """Returns a replica with its share of the cluster's threads, unless an option sets them or it may compute on a GPU:
    it uses exactly the processors that Ray reserves."""
    if keeper.config.threads or _devices(ray, keeper.config.device):
        return keeper
    cores = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    most = max(spec.replicas, spec.scaling.most if spec.scaling else 0)
    config = replace(keeper.config, threads=cluster_threads(cores, most))
    return msgspec.structs.replace(keeper, config=config)


def _connect(address: str) -> Any:
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", HEAD_SECONDS)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"--ground ray needs Ray ({error}): run pip install 'penstock[fleet]'") from error
    here = {"include_dashboard": False} if not address else {}
    try:
        _check_reachable(address)
        ray.init(address or STARTED_HERE, namespace=NAMESPACE, log_to_driver=False, logging_level="error", **here)
    except Exception as error:
        raise ConfigError(f"cannot connect to the Ray cluster {address or STARTED_HERE!r}: {error}") from error
    return ray


def _check_reachable(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


def _place(ray: Any, spec: FleetSpec, keeper: KeeperSpec) -> None:
    """Lets Ray find room for a replica and start its keeper there."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    keeper = with_threads(ray, spec, keeper)
    needs = _needs(ray, keeper)
    name = _actor_name(spec.name, keeper.name)
    group = placement_group([needs], strategy="PACK", name=name, lifetime="detached")
    try:
        if not group.wait(PLACE_SECONDS):
            has = {kind: ray.available_resources().get(kind, 0) for kind in needs}
            raise EngineUnavailable(
                f"no machine of the Ray cluster has {needs} free for {keeper.name}; all have {has}: add machines, or "
                "say fewer --threads or --replicas"
            )
        actor_type = ray.remote(num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0), max_restarts=0)(KeeperActor)
        placed = PlacementGroupSchedulingStrategy(group)
        actor = actor_type.options(name=name, lifetime="detached", scheduling_strategy=placed).remote()
        ray.get(actor.start.remote(msgspec.json.encode(keeper)), timeout=START_SECONDS)
    except EngineUnavailable:
        remove_placement_group(group)
        raise
    except Exception as error:
        _remove(ray, spec.name, keeper.name)
        raise EngineUnavailable(f"Ray could not start the keeper of {keeper.name}: {error}") from error


def _needs(ray: Any, keeper: KeeperSpec) -> dict[str, float]:
    """Returns a replica's resources: processors, and a device if it may compute on one that the cluster counts."""
    return {"CPU": float(keeper.config.threads or 1)} | dict.fromkeys(_devices(ray, keeper.config.device), 1.0)


def _devices(ray: Any, device: str) -> list[str]:
    """Returns the cluster's names of the devices that a replica may compute on."""
    if device != AUTO:
        return [name] if (name := device_kind(device).cluster_resource) else []
    there = ray.cluster_resources()
    return [kind.cluster_resource for kind in in_order() if there.get(kind.cluster_resource, 0) > 0][:1]


def _remove(ray: Any, fleet: str, replica: str) -> None:
    """Frees a replica's resources by its name: another steward may have started it."""
    from ray.util import get_placement_group, remove_placement_group

    name = _actor_name(fleet, replica)
    with suppress(ValueError):  # its machine may be gone
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    with suppress(ValueError):
        remove_placement_group(get_placement_group(name))


def _actor_name(fleet: str, replica: str) -> str:
    return f"penstock:{fleet}:{replica}"

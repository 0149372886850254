"""Implements `penstock fleet serve` and `gateway`, the HTTP server in front of several engines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from penstock.cli.framework import options
from penstock.cli.framework.command import Argument, Option, OptionGroup, UsageError
from penstock.cli.serve import ModelRefs, ServerOptions, run_server
from penstock.fleet import MOST_REPLICAS

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.fleet.client import FleetClient
    from penstock.fleet.steward_link import StewardLink, StewardProcess
    from penstock.fleet.steward_wire import FleetSpec
    from penstock.service_levels import Targets

GROUNDS = ("local", "ray")


class ReplicaOptions(NamedTuple):
    """Declares the options of a fleet."""

    replicas: Annotated[
        str,
        Option(help="Engines of each model. MIN:MAX: follow the load to meet the targets, within these bounds."),
    ] = "3"
    ground: Annotated[str, Option(help="Where engines run: local (this machine) or ray (a Ray cluster).")] = "local"
    ray: Annotated[
        str,
        Option(
            help="Address of the Ray cluster, for --ground ray, such as auto or 10.0.0.1:6379. Empty: start one on "
            "this machine.",
            env="PENSTOCK_RAY",
        ),
    ] = ""
    itl: Annotated[
        float,
        Option(
            minimum=0,
            maximum=60_000,
            help="Target for the inter-token latency in milliseconds, as --itl-target. In addition, while prompts "
            "would pile up, some engines compute prompts for the others. 0: each engine computes its own.",
        ),
    ] = 0.0
    roles: Annotated[
        str, Option(help="prefill=N: with --itl, N engines of each model always compute long prompts.")
    ] = ""


def serve(
    models: ModelRefs = [],  # noqa: B006  it is only read
    *,
    fleet: Annotated[ReplicaOptions, OptionGroup()],
    server: Annotated[ServerOptions, OptionGroup()],
    engine: options.EngineSettings,
) -> None:
    """Serve models over HTTP with several engines each, which survive one another's deaths.

      penstock fleet serve smollm2 --replicas 3
      penstock fleet serve smollm2 --replicas 2 --port 9000 --max-len 4096
      penstock fleet serve smollm2 --replicas 1:4 --ttft-target 1000
      penstock fleet serve smollm2 --replicas 8 --ground ray --ray auto

    All options of penstock serve apply. A request goes to the engine that will probably answer it first, given its
    cached prefixes and its load; when an engine dies, another continues its answers. On this machine, engines share the
    processors and the memory unless --threads and --kv-memory set each engine's part. On GPUs, each has some host
    memory for blocks read from others unless --kv-ram sets it.
    """
    if not hasattr(os, "fork"):
        raise UsageError("a fleet forks its engines, which this system cannot: use penstock serve, or WSL on Windows")
    if fleet.ground not in GROUNDS:
        raise UsageError(f"--ground takes {' or '.join(GROUNDS)}; got {fleet.ground!r}")
    if fleet.ray and fleet.ground != "ray":
        raise UsageError("--ray names a Ray cluster: give --ground ray, too")
    if fleet.ground == "ray":
        check_ray()
    prefill_replicas(fleet)
    server = with_target(server, fleet.itl)
    clients = FleetClients(fleet, server.listen.drain_seconds, server.share.terms().targets)
    if len(models) == 1:
        clients.begin()
    if fleet.ground == "local":
        engine = engine | shares_of(replica_range("--replicas", fleet.replicas)[1], engine)
    run_server(models, server, engine, clients)


def gateway(
    name: Annotated[
        str,
        Argument(
            metavar="FLEET",
            help="Name of the fleet (its model's), or the path of its run file. Required if several run.",
        ),
    ] = "",
    *,
    server: Annotated[ServerOptions, OptionGroup()],
) -> None:
    """Serve a running fleet through an additional gateway, or replace one that has died.

      penstock fleet gateway
      penstock fleet gateway smollm2 --port 8001
      penstock fleet gateway ./smollm2.fleet.json

    Engine options, --itl and --roles are those the fleet was started with, and so are latency targets unless given
    here. The fleet ends when its last gateway is stopped, or after 60 seconds without a gateway. A fleet on Ray may
    have gateways on other machines that have the model's files at the same path: copy the run file there, which is in
    the folder run of PENSTOCK_HOME.
    """
    from penstock.config import OPTIONS
    from penstock.fleet.run_file import find_fleet

    spec = find_fleet(run_folder(), name)
    engine = {option: getattr(spec.config, option) for option in OPTIONS}
    server = with_targets(server._replace(listen=server.listen._replace(name=spec.name)), spec.targets)
    run_server([spec.config.model], server, engine, AttachedClients(spec))


def prefill_replicas(fleet: ReplicaOptions) -> int:
    """Returns the number of dedicated prefill engines per model; raises UsageError for invalid roles."""
    if not fleet.roles:
        return 0
    role, _, count = fleet.roles.partition("=")
    least, _ = replica_range("--replicas", fleet.replicas)
    if role != "prefill" or not count.isdecimal() or not 0 < int(count) < least:
        most = least - 1
        raise UsageError(f"--roles takes prefill=N, with N from 1 to {most} of --replicas; got {fleet.roles!r}")
    if not fleet.itl:
        raise UsageError("--roles needs --itl, which defines long prompts: give both")
    return int(count)


def replica_range(option: str, text: str) -> tuple[int, int]:
    """Parses a number of replicas, N or MIN:MAX, to the fewest and the most."""
    least, colon, most = text.partition(":")
    numbers = [least, most] if colon else [least, least]
    if not all(each.isascii() and each.isdigit() for each in numbers):
        raise UsageError(f"{option} is a whole number from 1, or two of them as MIN:MAX; got {text!r}")
    fewest, highest = map(int, numbers)
    if not 1 <= fewest <= highest <= MOST_REPLICAS:
        raise UsageError(f"{option} has from 1 to {MOST_REPLICAS} replicas, the fewest first; got {text!r}")
    return fewest, highest


def with_target(server: ServerOptions, itl: float) -> ServerOptions:
    if not itl or server.share.itl_target:
        return server
    return server._replace(share=server.share._replace(itl_target=max(round(itl), 1)))


def with_targets(server: ServerOptions, targets: Targets) -> ServerOptions:
    ttft, itl = (round(1000 * (target or 0)) for target in server.share.terms().targets.over(targets))
    return server._replace(share=server.share._replace(ttft_target=ttft, itl_target=itl))


class FleetClients:
    """Makes each model's client, which starts a fleet of its own."""

    def __init__(self, fleet: ReplicaOptions, drain_seconds: float, targets: Targets) -> None:
        self._fleet = fleet
        self._drain_seconds = drain_seconds
        self._targets = targets
        self._begun: tuple[str, StewardProcess] | None = None

    def begin(self) -> None:
        """Starts the first fleet's processes, whose imports overlap with this process's."""
        import subprocess
        import sys

        folder = make_folder()
        if self._fleet.ground == "local":  # the slowest goes first
            subprocess.Popen([sys.executable, "-m", "penstock.fleet.forks", f"{folder}/forks.0"])
        from penstock.fleet.steward_link import StewardProcess

        self._begun = folder, StewardProcess(folder)

    def __call__(self, config: Config) -> FleetClient:
        from penstock.fleet.steward_link import StewardLink, StewardProcess

        check_is_new(config.name)
        folder, process = self._begun or (make_folder(), None)
        self._begun = None
        spec = self._spec(config, folder)
        return connect(spec, StewardLink(spec, lambda: process or StewardProcess(folder)))

    def _spec(self, config: Config, folder: str) -> FleetSpec:
        import secrets

        import msgspec

        from penstock.fleet.ground import steward_address
        from penstock.fleet.run_file import run_file_of
        from penstock.fleet.split import SplitOptions
        from penstock.fleet.steward_wire import FleetSpec, ScaleSpec

        address = steward_address(folder, self._fleet.ground)
        run_file = str(run_file_of(run_folder(), config.name))
        least, most = replica_range("--replicas", self._fleet.replicas)
        targets = zip(("ttft", "itl"), self._targets, strict=True)
        stated = {name: 1000 * target for name, target in targets if target is not None}
        scaling = ScaleSpec(least, most, **stated)
        split = SplitOptions(self._fleet.itl, prefill_replicas(self._fleet), told=True)
        wishes = {"scaling": scaling, "split": split, "targets": self._targets}
        spec = FleetSpec(
            config.name,
            folder,
            address,
            secrets.token_hex(32),
            run_file,
            config,
            least,
            self._fleet.ground,
            self._fleet.ray,
            self._drain_seconds,
        )
        return msgspec.structs.replace(spec, **wishes)


class AttachedClients:
    """Makes the client of a running fleet."""

    def __init__(self, spec: FleetSpec) -> None:
        self._spec = spec

    def __call__(self, _: Config) -> FleetClient:
        from penstock.fleet.steward_link import StewardLink

        return connect(self._spec, StewardLink(self._spec))


def connect(spec: FleetSpec, link: StewardLink) -> FleetClient:
    """Connects to a running fleet; its steward receives the client's load and sends the number of replicas."""
    from penstock.fleet.client import FleetClient

    client = FleetClient(link, split=spec.split, scale=lambda: link.scale)
    link.measure = client.measured_load
    return client


def run_folder() -> Path:
    from penstock.store import home

    return home() / "run"


def make_folder() -> str:
    """Makes a folder for a fleet's sockets, whose paths must be short."""
    import tempfile

    return tempfile.mkdtemp(prefix="penstock-fleet-")


def check_ray() -> None:
    from importlib.util import find_spec

    from penstock.errors import ConfigError

    if find_spec("ray") is None:
        raise ConfigError("--ground ray needs Ray, which is not installed: run pip install 'penstock[fleet]'")


def check_is_new(name: str) -> None:
    from penstock.errors import ConfigError
    from penstock.fleet.run_file import FleetNotFound, find_fleet
    from penstock.fleet.steward_link import is_running

    try:
        spec = find_fleet(run_folder(), name)
    except FleetNotFound:
        return
    if is_running(spec):
        raise ConfigError(
            f"a fleet called {name!r} runs already (steward process {spec.steward_pid}): add a gateway to it with "
            f"`penstock fleet gateway {name}`, or give this one another name with --name"
        )


def shares_of(replicas: int, engine: dict[str, Any]) -> dict[str, Any]:
    """Returns engine options that divide this machine, where none are given. GPUs are not divided; --device and
    --kv-memory do that.
    """
    from penstock.backend.devices import may_own_memory
    from penstock.config import available_memory
    from penstock.fleet.machine_share import cpu_share, gpu_share

    if replicas == 1:
        return {}
    memory = available_memory()
    if may_own_memory(str(engine["device"])):
        return gpu_share(replicas, engine, memory)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cpu_share(replicas, engine, cores, memory)

"""Implements `penstock fleet status`, `drain`, `scale` and `upgrade` for a fleet on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from penstock.cli.fleet_serve import replica_range, run_folder
from penstock.cli.framework import options
from penstock.cli.framework.command import Argument, Option
from penstock.cli.terminal import note, print_json, print_table

if TYPE_CHECKING:
    from penstock.fleet.steward_wire import Command, FleetSpec, FleetStatus, MemberStatus

POLL_SECONDS = 0.2
COLUMNS = ("replica", "state", "process", "keeper", "machine", "in flight", "restarts", "revision", "reason")
FleetName = Annotated[
    str, Option(help="Name of the fleet (its model's), or the path of its run file. Required if several run.")
]


def status(json: options.Json = False, *, fleet: FleetName = "") -> None:
    """Show the replicas of a fleet.

    penstock fleet status
    penstock fleet status --json
    """
    from penstock.fleet.steward_wire import AskStatus

    spec = _find(fleet)
    told = _ask(spec, AskStatus(spec.secret))
    if json:
        print_json(_as_json(told))
    else:
        _print(told)


def drain(
    replica: Annotated[str, Argument(metavar="REPLICA", help="Name of the replica, as in penstock fleet status.")],
    *,
    fleet: FleetName = "",
) -> None:
    """Take a replica out of a fleet once its answers have ended. The fleet then has one replica fewer.

      penstock fleet drain smollm2-1

    Answers that take longer than --drain-seconds of penstock fleet serve continue on another replica.
    """
    from penstock.fleet.steward_wire import DrainReplica

    spec = _find(fleet)
    told = _ask(spec, DrainReplica(spec.secret, replica))
    _wait(spec, told, lambda now: all(each.info.name != replica or _has_ended(each) for each in now.members))
    note(f"{replica} has ended; {spec.name} has {_count(told)} now")


def scale(
    replicas: Annotated[str, Argument(metavar="REPLICAS", help="Number of replicas, or MIN:MAX to follow the load.")],
    *,
    fleet: FleetName = "",
) -> None:
    """Change the number of replicas of a fleet. Surplus replicas end once their answers have.

      penstock fleet scale 5
      penstock fleet scale 2:8

    One number sets a fixed size. A range lets the fleet follow its load to meet the targets.
    """
    from penstock.fleet.steward_wire import ScaleFleet

    least, most = replica_range("REPLICAS", replicas)
    spec = _find(fleet)
    told = _wait(spec, _ask(spec, ScaleFleet(spec.secret, least, most if most > least else 0)), _is_as_wanted)
    note(f"{spec.name} has {_count(told)}")


def upgrade(*, fleet: FleetName = "", engine: options.EngineSettings) -> None:
    """Replace every replica, one at a time, by one with the installed version of Penstock and the given engine options.

      penstock fleet upgrade
      penstock fleet upgrade --kv int8 --max-rows 32

    An old replica is drained when its replacement is ready. If the replacement fails to start, nothing changes.
    """
    from dataclasses import replace

    from penstock.config import DEFAULTS, configure
    from penstock.errors import error_of
    from penstock.fleet.steward_wire import UpgradeFleet

    spec = _find(fleet)
    stated = {name: value for name, value in engine.items() if value != DEFAULTS[name] and value is not None}
    checked = configure(spec.config.model, stated)
    config = replace(spec.config, **{name: getattr(checked, name) for name in stated})
    told = _wait(spec, _ask(spec, UpgradeFleet(spec.secret, config)), _is_as_wanted)
    if told.upgrade_failure is not None:
        raise error_of(told.upgrade_failure.code, f"the upgrade was taken back: {told.upgrade_failure.message}")
    note(f"{spec.name} has {_count(told)} of revision {told.revision}")


def _find(name: str) -> FleetSpec:
    from penstock.fleet.run_file import find_fleet

    return find_fleet(run_folder(), name)


def _ask(spec: FleetSpec, command: Command) -> FleetStatus:
    import asyncio

    from penstock.fleet.steward_link import ask

    return asyncio.run(ask(spec, command))


def _wait(spec: FleetSpec, told: FleetStatus, done: Callable[[FleetStatus], bool]) -> FleetStatus:
    """Waits until the fleet is `done`, printing changes; returns its status."""
    import time

    from penstock.fleet.steward_wire import AskStatus

    shown: dict[str, str] = {each.info.name: str(each.info.state) for each in told.members}
    while not done(told):
        time.sleep(POLL_SECONDS)
        told = _ask(spec, AskStatus(spec.secret))
        for each in told.members:
            if shown.get(each.info.name) != each.info.state:
                note(f"{each.info.name}: {each.info.state}")
            shown[each.info.name] = str(each.info.state)
    return told


def _count(told: FleetStatus) -> str:
    return f"{told.replicas} replica{'s' * (told.replicas != 1)}"


def _has_ended(member: MemberStatus) -> bool:
    return member.info.state == "ended"


def _is_as_wanted(told: FleetStatus) -> bool:
    there = [each for each in told.members if not _has_ended(each)]
    ready = all(each.info.state == "ready" and each.revision == told.revision for each in there)
    return ready and len(there) == told.replicas


def _as_json(told: FleetStatus) -> dict[str, Any]:
    about = {"name": told.name, "steward": told.steward, "wanted": told.replicas, "revision": told.revision}
    about |= {"refused_messages": told.refused}
    members = [
        each.info._asdict()
        | {"keeper": each.keeper, "revision": each.revision}
        | {"in_flight": each.in_flight, "restarts": each.restarts}
        for each in told.members
    ]
    scale = None if told.scale is None else told.scale._asdict()
    return about | {"gateways": told.gateways, "scale": scale, "replicas": members}


def _print(told: FleetStatus) -> None:
    from rich.table import Table

    table = Table(*COLUMNS, box=None, pad_edge=False)
    for info, keeper, revision, in_flight, restarts in map(_fields, told.members):
        row = (info.name, info.state, info.pid or "", keeper, info.host, in_flight, restarts, revision, info.reason)
        table.add_row(*map(str, row))
    print_table(table)
    if told.scale is not None and told.scale.most > told.scale.least:
        bounds = f"{told.scale.least} to {told.scale.most}"
        print(f"{_count(told)} of {bounds}: {told.scale.reason or 'the load is not known yet'}")


def _fields(member: MemberStatus) -> tuple[Any, int, int, int, int]:
    return member.info, member.keeper, member.revision, member.in_flight, member.restarts

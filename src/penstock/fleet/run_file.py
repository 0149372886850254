"""Keeps the run files of fleets: a file for each fleet that runs on this machine, by which commands find it. It has the
fleet's secret, so that only its user may read it."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import msgspec

from penstock.errors import ConfigError
from penstock.fleet.steward_wire import FleetSpec

SUFFIX = ".fleet.json"


class FleetNotFound(ConfigError):
    """Says that no fleet of that name runs here."""

    code = "fleet_not_found"


def run_file_of(folder: Path, name: str) -> Path:
    return folder / (quote(name, safe="") + SUFFIX)


def write_run_file(spec: FleetSpec) -> None:
    path = Path(spec.run_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(spec))
    unfinished.replace(path)


def read_run_file(path: Path) -> FleetSpec:
    """Returns the spec in a run file; raises FleetNotFound if it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=FleetSpec)
    except (OSError, msgspec.DecodeError) as error:
        raise FleetNotFound(f"the run file {path} cannot be read: {error}") from error


def find_fleet(folder: Path, name: str = "") -> FleetSpec:
    """Returns the fleet of this name or run file, or the only one; raises FleetNotFound if there is none, or if several
    run and none is named."""
    if name.endswith(SUFFIX):
        return read_run_file(Path(name))
    paths = [run_file_of(folder, name)] if name else sorted(folder.glob(f"*{SUFFIX}"))
    specs = [read_run_file(path) for path in paths if path.exists()]  # another fleet's file may be unreadable
    if len(specs) == 1:
        return specs[0]
    if specs:
        names = ", ".join(spec.name for spec in specs)
        raise FleetNotFound(f"several fleets run here ({names}): say which one with --fleet NAME")
    called = f" called {name!r}" if name else ""
    raise FleetNotFound(f"no fleet{called} runs here: start one with `penstock fleet serve`")

"""Caches the measured speed of this machine in the store's folder, until the engine or the machine changes.
Measurements on a busy machine are not cached.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import __version__
from penstock.backend.devices import device_kind
from penstock.cli.terminal import note

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.planning.roofline import MachineProfile

VERSION = f"{__version__} (3)"  # engine version and file version
BUSY = 0.1  # largest share used by other processes for a measurement to be cached
STAT = Path("/proc/stat")
_not_kept: dict[str, MachineProfile] = {}  # measurements on a busy machine, for this process only


def machine_profile(
    config: Config, backend_name: str, formats: Iterable[str], again: bool = False
) -> MachineProfile | None:
    """Returns the speed of this machine with weights of these formats, measuring only missing values. None: the device
    is not meant for speed. Measurements on a busy machine are used by this process only.
    """
    from penstock.planning.calibration import measure

    if device_kind(config.device).calibration is None:
        return None
    key = _key(config, backend_name)
    known = None if again else _not_kept.get(key) or _read(key)
    missing = [name for name in formats if known is None or name not in known.matmuls]
    if known is None or missing:
        note(f"measuring {key}; each format of weights takes some seconds")
        before = _busy_time()
        known = measure(config, missing, known, log=lambda what: note(f"  {what}"))
        known = known._replace(busy=max(known.busy, _share_of_others(before)))
        if is_busy(known):
            _not_kept[key] = known
            note(f"{busy_text(known)}; `penstock doctor --measure` measures it again")
        else:
            _not_kept.pop(key, None)
            _write(key, known)
    return known


def is_busy(profile: MachineProfile) -> bool:
    return profile.busy > BUSY


def busy_text(profile: MachineProfile) -> str:
    return (
        f"other processes used {profile.busy:.0%} of this machine while its speed was measured: it is faster than "
        "that, and the measurement is not kept"
    )


class BusyTime(NamedTuple):
    """Holds CPU seconds since an arbitrary start."""

    own: float  # this process
    everyone: float  # all processes and, on a virtual machine, time stolen by the host
    clock: float


def _busy_time() -> BusyTime:
    own = sum(os.times()[:4])
    try:
        ticks = list(map(int, STAT.read_text().split(maxsplit=9)[1:9]))
    except (OSError, ValueError):
        return BusyTime(own, own, time.monotonic())
    user, nice, system, _idle, _waiting, *others = ticks
    return BusyTime(own, sum((user, nice, system, *others)) / os.sysconf("SC_CLK_TCK"), time.monotonic())


def _share_of_others(before: BusyTime) -> float:
    """Returns the share of the machine that other processes have used since `before`; 0 if unknown."""
    now = _busy_time()
    cores = os.cpu_count() or 1
    own, everyone, elapsed = (one - other for one, other in zip(now, before, strict=True))
    return max(everyone - own, 0.0) / max(elapsed, 1e-9) / cores


def _key(config: Config, backend_name: str) -> str:
    name = backend_name if device_kind(config.device).own_memory else f"{_cpu_name()}, {backend_name}"
    return f"{name}, KV {config.kv}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _file() -> Path:
    from penstock.store import home

    return home() / "machine.json"


def _read_all() -> dict[str, Any]:
    """Reads all measurements; empty if the file is damaged or outdated."""
    try:
        kept = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return dict(kept["machines"]) if isinstance(kept, dict) and kept.get("version") == VERSION else {}


def _read(key: str) -> MachineProfile | None:
    from penstock.planning.roofline import MachineProfile, MatmulTimes

    fields = _read_all().get(key)
    if fields is None:
        return None
    matmuls = {name: MatmulTimes(*map(tuple, times)) for name, times in fields["matmuls"].items()}
    return MachineProfile(**fields | {"matmuls": matmuls})


def _write(key: str, profile: MachineProfile) -> None:
    machines = _read_all() | {key: profile._asdict()}
    _file().parent.mkdir(parents=True, exist_ok=True)
    draft = _file().with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"version": VERSION, "machines": machines}, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, _file())

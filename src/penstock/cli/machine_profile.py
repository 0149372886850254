"""What this machine was measured to give, kept in the store's folder until the engine or the machine is another."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.cli.terminal import note
from penstock.config import Device

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.planning.roofline import Machine

BUSY = 0.1  # share of a machine that others may have while it is measured
COMMON = {"cpu": ("BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"), "cuda": ("BF16", "fp8", "Q4_K")}


def measured(config: Config, name: str, kinds: Iterable[str], again: bool = False) -> Machine | None:
    """What is known of the machine, and measured now where it is not; None of a device that is not for speed.
    `name`: the backend's."""
    from penstock.planning.calibration import SIZES, measure

    if Device.parse(config.device).kind not in SIZES:
        return None
    key = _key(config, name)
    known = None if again else _read(key)
    missing = [kind for kind in kinds if known is None or kind not in known.roofs]
    if known is None or missing:
        note(f"measuring {key}, once: some seconds for each kind of weight")
        clock = _busy_time()
        known = measure(config, missing, known, tell=lambda what: note(f"  {what}"))
        _tell_of_others(clock)
        _write(key, known)
    return known


def _busy_time() -> tuple[float, float, float]:
    """Seconds: of this process, of all cores while they worked, and on the clock."""
    own = sum(os.times()[:4])
    try:
        user, nice, system = map(int, Path("/proc/stat").read_text().split(maxsplit=4)[1:4])
    except (OSError, ValueError):
        return own, own, time.monotonic()
    return own, (user + nice + system) / os.sysconf("SC_CLK_TCK"), time.monotonic()


def _tell_of_others(since: tuple[float, float, float]) -> None:
    own, all_, passed = (now - then for now, then in zip(_busy_time(), since, strict=True))
    share = (all_ - own) / passed / (os.cpu_count() or 1)
    if share > BUSY:
        note(
            f"other processes had {share:.0%} of this machine meanwhile: it gives more than was measured; "
            "`penstock doctor --measure` measures it again"
        )


def _key(config: Config, name: str) -> str:
    """What makes another machine of this one."""
    of_gpu = Device.parse(config.device).kind == "cuda"
    return f"{name}, KV {config.kv}" if of_gpu else f"{_cpu_name()}, {name}, KV {config.kv}"


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
    """Nothing where the file is of another version, or damaged: it can be measured again."""
    try:
        kept = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return dict(kept["machines"]) if isinstance(kept, dict) and kept.get("version") == __version__ else {}


def _read(key: str) -> Machine | None:
    from penstock.planning.roofline import Machine, Roof

    if key not in (machines := _read_all()):
        return None
    fields = machines[key]
    return Machine(**fields | {"roofs": {kind: Roof(*map(tuple, roof)) for kind, roof in fields["roofs"].items()}})


def _write(key: str, machine: Machine) -> None:
    machines = _read_all() | {key: machine._asdict()}
    _file().parent.mkdir(parents=True, exist_ok=True)
    draft = _file().with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"version": __version__, "machines": machines}, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, _file())

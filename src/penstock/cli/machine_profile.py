"""Keeps the measured speed of this machine in the store's folder, until the engine or the machine changes."""

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
    from penstock.planning.roofline import MachineProfile

VERSION = f"{__version__} (2)"  # of the engine and of the file's fields
BUSY = 0.1  # share of the machine that other processes may use while it is measured
COMMON_FORMATS = {"cpu": ("BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"), "cuda": ("BF16", "fp8", "Q4_K")}


def machine_profile(
    config: Config, backend_name: str, formats: Iterable[str], again: bool = False
) -> MachineProfile | None:
    """Returns the speed of this machine with weights of these formats, and measures what is not known yet. None: the
    device is not meant for speed."""
    from penstock.planning.calibration import SIZES, measure

    if Device.parse(config.device).kind not in SIZES:
        return None
    key = _key(config, backend_name)
    known = None if again else _read(key)
    missing = [name for name in formats if known is None or name not in known.matmuls]
    if known is None or missing:
        note(f"measuring {key} once; each format of weights takes some seconds")
        before = _busy_time()
        known = measure(config, missing, known, log=lambda what: note(f"  {what}"))
        _warn_if_busy(before)
        _write(key, known)
    return known


def _busy_time() -> tuple[float, float, float]:
    """Returns seconds: CPU time of this process, CPU time of all processes, and the clock."""
    own = sum(os.times()[:4])
    try:
        user, nice, system = map(int, Path("/proc/stat").read_text().split(maxsplit=4)[1:4])
    except (OSError, ValueError):
        return own, own, time.monotonic()
    return own, (user + nice + system) / os.sysconf("SC_CLK_TCK"), time.monotonic()


def _warn_if_busy(before: tuple[float, float, float]) -> None:
    own, everyone, elapsed = (now - then for now, then in zip(_busy_time(), before, strict=True))
    share = (everyone - own) / elapsed / (os.cpu_count() or 1)
    if share > BUSY:
        note(
            f"other processes used {share:.0%} of this machine meanwhile, so it is faster than measured; "
            "`penstock doctor --measure` measures it again"
        )


def _key(config: Config, backend_name: str) -> str:
    """Returns the name under which a machine's speed is kept."""
    name = backend_name if config.device == "cuda" else f"{_cpu_name()}, {backend_name}"
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
    """Returns all that was measured; nothing if the file is damaged or of another version, for it can be measured
    again."""
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

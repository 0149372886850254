"""Implements `penstock doctor`, which checks this machine and measures its speed."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Annotated

from penstock.cli import machine_checks
from penstock.cli.framework import options
from penstock.cli.framework.command import Exit, Option
from penstock.cli.machine_checks import Advice, CheckResult
from penstock.cli.machine_profile import busy_text, is_busy, machine_profile
from penstock.cli.terminal import line_width, note, print_filled, print_json, readable_size
from penstock.errors import PenstockError

Check = Callable[[], CheckResult | tuple[str, str]]
KernelNeeds = dict[str, tuple[str, ...]]
X86_KERNELS: KernelNeeds = {  # kernels and the CPU features they require, fastest first
    "amx": ("amx_tile", "amx_int8", "amx_bf16", "avx512_bf16"),
    "avx512vnni": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"),
    "avx2": ("avx2", "fma", "f16c"),
}
ARM_KERNELS: KernelNeeds = {"neon": ("asimddp",)}
FEATURES = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm")


@dataclass(frozen=True, slots=True)
class Finding:
    """Holds the result of one check."""

    check: str
    state: str  # "ok", "note" or "bad"
    detail: str
    advice: tuple[Advice, ...] = ()  # commands to type
    faster: str = ""  # how to speed up answers


def doctor(
    measure: Annotated[bool, Option(help="Measure the speed of this machine again.")] = False,
    tune: Annotated[bool, Option(help="Measure and save the best kernel tilings for this GPU.")] = False,
    kv_disk: Annotated[str, Option(help="Describe the contents of this --kv-disk folder.")] = "",
    json: options.Json = False,
) -> None:
    """Check this machine and measure its speed. The exit code is 1 if something is broken.

    penstock doctor
    penstock doctor --measure
    penstock doctor --tune
    penstock doctor --kv-disk DIR
    penstock doctor --json

    The speed is measured once, in about 20 seconds, and saved for penstock plan, unless other processes are busy
    meanwhile. The last lines are commands to type next.

    --tune is for GPUs other than the H100 and H200, whose tilings are built in. It takes some minutes of exclusive use
    of the GPU. The tilings are saved in the store's folder, for this GPU and these versions of Penstock and Triton.
    """
    if tune:
        _tune_kernels()
    checks: list[Check] = [*CHECKS, partial(_kv_on_disk, kv_disk), partial(_speed, measure)]
    findings = [_run_check(check) for check in checks]
    findings += [_what_is_faster(findings), NEXT_STEPS]
    if json:
        print_json([asdict(finding) for finding in findings])
    else:
        _print(findings)
    if any(finding.state == "bad" for finding in findings):
        raise Exit(1)


def _print(findings: list[Finding]) -> None:
    """Prints the lines of each finding, then the commands to type. On a terminal, long lines are wrapped."""
    for finding in (finding for finding in findings if finding.detail):
        before = f"{finding.state:<6}{finding.check:<18}"
        for line in finding.detail.split("\n"):
            print_filled(line, before)
            before = " " * len(before)
    print("\nCommands to type:")
    advice = {each.command: each.why for finding in findings for each in finding.advice}
    _print_commands(advice)


def _print_commands(advice: dict[str, str]) -> None:
    """Prints commands that can be copied whole, each with its reason on the same line or, if too long, below it."""
    longest = max(map(len, advice))
    fits = all(longest + len(why) + 6 <= line_width() for why in advice.values())
    for command, why in advice.items():
        if fits:
            print(f"  {command:<{longest}}  # {why}")
        else:
            print(f"  {command}")
            print_filled(why, "    # ")


def _what_is_faster(findings: list[Finding]) -> Finding:
    found = [finding.faster for finding in findings if finding.faster]
    always = "weights of four bits (a Q4_K_M file, or --quantize q4_k), if there are more now"
    return Finding("faster with", "ok", "; ".join([*found, always]))


def _run_check(check: Check) -> Finding:
    function = check.func if isinstance(check, partial) else check
    name = function.__name__.strip("_").replace("_", " ")
    try:
        return Finding(name, *check())
    except (PenstockError, OSError, ImportError, subprocess.SubprocessError) as error:
        return Finding(name, "bad", str(error))


def _python() -> tuple[str, str]:
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return "ok" if fits else "bad", f"{platform.python_version()} ({sys.executable}); supported: 3.11 to 3.13"


def _cpu() -> tuple[str, str]:
    flags = set(_cpu_flags().split())
    return "ok", f"{platform.machine()} {' '.join(name for name in FEATURES if name in flags)}".strip()


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features"))), "")


def _cores() -> tuple[str, str]:
    from penstock.config import available_threads

    return "ok", f"{available_threads()} of {os.cpu_count()} may be used"


def _memory() -> tuple[str, str]:
    from penstock.config import available_memory, total_memory

    free = available_memory()
    return "ok" if free > 1e9 else "note", f"{readable_size(free)} free of {readable_size(total_memory())}"


def _disk() -> tuple[str, str]:
    from penstock.store import home

    place = next(folder for folder in (home(), *home().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    return "ok" if free > 1e9 else "note", f"{readable_size(free)} free in {place}"


def _native_backend() -> CheckResult | tuple[str, str]:
    from penstock.backend.cpu.device import NO_NATIVE, has_native

    if not has_native():
        advice = Advice("pip install --force-reinstall --no-deps .", "compile the native code, in a checkout")
        return CheckResult("bad", NO_NATIVE, (advice,), "native code")
    from penstock.backend.cpu import CpuBackend

    kernels = ARM_KERNELS if platform.machine() in ("aarch64", "arm64") else X86_KERNELS
    return "ok", _chosen_kernels(CpuBackend(1).isa, kernels, set(_cpu_flags().split()))


def _chosen_kernels(chosen: str, kernels: KernelNeeds, flags: set[str]) -> str:
    if not flags:
        return f"uses {chosen}"
    needs = " ".join(kernels.get(chosen, ()))
    parts = [f"uses {chosen}" + (f": the CPU reports {needs}" if needs else "")]
    for name in takewhile(lambda name: name != chosen, kernels):
        missing = [flag for flag in kernels[name] if flag not in flags]
        parts.append(f"not {name}: " + (f"no {' '.join(missing)}" if missing else "the system does not allow it"))
    return "; ".join(parts)


def _pip() -> tuple[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return "ok", version("pip")
    except PackageNotFoundError:
        return "note", "not installed; needed for models from packages (pypi:...)"


def _profiles() -> tuple[str, str]:
    from penstock.service_levels import PROFILES

    return "ok", "\n".join(f"{name}: {profile.described()}" for name, profile in PROFILES.items())


def _store() -> tuple[str, str]:
    from penstock.store import entries, home, packed_size

    home().mkdir(parents=True, exist_ok=True)
    test_file = home() / f".write-test-{os.getpid()}"
    test_file.touch()
    test_file.unlink()
    models = entries()
    sizes = readable_size(sum(entry.size for entry in models)), readable_size(packed_size())
    return "ok", f"{len(models)} models, {sizes[0]}, and {sizes[1]} of packed weights in {home()}"


def _kv_on_disk(folder: str) -> tuple[str, str]:
    from penstock.config import Config
    from penstock.engine.kv_disk.summary import described

    if not folder:
        return "ok", "a server with --kv-disk DIR keeps prompts there; penstock doctor --kv-disk DIR shows its contents"
    return "ok", described(folder, Config(model="").kv_disk_bytes)


def _default_model() -> CheckResult | tuple[str, str]:
    from penstock.store import DEFAULT, find, sha256_of

    entry = find(DEFAULT)
    if entry is None:
        detail = f"{DEFAULT} is not downloaded yet; the first use does it"
        return CheckResult("note", detail, (Advice(f"penstock pull {DEFAULT}", "fetch the default model"),))
    if sha256_of(entry.path) != entry.sha256:
        again = Advice(f"penstock rm {DEFAULT} && penstock pull {DEFAULT}", "fetch the damaged model again")
        return CheckResult("bad", f"{entry.path} is damaged: fetch it again", (again,))
    return "ok", f"{DEFAULT} at {entry.path}"


def _speed(again: bool) -> tuple[str, str]:
    from penstock.backend import open_backend, resolve_defaults
    from penstock.backend.devices import device_kind
    from penstock.config import Config

    config = resolve_defaults(Config(model=""))
    calibration = device_kind(config.device).calibration
    if calibration is None:
        return "note", "NumPy computes: its speed is not measured"
    profile = machine_profile(config, open_backend(config).name, calibration.formats, again)
    assert profile is not None  # auto never chooses a device without a profile
    rates = [
        f"{name} {1e-9 / times.seconds[0]:,.3g} and {1e-9 * times.rows[-1] / times.seconds[-1]:,.4g}"
        for name, times in profile.matmuls.items()
    ]
    detail = f"billions of weights per second in decode (1 row) and in prefill: {', '.join(rates)}"
    return ("note", f"{detail}; {busy_text(profile)}") if is_busy(profile) else ("ok", detail)


def _tune_kernels() -> None:
    """Measures the tilings of the first device of each kind that has some; raises ConfigError without such a device."""
    from penstock.backend.devices import in_order

    for kind in in_order():
        if kind.tune is not None:
            note(f"tilings are kept in {kind.tune(note)}")


NEXT_STEPS = Finding(
    "next steps",
    "ok",
    "",
    (
        Advice('penstock run "Why is the sky blue?"', "try it"),
        Advice("penstock plan smollm2", "forecast fit and speed"),
        Advice("penstock serve --profile chat", "serve it to people"),
    ),
)
CHECKS: tuple[Check, ...] = (
    _python,
    _cpu,
    _cores,
    machine_checks.load,
    _memory,
    _disk,
    _native_backend,
    machine_checks.gpu,
    machine_checks.torch,
    machine_checks.compiler,
    machine_checks.packages,
    _pip,
    machine_checks.ports,
    machine_checks.file_limits,
    machine_checks.proxies,
    _store,
    _default_model,
    _profiles,
)

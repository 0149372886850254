"""Implements the checks of `penstock doctor` around Penstock: GPU, packages, ports, limits and proxies."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import NamedTuple

OK, NOTE, BAD = "ok", "note", "bad"
PORT = 8000  # default of `penstock serve`
PORTS = range(PORT, PORT + 20)
ASKING_SECONDS = 10.0  # timeout of other programs
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
LOCAL = ("localhost", "127.0.0.1")
MANY_FILES = 4096  # open files; fewer are too few for a thousand clients
BUSY = 0.5  # share of the cores used by other processes
COMPILERS = ("c++", "g++", "clang++")
C_COMPILERS = ("cc", "gcc", "clang")  # candidates of Triton
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}  # torch's CUDA version: oldest driver; any 12.x runs on 525
C_PACKAGE = "apt-get install --yes gcc libc6-dev"
PACKAGES = {  # optional packages: their extra and purpose
    "uvloop": ("server", "faster answers over HTTP"),
    "ray": ("fleet", "a fleet on many machines"),
    "opentelemetry-sdk": ("otel", "traces with --otlp"),
    "nixl": ("nixl", "KV blocks between machines by RDMA"),
}


@dataclass(frozen=True, slots=True)
class Advice:
    """Holds a suggested command and its reason."""

    command: str
    why: str


class CheckResult(NamedTuple):
    """Holds a check's result; its state is ok, note or bad."""

    state: str
    detail: str
    advice: tuple[Advice, ...] = ()
    faster: str = ""  # how to speed up answers


def gpu() -> CheckResult:
    from penstock.backend.cuda.device import NVIDIA

    if shutil.which("nvidia-smi") is None:
        found = NVIDIA.exists()
        return CheckResult(
            *(NOTE, "a device file, but no nvidia-smi") if found else (OK, "none found: the CPU computes")
        )
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=ASKING_SECONDS, check=False)
    if done.returncode:
        return CheckResult(NOTE, f"nvidia-smi fails: {(done.stdout + done.stderr).strip()}")
    fields = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 3]
    cards = [f"{name}, {memory}, driver {driver}, compute {cap}" for name, memory, driver, cap in fields]
    missing = [name for name in ("torch", "triton") if installed(name) is None]
    if not missing:
        cuda = cuda_of_torch()
        oldest = OLDEST_DRIVERS.get(cuda, 0)
        if any(_major(driver) < oldest for _, _, driver, _ in fields):
            old = f"update the driver: this torch is built for CUDA {cuda} and needs driver {oldest} or newer"
            return CheckResult(NOTE, "; ".join([*cards, old]), (), "the GPU, with a newer driver")
        return CheckResult(OK, "; ".join(cards))
    why = f"{' and '.join(missing)} missing: the CPU computes although there is a GPU"
    advice = Advice("pip install 'penstock[cuda]'", "use the GPU")
    return CheckResult(NOTE, "; ".join([*cards, why]), (advice,), "the GPU, with torch and triton")


def _major(version: str) -> int:
    """Returns the first number of a version; a large one if absent, as in [N/A]."""
    number = version.partition(".")[0]
    return int(number) if number.isdigit() else 10**6


def cuda_of_torch() -> int:
    """Returns the CUDA major version of the installed torch; 0 if unknown. Builds name it after a + in their version,
    or depend on that CUDA's runtime.
    """
    named = re.search(r"\+cu(\d\d)", installed("torch") or "")
    if named:
        return int(named[1])
    if runtime := installed("nvidia-cuda-runtime") or installed("nvidia-cuda-runtime-cu12"):
        return _major(runtime)
    return 0


def torch() -> CheckResult:
    if installed("torch") is None:
        return CheckResult(OK, "not installed; only a GPU needs it")
    from penstock.backend.cuda.device import has_gpu

    usable = "it can use the GPU" if has_gpu() else "it finds no GPU that it can use"
    return CheckResult(OK, f"{installed('torch')}, triton {installed('triton') or 'not installed'}; {usable}")


def compiler() -> CheckResult:
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if shutil.which("nvidia-smi") and not any(map(shutil.which, C_COMPILERS)):
        detail = "no C compiler (cc, gcc or clang): Triton needs one when it first runs a kernel on the GPU"
        return CheckResult(NOTE, detail, (Advice(C_PACKAGE, "the C compiler that Triton needs, on Debian and Ubuntu"),))
    if found is None:
        return CheckResult(OK, "none; only an installation from source needs one")
    done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=ASKING_SECONDS, check=False)
    return CheckResult(OK, f"{(done.stdout.splitlines() or ['unknown'])[0]} ({found})")


def packages() -> CheckResult:
    from penstock.backend.devices import in_order

    known = PACKAGES | {name: (kind.extra, kind.hardware) for kind in in_order() for name in kind.packages}
    found = {name: installed(name) for name in known}
    there = [f"{name} {number}" for name, number in found.items() if number is not None]
    missing = [f"no {name} ({known[name][1]}: penstock[{known[name][0]}])" for name in found if not found[name]]
    detail = "; ".join([*there, *missing])
    if found["uvloop"]:
        return CheckResult(OK, detail)
    advice = Advice("pip install 'penstock[server]'", "faster answers over HTTP")
    return CheckResult(OK, detail, (advice,), "uvloop, for a server with many clients")


def installed(package: str) -> str | None:
    # slow to import, and the list of commands imports this file
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def ports() -> CheckResult:
    """Checks whether the port of `penstock serve` is free."""
    if is_free(PORT):
        return CheckResult(OK, f"{PORT}, which penstock serve uses, is free")
    other = next(filter(is_free, PORTS), 0)
    advice = Advice(f"penstock serve --port {other}", f"port {PORT} is taken")
    return CheckResult(NOTE, f"{PORT}, which penstock serve uses, is taken by another program", (advice,))


def is_free(port: int) -> bool:
    import socket

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def file_limits() -> CheckResult:
    try:
        import resource
    except ImportError:
        return CheckResult(OK, "this system has none")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = ("unlimited" if limit == resource.RLIM_INFINITY else limit for limit in limits)
    detail = f"{soft} open files, which a server raises to at most {hard}"
    if isinstance(hard, int) and hard < MANY_FILES:
        return CheckResult(NOTE, detail, (Advice("ulimit -n 65536", f"more than {hard} connections at once, as root"),))
    return CheckResult(OK, detail)


def proxies() -> CheckResult:
    given = {name: os.environ.get(name) or os.environ.get(name.upper(), "") for name in PROXIES}
    used = [f"{name} {re.sub(r'//[^/]*@', '//', value)}" for name, value in given.items() if value]
    if not used:
        return CheckResult(OK, "none")
    around = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")).replace(" ", "").split(",")
    if "*" in around or set(LOCAL) <= set(around):
        return CheckResult(OK, f"{', '.join(used)}; not for this machine")
    why = "clients reach a server on this machine without the proxy"
    advice = Advice(f"export no_proxy={','.join(dict.fromkeys([*filter(None, around), *LOCAL]))}", why)
    return CheckResult(NOTE, f"{', '.join(used)}; clients use them for {' and '.join(LOCAL)} too", (advice,))


def load() -> CheckResult:
    """Reports how busy the cores are with other work, which slows answers."""
    from penstock.config import available_threads

    if not hasattr(os, "getloadavg"):
        return CheckResult(OK, "not known on this system")
    minute, cores = os.getloadavg()[0], available_threads()
    detail = f"{minute:.1f} processes want to run on {cores} cores (mean of a minute)"
    if minute < BUSY * cores:
        return CheckResult(OK, detail)
    slow = f"{detail}: answers take longer while others compute"
    return CheckResult(
        NOTE, slow, (Advice("top", "list other busy processes"),), "fewer other programs on this machine"
    )

"""The rules of the house, kept by a machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.backend.devices import kinds

ROOT = Path(penstock.__file__).parent
LIBRARY = sys.stdlib_module_names

# Imports point down only. A package may import those named after it, and itself.
WAIST = {"types", "errors", "config"}
MAY_IMPORT = {
    "types": {"errors"},
    "errors": set(),
    "plugins": {"errors"},
    "system": set(),
    "config": {"system", "types", "errors"},
    "keys": {"errors", "service_levels", "system"},
    "service_levels": set(),
    "core": {"types", "errors"},
    "templates": {"errors"},
    "text": {"plugins", "system", "templates", "types", "errors"},
    "model": {"plugins", "text"} | WAIST,
    "backend": {"plugins", "system", "model"} | WAIST,
    "planning": {"backend", "model"} | WAIST,
    "engine": {"backend", "core", "system", "model", "planning", "text"} | WAIST,
    "ipc": {"engine", "system"} | WAIST,
    "store": {"system"} | WAIST,
    "llm": {"backend", "ipc", "engine", "text", "model", "store", "service_levels"} | WAIST,
    "fleet": {"backend", "server", "ipc", "engine", "core", "planning", "service_levels", "text"} | WAIST,
    "server": {"ipc", "keys", "model", "plugins", "service_levels", "store", "system", "templates", "text"} | WAIST,
}
STANDARD_LIBRARY_ONLY = {"core", "types", "errors", "config", "system"}
EXTRAS = {"torch", "triton", "ray", "nixl"}
HOMES_OF_EXTRAS = {ROOT / "fleet" / "ray_ground.py", ROOT / "engine" / "kv_transfer" / "nixl.py"}


def home(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} if node.module != "penstock" else {f"penstock.{alias.name}" for alias in node.names}
    return found


MODULES = sorted(path for path in ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    package = home(path)
    names = imports(path)
    ours = {name.split(".")[1] for name in names if name.startswith("penstock.")}
    if package in MAY_IMPORT:
        assert ours <= MAY_IMPORT[package] | {package, "__version__"}
    if package in STANDARD_LIBRARY_ONLY:
        assert {name.split(".")[0] for name in names} <= LIBRARY | {"penstock"}
    if not path.is_relative_to(ROOT / "backend" / "cuda") and path not in HOMES_OF_EXTRAS:
        assert not {name.split(".")[0] for name in names} & EXTRAS


# These decide by what they are told, and nothing else: a test or a simulator can be their clock and their network.
PURE = [f"fleet.{name}" for name in ("index", "holders", "ledger", "route", "queue", "scale", "split", "timing")]
PURE += ["tools.sim.policies", "ipc.request_journal"]
CLOCKS = {"time", "datetime", "sched"}
WAITING = {"asyncio", "threading", "concurrent", "multiprocessing", "subprocess", "signal", "selectors"}
OUTSIDE = {"socket", "ssl", "http", "urllib", "zmq", "os", "io", "pathlib", "tempfile", "shutil", "logging", "mmap"}


def file_of(module: str) -> Path | None:
    """The file of a module of ours, such as `fleet.route`."""
    path = ROOT.joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()), None)


def needed_by(module: str) -> set[Path]:
    """The files of ours that are imported when a module is."""
    found, left = set(), [module]
    while left:
        path = file_of(left.pop())
        if path is not None and path not in found:
            found.add(path)
            left += [name.removeprefix("penstock.") for name in imports(path) if name.startswith("penstock.")]
    return found


@pytest.mark.parametrize("module", PURE)
def test_what_decides_reads_no_clock_and_does_no_io(module: str) -> None:
    for path in needed_by(module):
        assert not {name.split(".")[0] for name in imports(path)} & (CLOCKS | WAITING | OUTSIDE), path
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert not names & {"open", "print", "input"}, path


def test_only_backends_know_a_device_by_name() -> None:
    """Everything else asks the device's declaration (backend/device.py), so a new backend is a folder."""
    name = re.compile(rf"({'|'.join(kinds())})(:.*)?|.*nvidiactl.*")
    for path in MODULES:
        if home(path) != "backend":
            texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
            found = [text for text in texts if isinstance(text, str) and name.fullmatch(text)]
            assert not found, f"{path} names a device"


def test_every_package_has_its_place() -> None:
    assert {home(path) for path in MODULES} <= MAY_IMPORT.keys() | {"cli", "tools", "__init__", "__main__"}


def imported_by(code: str) -> set[str]:
    """The packages that are there when a fresh interpreter has run the code."""
    told = f"{code}\nimport sys; print('imported', *{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split()[1:])


def command(*words: str) -> str:
    return f"import contextlib, penstock.cli.app\nwith contextlib.suppress(SystemExit): penstock.cli.app.app({words})"


def test_import_penstock_is_light() -> None:
    assert not imported_by("import penstock") & {"torch", "ray", "numpy", "starlette"}


SLOW = {"typer", "click", "rich", "jinja2", "pydantic", "msgspec", "zmq", "starlette", "uvicorn", "prometheus_client"}
SLOW |= {"huggingface_hub", "asyncio", "logging", "concurrent", "multiprocessing", "email", "http", "ssl", "socket"}


def test_help_is_light() -> None:
    assert not imported_by(command("--help")) & (SLOW | {"numpy", "tokenizers"})


def test_run_imports_only_what_it_needs(smollm2: Path) -> None:
    """From the start of the process to the first token is what a user waits for."""
    words = ("run", str(smollm2), "The capital of France is", "--raw", "--max-tokens", "1")
    imported = imported_by(command(*words))
    assert "tokenizers" in imported
    assert not imported & SLOW


def test_the_public_names_exist() -> None:
    assert all(getattr(penstock, name) for name in penstock.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        penstock.nonsense  # noqa: B018

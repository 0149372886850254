"""What `penstock doctor` finds on a machine, and the commands that it ends with."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli import machine_checks
from penstock.cli.doctor import CHECKS
from penstock.service_levels import PROFILES

Penstock = Callable[..., tuple[int, str, str]]
QUICK = [check for check in CHECKS if check.__name__ in ("_python", "_default_model", "ports", "proxies")]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.doctor.CHECKS", QUICK)
    monkeypatch.setattr("penstock.cli.doctor._speed", lambda _: ("ok", "not measured"))


def test_it_ends_with_commands_to_type(penstock: Penstock) -> None:
    code, out, _ = penstock("doctor")
    findings, _, commands = out.partition("\n\nCommands to type:\n")
    assert code == 0
    assert findings.splitlines()[-1].startswith("ok    faster with       weights of four bits")
    assert [line.partition("  # ")[0].strip() for line in commands.splitlines()] == [
        "penstock pull smollm2",
        'penstock run "Why is the sky blue?"',
        "penstock plan smollm2",
        "penstock serve --profile chat",
    ]


def test_commands_are_part_of_the_json(penstock: Penstock) -> None:
    findings = {finding["check"]: finding for finding in json.loads(penstock("doctor", "--json")[1])}
    assert findings["default model"]["advice"] == [
        {"command": "penstock pull smollm2", "why": "fetch the default model"}
    ]
    assert findings["python"]["advice"] == []
    assert [each["command"].split()[1] for each in findings["next steps"]["advice"]] == ["run", "plan", "serve"]


def test_each_profile_is_listed_with_its_values(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.doctor.CHECKS", [check for check in CHECKS if check.__name__ == "_profiles"])
    (profiles, *_) = json.loads(penstock("doctor", "--json")[1])
    listed = dict(line.split(": ", 1) for line in profiles["detail"].splitlines())
    assert listed.keys() == PROFILES.keys()
    assert "TTFT target 5000 ms, ITL target 100 ms, longest wait 60 s" in listed["chat"]
    assert "longest wait no limit, prefill budget 2048" in listed["batch"]


def test_commands_can_be_copied_on_a_narrow_terminal(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("doctor", "terminal"):
        monkeypatch.setattr(f"penstock.cli.{module}.line_width", lambda: 60)
    findings, _, commands = penstock("doctor")[1].partition("\n\nCommands to type:\n")
    assert [line for line in findings.splitlines() if len(line) > 60 and len(line[24:].split()) > 1] == []
    lines = commands.splitlines()
    assert [line for line in lines if len(line) > 60] == []
    assert lines[4:6] == ["  penstock plan smollm2", "    # forecast fit and speed"]


def test_a_port_that_is_taken_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not machine_checks.is_free(port)
        monkeypatch.setattr(machine_checks, "PORT", port)
        found = machine_checks.ports()
    assert (found.state, found.advice[0].command[:21]) == ("note", "penstock serve --port")
    assert machine_checks.is_free(port)


def test_a_proxy_that_local_clients_would_use_is_told_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert machine_checks.proxies() == ("ok", "none", (), "")
    monkeypatch.setenv("HTTP_PROXY", "http://me:secret@proxy.example:3128")
    monkeypatch.setenv("no_proxy", "example.org")
    found = machine_checks.proxies()
    assert (found.state, "http://proxy.example:3128" in found.detail) == ("note", True)
    assert "secret" not in f"{found}"
    assert found.advice[0].command == "export no_proxy=example.org,localhost,127.0.0.1"
    monkeypatch.setenv("no_proxy", "localhost, 127.0.0.1")
    assert machine_checks.proxies().state == "ok"


@pytest.mark.skipif(sys.platform == "win32", reason="the program is a script")
def test_a_gpu_without_torch_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.86.15, 9.0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(machine_checks, "installed", lambda name: None if name == "torch" else "3.6")
    found = machine_checks.gpu()
    assert found.detail.startswith("NVIDIA H200, 143771 MiB, driver 570.86.15, compute 9.0; torch missing")
    assert found.advice[0].command == "pip install 'penstock[cuda]'"
    monkeypatch.setattr(machine_checks, "installed", lambda _: "3.6")
    assert machine_checks.gpu() == ("ok", "NVIDIA H200, 143771 MiB, driver 570.86.15, compute 9.0", (), "")
    monkeypatch.setattr(machine_checks, "installed", lambda _: "2.13.0+cu130")
    old = machine_checks.gpu()
    assert (old.state, "built for CUDA 13 and needs driver 580 or newer" in old.detail) == ("note", True)
    monkeypatch.setattr(machine_checks, "installed", lambda _: "2.13.0+cu128")
    assert machine_checks.gpu().state == "ok"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' && exit 9\n")
    assert machine_checks.gpu() == ("note", "nvidia-smi fails: NVIDIA-SMI has failed", (), "")
    program.unlink()
    assert machine_checks.gpu().advice == ()


@pytest.mark.parametrize(
    ("packages", "cuda"),
    [
        ({"torch": "2.13.0+cu126"}, 12),
        ({"torch": "2.13.0", "nvidia-cuda-runtime": "13.0.96"}, 13),
        ({"torch": "2.13.0", "nvidia-cuda-runtime-cu12": "12.8.90"}, 12),
        ({"torch": "2.13.0"}, 0),
        ({}, 0),
    ],
)
def test_the_cuda_of_torch_is_known_by_its_packages(
    monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], cuda: int
) -> None:
    monkeypatch.setattr(machine_checks, "installed", packages.get)
    assert machine_checks.cuda_of_torch() == cuda


@pytest.mark.skipif(sys.platform == "win32", reason="the programs are scripts")
def test_a_gpu_without_a_c_compiler_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine_checks.compiler() == ("ok", "none; only an installation from source needs one", (), "")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    found = machine_checks.compiler()
    assert (found.state, "Triton needs one when it first runs a kernel" in found.detail) == ("note", True)
    assert found.advice[0].command == "apt-get install --yes gcc libc6-dev"
    (tmp_path / "gcc").symlink_to(tmp_path / "nvidia-smi")
    assert machine_checks.compiler().state == "ok"


def test_what_makes_answers_slow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 0.0, 0.0))
    busy = machine_checks.load()
    assert (busy.state, busy.faster) == ("note", "fewer other programs on this machine")
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    assert machine_checks.load().state == "ok"
    monkeypatch.setattr(machine_checks, "installed", lambda _: None)
    found = machine_checks.packages()
    assert "no uvloop (faster answers over HTTP: penstock[server])" in found.detail
    assert "no nixl (KV blocks between machines by RDMA: penstock[nixl])" in found.detail
    assert found.advice[0].command == "pip install 'penstock[server]'"


def test_few_files_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    found = machine_checks.file_limits()
    assert (found.state, found.advice[0].command) == ("note", "ulimit -n 65536")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    assert machine_checks.file_limits() == ("ok", "1024 open files, which a server raises to at most unlimited", (), "")


def test_the_other_checks_find_something() -> None:
    assert machine_checks.compiler().state == "ok"
    assert machine_checks.torch().state == "ok"

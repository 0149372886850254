"""Where Python lacks what only POSIX systems have, as on Windows, commands work without it or say so."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

RECITED = "abcdefghijklménopqrstuvwxyz"

# What stands here is imported by every Python that a test starts, before anything of Penstock. The lock of files has
# its counterpart on Windows, and the standard library's own modules have theirs.
LESS = """
import asyncio, concurrent.futures, faulthandler, mmap, multiprocessing.util, os, signal, subprocess, sys, tempfile
import zmq
import penstock.system.files

for name in ("fcntl", "resource", "pwd", "grp", "termios", "readline", "uvloop"):
    sys.modules[name] = None
for module, names in (
    (os, "fork memfd_create setsid getsid getuid pread pwrite preadv statvfs sysconf sched_getaffinity"),
    (os, "setpriority posix_fallocate O_CLOEXEC"),
    (signal, "SIGUSR1 SIGPROF setitimer ITIMER_PROF"),
    (faulthandler, "register"),
    (mmap, "PROT_READ PROT_WRITE MAP_SHARED"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
has = zmq.has
zmq.has = lambda what: what != "ipc" and has(what)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "less"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(LESS)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def penstock(environment: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_run_answers(reciter: Path, environment: dict[str, str]) -> None:
    done = penstock(environment, "run", reciter, "Go", "--device", "cpu")
    assert (done.returncode, done.stdout) == (0, f"{RECITED}\n"), done.stderr


def test_serve_answers_with_an_engine_behind_a_port(reciter: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "penstock", "serve", str(reciter), "--port", "0"]
    server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr
        lines = []
        while not (found := re.search(r"on (http://\S+) \(engine process \d+\)", lines[-1] if lines else "")):
            lines.append(server.stderr.readline())
            assert lines[-1], lines
        body = {"messages": [{"role": "user", "content": "Go"}]}
        answer = httpx.post(f"{found[1]}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
        assert answer["choices"][0]["message"]["content"] == RECITED
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 0
    finally:
        server.kill()
        server.communicate()


def test_a_fleet_and_blocks_on_disk_are_refused(reciter: Path, environment: dict[str, str], tmp_path: Path) -> None:
    done = penstock(environment, "fleet", "serve", reciter)
    assert done.returncode == 2
    assert "a fleet forks its engines, which this system cannot" in done.stderr
    done = penstock(environment, "run", reciter, "Go", "--kv-disk", tmp_path / "kv")
    assert done.returncode == 1
    assert "kv_disk needs reads that this system does not have" in done.stderr

"""`penstock fleet` as processes: three engines behind one address, and what becomes of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.fleet.steward_link import lives

COMMAND = [sys.executable, "-m", "penstock", "fleet"]
PATIENCE = 120.0


class Run:
    """A gateway, started by a command."""

    def __init__(self, home: Path, *words: str) -> None:
        self.env = os.environ | {"PENSTOCK_HOME": str(home)}
        self.process = subprocess.Popen(
            [*COMMAND, *words, "--port", "0"], env=self.env, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stderr is not None
        self.said: list[str] = []
        for line in self.process.stderr:
            self.said.append(line)
            if address := re.search(r"on (http://\S+) ", line):
                self.url = address[1]
                break
        else:
            raise AssertionError("".join(self.said))
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def health(self) -> list[dict[str, Any]]:
        replicas: list[dict[str, Any]] = httpx.get(f"{self.url}/health", timeout=PATIENCE).json()["replicas"]
        return replicas

    def answer(self) -> str:
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        told = httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE)
        assert told.status_code == 200, told.text
        return str(told.json()["choices"][0]["text"])

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*COMMAND, *words], env=self.env, capture_output=True, text=True, timeout=PATIENCE)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.command("status", "--json").stdout)
        return status

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(PATIENCE)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def fleet(home: Path, smollm2: Path) -> Iterator[Run]:
    run = Run(home, "serve", str(smollm2), "--name", "tiny", "--replicas", "2", "--drain-seconds", "5")
    yield run
    if run.process.poll() is None:
        run.stop()


def pids(replicas: list[dict[str, Any]]) -> dict[str, int]:
    return {each["name"]: each["pid"] for each in replicas if each["state"] == "ready"}


def until(true: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_fleet_is_served_changed_and_taken_over(fleet: Run, home: Path, smollm2: Path) -> None:
    until(lambda: [each["state"] for each in fleet.health()] == ["ready"] * 2)
    assert [each["name"] for each in fleet.health()] == ["tiny-0", "tiny-1"]
    assert fleet.answer() == " Paris.\n\n"
    again = fleet.command("serve", str(smollm2), "--name", "tiny", "--port", "0")
    assert again.returncode == 1
    assert "a fleet called 'tiny' runs already" in again.stderr
    assert "there is no replica 'tiny-7'; the replicas are tiny-0, tiny-1" in fleet.command("drain", "tiny-7").stderr

    answers: list[str] = []
    upgraded = threading.Event()

    def ask() -> None:
        while not upgraded.is_set():
            answers.append(fleet.answer())

    asking = threading.Thread(target=ask)
    asking.start()
    told = fleet.command("upgrade", "--max-rows", "8")
    upgraded.set()
    asking.join()
    assert told.returncode == 0, told.stderr
    assert set(answers) == {" Paris.\n\n"}
    until(lambda: [each["name"] for each in fleet.health() if each["state"] == "ready"] == ["tiny-2", "tiny-3"])

    before = pids(fleet.health())
    os.kill(fleet.process.pid, signal.SIGKILL)
    fleet.process.wait()
    os.kill(fleet.status()["steward"], signal.SIGKILL)
    other = Run(home, "gateway")
    try:
        until(lambda: len(pids(other.health())) == 2)
        assert pids(other.health()) == before
        assert other.answer() == " Paris.\n\n"
        there = {each[kind] for each in other.status()["replicas"] for kind in ("pid", "keeper")}
    finally:
        other.stop()
    assert other.process.returncode == 0
    until(lambda: not any(map(lives, there)))
    assert "no fleet runs here: start one with `penstock fleet serve`" in fleet.command("status").stderr
    assert not list((home / "run").iterdir())


class Streams:
    """Follows some long answers of a gateway, each in a thread."""

    def __init__(self, run: Run, tokens: int = 90, count: int = 3) -> None:
        self._url = run.url
        self._tokens = tokens
        self.texts = ["" for _ in range(count)]
        self.ends = ["" for _ in range(count)]  # how they ended
        self._threads = [threading.Thread(target=self._follow, args=(number,)) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def _follow(self, number: int) -> None:
        asked = {"prompt": f"{number + 1} reasons to build a dam:", "max_tokens": self._tokens, "temperature": 0}
        asked |= {"stream": True, "loop_guard": False, "ignore_eos": True}
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=asked, timeout=PATIENCE) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line[6:])["choices"]
                        self.texts[number] += choice["text"]
                        self.ends[number] = choice["finish_reason"] or ""
        except httpx.HTTPError:
            self.ends[number] = "broken"

    def until_begun(self) -> None:
        until(lambda: all(map(len, self.texts)))

    def wait(self) -> tuple[list[str], list[str]]:
        for thread in self._threads:
            thread.join(PATIENCE)
        return self.texts, self.ends


def test_streams_survive_the_other_gateway_a_larger_fleet_and_a_drain(fleet: Run, home: Path) -> None:
    until(lambda: len(pids(fleet.health())) == 2)
    other = Run(home, "gateway")
    try:
        until(lambda: len(pids(other.health())) == 2)
        assert other.health() == fleet.health()
        epochs = {each["name"]: each["epoch"] for each in other.health()}
        assert len(set(epochs.values())) == 2
        assert all(isinstance(each, int) and each > 0 for each in epochs.values())
        whole, ends = Streams(other).wait()
        assert ends == ["length"] * 3

        lost, kept = Streams(fleet, tokens=1500), Streams(other)
        lost.until_begun()
        kept.until_begun()
        os.kill(fleet.process.pid, signal.SIGKILL)
        fleet.process.wait()
        assert kept.wait() == (whole, ends)
        assert lost.wait()[1] == ["broken"] * 3
        assert {each["name"]: each["epoch"] for each in other.health()} == epochs  # no engine was started again
        until(lambda: not any(each["in_flight"] for each in other.status()["replicas"]))  # what was lost is ended

        streams = Streams(other)
        streams.until_begun()
        told = other.command("scale", "3")
        assert (told.returncode, "tiny has 3 replicas" in told.stderr) == (0, True), told.stderr
        assert streams.wait() == (whole, ends)
        until(lambda: list(pids(other.health())) == ["tiny-0", "tiny-1", "tiny-2"])

        streams = Streams(other)
        streams.until_begun()
        told = other.command("drain", "tiny-0")
        assert (told.returncode, "tiny-0 has ended; tiny has 2 replicas now" in told.stderr) == (0, True), told.stderr
        assert streams.wait() == (whole, ends)
        until(lambda: list(pids(other.health())) == ["tiny-1", "tiny-2"])
    finally:
        other.stop()
    assert other.process.returncode == 0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="parents are found in /proc")
def test_a_signal_to_all_processes_of_a_fleet_lets_answers_end(fleet: Run) -> None:
    """A service manager may send it to each. An engine whose keeper had died of it would stay for a minute."""
    until(lambda: len(pids(fleet.health())) == 2)
    status = fleet.status()
    keepers = {each["keeper"] for each in status["replicas"]}
    forking = {int(Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[1]) for keeper in keepers}
    others = {status["steward"], *keepers, *forking, *pids(fleet.health()).values()}
    streams = Streams(fleet)
    streams.until_begun()
    for pid in (fleet.process.pid, *others):
        os.kill(pid, signal.SIGTERM)
    assert streams.wait()[1] == ["length"] * 3
    began = time.monotonic()
    until(lambda: not any(map(lives, others)))
    assert time.monotonic() - began < 30
    fleet.process.wait(PATIENCE)


def test_what_keeps_the_engines_from_starting_is_said_once(home: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(64))
    env = os.environ | {"PENSTOCK_HOME": str(home)}
    command = [*COMMAND, "serve", str(damaged), "--replicas", "2", "--port", "0"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert not list((home / "run").iterdir()) if (home / "run").exists() else True


def test_a_port_in_use_is_an_error_and_leaves_nothing(home: Path, smollm2: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = os.environ | {"PENSTOCK_HOME": str(home)}
        port = str(taken.getsockname()[1])
        command = [*COMMAND, "serve", str(smollm2), "--replicas", "2", "--port", port]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr

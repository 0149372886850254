"""Runs `penstock serve` in a process of its own, and looks at it from outside: health, metrics, log, processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.traffic.asking import MODEL

WAIT = 120.0  # seconds after which something hangs: much longer than a busy machine takes
SHARED_MEMORY = "/dev/shm/"
SAID = re.compile(r"serving .* on (http://\S+)")
WRONG = re.compile(r"Traceback|^\S+ error |Exception in callback|never retrieved", re.MULTILINE)


@dataclass(frozen=True)
class Process:
    """Is a process that the server started, directly or not."""

    pid: int
    parent: int
    began: str  # tells it from another with the same number
    command: str

    @property
    def alive(self) -> bool:
        return (now := process_of(self.pid)) is not None and now.began == self.began


def process_of(pid: int) -> Process | None:
    """Returns a process; None if there is none or it has ended and waits for its parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
    return None if fields[0] in "ZX" else Process(pid, int(fields[1]), fields[19], command)


def started_by(pid: int) -> list[Process]:
    """Returns all living processes that descend from a process."""
    all_of_them = [process_of(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()]
    children: dict[int, list[Process]] = {}
    for process in filter(None, all_of_them):
        children.setdefault(process.parent, []).append(process)
    found, left = list[Process](), [pid]
    while left:
        found += (these := children.get(left.pop(), []))
        left += [process.pid for process in these]
    return found


def shared_memory_of(pid: int) -> set[Path]:
    """Returns the files in shared memory that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[-1].removesuffix(" (deleted)") for line in lines if SHARED_MEMORY in line)
    return {Path(path) for path in paths}


class Server:
    """Is a running server. Its log goes to a file."""

    def __init__(self, process: subprocess.Popen[bytes], home: Path, before: set[Path]) -> None:
        self.process, self.home, self.log = process, home, home / "log"
        self.seen: set[Process] = set()
        self.shared: set[Path] = set()
        self.of_others = before  # temporary files that were there before it
        self.url = self._until_said()
        self.http = httpx.Client(base_url=self.url, timeout=WAIT)
        self.engine = self.engine_now()

    def _until_said(self) -> str:
        deadline = time.monotonic() + WAIT
        while (said := SAID.search(self.log.read_text())) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server does not start: {self.log.read_text()}")
            time.sleep(0.05)
        return said[1]

    def engine_now(self) -> int | None:
        """Returns the pid of the engine, if there is one."""
        engine = self.http.get("/health").json()["engine"]
        return engine and int(engine["pid"])

    def processes(self) -> dict[str, Process]:
        """Returns the server's processes by what they do. There may be none for a part at the moment."""
        children = self._look()
        engine, found = self.engine_now(), dict[str, Process]()
        forking = next((each for each in children if "forkserver import" in each.command), None)
        for child in children:
            if child.pid == engine:
                found["engine"] = child
            elif "penstock.templates" in child.command:
                found["render worker"] = child
            elif child == forking:
                found["fork parent"] = child
            elif forking is not None and child.parent == forking.pid:
                found["standby"] = child
        return found

    def _look(self) -> list[Process]:
        """Notes the living processes and their shared memory."""
        children = started_by(self.process.pid)
        self.seen |= {*children}
        for pid in (self.process.pid, *(child.pid for child in children)):
            self.shared |= shared_memory_of(pid)
        return children

    def metrics(self) -> dict[str, float]:
        lines = [line for line in self.http.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def wrong(self) -> list[str]:
        """Returns lines of the log that no request should cause."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if WRONG.search(line)]

    def until_idle(self) -> dict[str, float]:
        """Returns the metrics once no request runs or waits."""
        deadline = time.monotonic() + WAIT
        while True:
            found = self.metrics()
            if not sum(found[f'penstock_requests{{state="{state}"}}'] for state in ("running", "waiting")):
                return found
            if time.monotonic() > deadline:
                raise RuntimeError("requests still run although every client has left")
            time.sleep(0.1)

    def end(self) -> list[str]:
        """Stops the server as a service manager does; returns what is left of it after that."""
        self._look()
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(WAIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return ["the server did not stop"]
        files = {*(self.home / "tmp").iterdir()} - self.of_others
        return [*self.left(), *(f"{path} is left" for path in sorted(files))]

    def left(self) -> list[str]:
        """Returns the processes and the shared memory that are there some time after the server has ended, and ends
        the processes."""
        deadline = time.monotonic() + 20
        while (alive := [each for each in self.seen if each.alive]) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in alive:
            os.kill(process.pid, signal.SIGKILL)
        processes = [f"process {process.pid} is left: {process.command[:100]}" for process in alive]
        return processes + [f"{path} is left" for path in sorted(self.shared) if path.exists()]


@contextmanager
def serving(
    home: Path, model: Path | str, *options: str, environment: dict[str, str] | None = None
) -> Iterator[Server]:
    """Serves the model as "smollm2" with the defaults that users have. The home keeps all that is written."""
    temporary, log = home / "tmp", home / "log"
    temporary.mkdir(parents=True, exist_ok=True)
    ours = {"PENSTOCK_HOME": str(home), "TMPDIR": str(temporary)} | (environment or {})
    before = {*temporary.iterdir()}  # a server that was killed left them
    command = [sys.executable, "-m", "penstock", "serve", str(model), "--name", MODEL, "--port", "0", *options]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | ours)
    try:
        yield Server(process, home, before)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()

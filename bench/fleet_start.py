"""Measures how long `penstock fleet serve` takes to answer, and what its gateway takes of memory.

    python bench/fleet_start.py --replicas 3 --times 5

Prints the least, the middle and the most seconds from the start of the command to the first answer, and until all
replicas are ready, the gateway's resident memory in MB after the first answer, and the seconds that it takes to end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

PATIENCE = 120.0
BODY = {"prompt": "The capital of France is", "max_tokens": 1}


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def until(true: Any) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            if true():
                return
        except OSError:
            pass
        time.sleep(0.01)
    raise TimeoutError("the fleet has not answered")


def measure(model: str, replicas: int, port: int) -> tuple[float, float, float, float]:
    command = [sys.executable, "-m", "penstock", "fleet", "serve", model, "--replicas", str(replicas)]
    begun, url = time.monotonic(), f"http://127.0.0.1:{port}"
    gateway = subprocess.Popen(
        [*command, "--port", str(port), "--name", f"bench-{os.getpid()}"], stderr=subprocess.DEVNULL
    )
    until(lambda: ask(f"{url}/v1/completions", BODY))
    answered = time.monotonic() - begun
    until(lambda: sum(each["state"] == "ready" for each in ask(f"{url}/health")["replicas"]) == replicas)
    ready = time.monotonic() - begun
    pages = int(Path(f"/proc/{gateway.pid}/statm").read_text().split()[1])
    ended = time.monotonic()
    gateway.send_signal(signal.SIGINT)
    gateway.wait(PATIENCE)
    return answered, ready, pages * os.sysconf("SC_PAGE_SIZE") / 1e6, time.monotonic() - ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--times", type=int, default=3)
    given = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    runs = [measure(given.model, given.replicas, port) for _ in range(given.times)]
    for what, figures in zip(
        ("first answer s", "all ready s", "gateway MB", "end s"), zip(*runs, strict=True), strict=True
    ):
        print(f"{what:15} {min(figures):7.2f} {median(figures):7.2f} {max(figures):7.2f}")


if __name__ == "__main__":
    main()

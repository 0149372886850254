"""Kills Ray's head under streams, and looks whether anybody notices.

    pip install 'penstock[fleet]' && python bench/ray_head.py --seconds 90

A cluster of three nodes on this machine, a fleet of one replica on each, and clients that stream answers again and
again. After a while the process that is Ray's head (the GCS) is killed, and stays dead for the given time; Ray then
ends its other processes by itself. Every answer is compared with the first one to the same prompt. Prints how many
streams were whole, how many were not, the longest time between two chunks, and whether an engine was started again;
exits with 1 if something was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import httpx

PATIENCE = 120.0
BEFORE, AFTER = 10.0, 10.0  # seconds of streams before the kill and after the time without a head
TOKENS = 64
REPLICAS = 3


class Clients:
    """Stream answers again and again, each in a thread, until told to stop."""

    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self._first: dict[int, str] = {}  # the answer to each prompt
        self._stopped = threading.Event()
        self.whole, self.other, self.longest = 0, list[str](), 0.0
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def _run(self, number: int) -> None:
        while not self._stopped.is_set():
            try:
                text, gap = self._stream(number)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                with self._lock:
                    self.other.append(f"{type(error).__name__}: {error}")
                time.sleep(1.0)
                continue
            with self._lock:
                same = text == self._first.setdefault(number, text)
                self.whole += same
                self.other += [] if same else [text]
                self.longest = max(self.longest, gap)

    def _stream(self, number: int) -> tuple[str, float]:
        """Returns an answer, and the longest time between two of its chunks."""
        asked = {"prompt": f"{number + 1} reasons to build a dam:", "max_tokens": TOKENS, "temperature": 0}
        asked |= {"stream": True, "loop_guard": False, "ignore_eos": True}
        text, end, gap, before = "", "", 0.0, None
        with httpx.stream("POST", f"{self._url}/v1/completions", json=asked, timeout=PATIENCE) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    now = time.monotonic()
                    gap, before = max(gap, now - (before or now)), now
                    (choice,) = json.loads(line[6:])["choices"]
                    text += choice["text"]
                    end = choice["finish_reason"] or end
        if end != "length":
            raise ValueError(f"the stream ended with {end!r} after {len(text)} characters")
        return text, gap


def serve(model: str, address: str) -> tuple[subprocess.Popen[str], str]:
    """Starts a fleet on the cluster; returns its gateway and where that listens."""
    command = [sys.executable, "-m", "penstock", "fleet", "serve", model, "--replicas", str(REPLICAS), "--threads", "1"]
    command += ["--ground", "ray", "--ray", address, "--port", "0", "--name", f"bench-{os.getpid()}"]
    gateway = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert gateway.stderr is not None
    for line in gateway.stderr:
        if found := re.search(r"on (http://\S+) ", line):
            threading.Thread(target=gateway.stderr.read, daemon=True).start()
            return gateway, found[1]
    raise SystemExit("the fleet has not started")


def engines(url: str) -> dict[str, int]:
    replicas: list[dict[str, Any]] = httpx.get(f"{url}/health", timeout=PATIENCE).json()["replicas"]
    return {each["name"]: each["epoch"] for each in replicas if each["state"] == "ready"}


def measure(model: str, seconds: float, clients: int) -> dict[str, Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    gateway = None
    try:
        for _ in range(REPLICAS - 1):
            cluster.add_node(num_cpus=1)
        gateway, url = serve(model, cluster.address)
        until = time.monotonic() + PATIENCE
        while len(engines(url)) < REPLICAS and time.monotonic() < until:
            time.sleep(0.1)
        before, asking = engines(url), Clients(url, clients)
        time.sleep(BEFORE)
        cluster.head_node.kill_gcs_server()
        time.sleep(seconds + AFTER)
        asking.stop()
        return {
            "seconds_without_head": seconds,
            "whole": asking.whole,
            "different_or_lost": len(asking.other),
            "first_of_these": asking.other[:1],
            "longest_gap_s": round(asking.longest, 3),
            "engines": len(before),
            "engines_started_again": sum(engines(url).get(name) != epoch for name, epoch in before.items()),
        }
    finally:
        if gateway is not None:
            gateway.send_signal(signal.SIGINT)
            gateway.wait(PATIENCE)
        cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=90.0, help="for which there is no head")
    parser.add_argument("--clients", type=int, default=3)
    given = parser.parse_args()
    found = measure(given.model, given.seconds, given.clients)
    print(json.dumps(found, indent=2))
    lost = found["different_or_lost"] or found["engines_started_again"] or found["engines"] < REPLICAS
    raise SystemExit(1 if lost or not found["whole"] else 0)


if __name__ == "__main__":
    main()

"""Measures how long a request waits for a model that is stored, and for one that is awake.

    python bench/cold_start.py MODEL OTHER [--rounds 5] [--port 8124] [--packed-cache 0]

Starts `penstock serve MODEL OTHER`, so that models are loaded when they are asked for. A round asks MODEL twice for a
short answer and then unloads it. The first round is left out: it also reads the file and finishes the server's imports,
and afterwards the engine writes its packed weights. Other options go to the server: with `--packed-cache 0` weights are
packed in every round.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

ASKED = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True, "temperature": 0}
IDLE_SECONDS = 2.0  # after the first round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs=2, metavar="MODEL", help="the model that is measured, and another")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=8124)
    args, options = parser.parse_known_args()
    command = [sys.executable, "-m", "penstock", "serve", *args.models, "--port", str(args.port), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        ready = server.stderr.readline()
        threading.Thread(target=server.stderr.read, daemon=True).start()
        try:
            report(args.port, args.rounds, ready)
        finally:
            server.terminate()


def report(port: int, rounds: int, ready: str) -> None:
    if not ready.startswith("serving"):
        raise SystemExit(f"the server did not start: {ready}")
    model = json.loads(call(port, "GET", "/v1/models").read())["data"][0]["id"]
    stored, awake = [], []
    for _ in range(rounds + 1):
        stored.append(first_token(port, model))
        awake.append(first_token(port, model))
        time.sleep(IDLE_SECONDS if len(stored) == 1 else 0)
        call(port, "POST", "/models/unload", {"model": model}).read()
    for name, seconds in (("stored", stored[1:]), ("awake", awake[1:])):
        low, high = min(seconds) * 1e3, max(seconds) * 1e3
        print(
            f"{model}, {name}: {statistics.median(seconds) * 1e3:.1f} ms to the first token ({low:.1f} to {high:.1f})"
        )


def first_token(port: int, model: str) -> float:
    """Returns the seconds from a request to the first text of its answer."""
    began = time.perf_counter()
    answer = call(port, "POST", "/v1/chat/completions", {"model": model, **ASKED})
    while line := answer.readline():
        if line.startswith(b"data: {"):
            choices = json.loads(line[6:])["choices"]
            if choices and choices[0]["delta"].get("content"):
                break
    seconds = time.perf_counter() - began
    answer.read()
    return seconds


def call(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {"content-type": "application/json"})
    return connection.getresponse()


if __name__ == "__main__":
    main()

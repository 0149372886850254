"""Reads request traces: Mooncake's and Dynamo's JSON lines and Azure's CSV, optionally compressed with gzip."""

from __future__ import annotations

import gzip
import json
from collections.abc import Hashable, Iterable
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import InvalidRequest

MOONCAKE_BLOCK = 512  # tokens per block in Mooncake's traces
AZURE_BLOCK = 16  # Azure's traces have no blocks; this is the engine's own size
AZURE_COLUMNS = "TIMESTAMP,ContextTokens,GeneratedTokens"


class TracedRequest(NamedTuple):
    """Describes one request of a trace."""

    arrival: float  # milliseconds after the first request
    prompt: int  # tokens
    output: int  # tokens
    hashes: tuple[int, ...] = ()  # a number for each full block with its prefix; empty: no shared prefix


class Trace(NamedTuple):
    """Holds a trace's requests in order of arrival."""

    block_size: int
    requests: list[TracedRequest]

    def at_speed(self, factor: float) -> Trace:
        """Returns the trace with arrivals `factor` times as fast."""
        return Trace(self.block_size, [each._replace(arrival=each.arrival / factor) for each in self.requests])

    def scaled(self, factor: float) -> Trace:
        """Returns the trace with the lengths of prompts, answers and blocks multiplied, so that shared prefixes are
        preserved. Each length is at least one token.
        """
        block = max(round(self.block_size * factor), 1)

        def scale(each: TracedRequest) -> TracedRequest:
            rest = max(round((each.prompt - len(each.hashes) * self.block_size) * factor), not each.hashes)
            return each._replace(prompt=len(each.hashes) * block + rest, output=max(round(each.output * factor), 1))

        return Trace(block, [scale(each) for each in self.requests])


def read_trace(path: Path) -> Trace:
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    lines = [line for line in data.decode(errors="replace").splitlines() if line.strip()]
    if not lines:
        raise InvalidRequest(f"{path} has no requests")
    try:
        return _azure(lines) if lines[0].startswith(AZURE_COLUMNS) else _json_lines(lines)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise InvalidRequest(
            f"{path} is not a trace of Mooncake, Dynamo or Azure: {type(error).__name__} {error}. A line of Mooncake's "
            "has timestamp, input_length, output_length and hash_ids"
        ) from error


def _json_lines(lines: Iterable[str]) -> Trace:
    rows = [json.loads(line) for line in lines]
    return _dynamo(rows) if "event" in rows[0] else _mooncake(rows)


def _mooncake(rows: Iterable[dict[str, Any]]) -> Trace:
    reader = _Reader(MOONCAKE_BLOCK)
    for row in rows:
        reader.add(row["timestamp"], row["input_length"], row["output_length"], row["hash_ids"])
    return reader.trace()


def _dynamo(rows: Iterable[dict[str, Any]]) -> Trace:
    ended = [row["event"]["request"] for row in rows if row["event"].get("event_type") == "request_end"]
    reader = _Reader(int(ended[0]["replay"]["trace_block_size"]))
    for request in ended:
        replay = request["replay"]
        begin, hashes = request["request_received_ms"], replay["input_sequence_hashes"]
        reader.add(begin, replay["input_length"], request["output_tokens"], hashes)
    return reader.trace()


def _azure(lines: list[str]) -> Trace:
    reader = _Reader(AZURE_BLOCK)
    for line in lines[1:]:
        when, prompt, output = line.split(",")[:3]
        reader.add(datetime.fromisoformat(when[:26]).timestamp() * 1000, int(prompt), int(output), ())
    return reader.trace()


class _Reader:
    """Collects requests, and numbers each block together with its prefix."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._requests: list[TracedRequest] = []
        self._numbers: dict[tuple[int, Hashable], int] = {}  # keys: number of the previous block, the trace's name

    def add(self, arrival: float, prompt: int, output: int, names: Iterable[Hashable]) -> None:
        if prompt < 1 or output < 0 or not isfinite(arrival):
            raise ValueError(f"a request at {arrival} with {prompt} prompt tokens and {output} output tokens")
        hashes, parent = [], -1
        for name in tuple(names)[: prompt // self._block_size]:
            parent = self._numbers.setdefault((parent, name), len(self._numbers))
            hashes.append(parent)
        self._requests.append(TracedRequest(float(arrival), prompt, max(output, 1), tuple(hashes)))

    def trace(self) -> Trace:
        """Returns the requests in order of arrival, with times from the first one."""
        requests = sorted(self._requests, key=lambda each: each.arrival)
        begin = requests[0].arrival
        return Trace(self._block_size, [each._replace(arrival=each.arrival - begin) for each in requests])

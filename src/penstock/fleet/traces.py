"""Reads traces of requests: Mooncake's and Dynamo's JSON lines, Azure's CSV, each also compressed with gzip."""

from __future__ import annotations

import gzip
import json
from collections.abc import Hashable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import InvalidRequest

MOONCAKE_BLOCK = 512  # tokens of a block in Mooncake's traces
AZURE_BLOCK = 16  # Azure's traces have no blocks; this is the engine's own size
AZURE_COLUMNS = "TIMESTAMP,ContextTokens,GeneratedTokens"


class TracedRequest(NamedTuple):
    """Describes one request of a trace."""

    arrival: float  # milliseconds after the first request
    prompt: int  # tokens
    output: int  # tokens
    hashes: tuple[Hashable, ...] = ()  # of the prompt's full blocks; empty: it shares no prefix


class Trace(NamedTuple):
    """Holds the requests of a trace in the order of their arrival."""

    block_size: int
    requests: list[TracedRequest]

    def at_speed(self, factor: float) -> Trace:
        """Returns the trace with its requests arriving so many times as fast."""
        return Trace(self.block_size, [each._replace(arrival=each.arrival / factor) for each in self.requests])


def read_trace(path: Path) -> Trace:
    """Reads a trace and finds out its format."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    lines = [line for line in data.decode(errors="replace").splitlines() if line.strip()]
    if not lines:
        raise InvalidRequest(f"{path} has no requests")
    try:
        trace = _azure(lines) if lines[0].startswith(AZURE_COLUMNS) else _json_lines(lines)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise InvalidRequest(
            f"{path} is no trace of Mooncake, Dynamo or Azure: {type(error).__name__} {error}. A line of Mooncake's "
            "has timestamp, input_length, output_length and hash_ids"
        ) from error
    return _from_zero(trace)


def _from_zero(trace: Trace) -> Trace:
    requests = sorted(trace.requests, key=lambda each: each.arrival)
    begin = requests[0].arrival
    return Trace(trace.block_size, [each._replace(arrival=each.arrival - begin) for each in requests])


def _json_lines(lines: Iterable[str]) -> Trace:
    rows = [json.loads(line) for line in lines]
    return _dynamo(rows) if "event" in rows[0] else _mooncake(rows)


def _mooncake(rows: Iterable[dict[str, Any]]) -> Trace:
    return Trace(
        MOONCAKE_BLOCK,
        [
            _request(row["timestamp"], row["input_length"], row["output_length"], row["hash_ids"], MOONCAKE_BLOCK)
            for row in rows
        ],
    )


def _dynamo(rows: Iterable[dict[str, Any]]) -> Trace:
    """Reads the requests that ended; other events of the trace say nothing that matters here."""
    ended = [row["event"]["request"] for row in rows if row["event"].get("event_type") == "request_end"]
    size = int(ended[0]["replay"]["trace_block_size"])
    requests = []
    for request in ended:
        replay = request["replay"]
        begin, hashes = request["request_received_ms"], replay["input_sequence_hashes"]
        requests.append(_request(begin, replay["input_length"], request["output_tokens"], hashes, size))
    return Trace(size, requests)


def _azure(lines: list[str]) -> Trace:
    requests = []
    for line in lines[1:]:
        when, prompt, output = line.split(",")[:3]
        moment = datetime.fromisoformat(when[:26]).timestamp() * 1000
        requests.append(_request(moment, int(prompt), int(output), (), AZURE_BLOCK))
    return Trace(AZURE_BLOCK, requests)


def _request(arrival: float, prompt: int, output: int, hashes: Iterable[Hashable], block_size: int) -> TracedRequest:
    if prompt < 1 or output < 0:
        raise ValueError(f"a request with {prompt} prompt tokens and {output} output tokens")
    return TracedRequest(float(arrival), prompt, max(output, 1), tuple(hashes)[: prompt // block_size])

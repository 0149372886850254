"""Loads models with one or two fields of their metadata replaced, and fails where one crashes, hangs or takes memory.

Each case runs in a process of its own with a limit on its address space. A case is refused with an error of ours, or it
is loaded and computes a token. Everything else is printed, and the exit status is 1.

    python scripts/fuzz_models.py                          # every field of every small model, each value: an hour
    python scripts/fuzz_models.py --cases 200 --seed 1     # so many of them, at random
    python scripts/fuzz_models.py --huge                   # huge numbers and long lists alone: a third of an hour
    python scripts/fuzz_models.py --only llama3            # models whose name contains this
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from penstock.config import configure
from penstock.engine.build import open_engine
from penstock.errors import PenstockError
from penstock.model.gguf.reader import ARRAY, NUMBERS, Cursor, Metadata, read_entry, read_gguf, read_head
from penstock.model.load import open_checkpoint, text_of
from penstock.model.open_files import map_file
from penstock.planning.forecast import make_forecasts
from penstock.types import Failed, Request, SamplingParams

GOLDENS = Path(__file__).parents[1] / "tests" / "models" / "goldens"
ALIGNMENT = 32  # of tensors in a GGUF file
ROOM = 192 << 20  # bytes of address space that a case may take, beside what the process had: a model here has 0.1 MB
SECONDS = 60  # of processor time
SIZES = (0, 1, 2, 3, 5, 64, 255, 4096, 10_000, 65_536, 1 << 20, (1 << 24) + 1, (1 << 31) - 1, (1 << 32) - 1)
WIDE = (*SIZES, (1 << 62) + 1, -1)
FLOATS = (0.0, -1.0, 1e-30, 0.5, 3.0, 1e9, 1e30, float("inf"), float("nan"))
OPTIONS = {"device": "cpu", "threads": 1, "kv_memory": 1 << 20, "max_rows": 2, "kv_ram": "0"}


@dataclass(frozen=True)
class Case:
    """Replaces the value of one field of a model's file."""

    model: str
    gguf: bool
    field: str  # for config.json with dots
    value: Any

    @property
    def huge(self) -> bool:
        """Returns whether the value is a large number, or a list that is long or begins with one."""
        match self.value:
            case bool() | float():
                return False
            case int():
                return 10_000 <= self.value < 1 << 32
            case [first, *_]:
                return len(self.value) > 1000 or (type(first) is int and 10_000 <= first < 1 << 32)
        return False

    def write(self, folder: Path) -> Path:
        """Writes the changed model; returns what is opened."""
        source = GOLDENS / self.model
        if self.gguf:
            path = folder / "model.gguf"
            path.write_bytes(with_gguf_value(source / "model.gguf", self.field, self.value))
            return path
        for file in source.glob("*.safetensors*"):
            (folder / file.name).symlink_to(file)
        values = json.loads((source / "config.json").read_text())
        at = values
        *outer, last = self.field.split(".")
        for key in outer:
            at = at[key]
        at[last] = self.value
        (folder / "config.json").write_text(json.dumps(values))
        return folder


# -- cases ------------------------------------------------------------------------------------------------------------


def all_cases() -> Iterator[Case]:
    """Yields every field of every golden with each value that its type may have."""
    for folder in sorted(GOLDENS.iterdir()):
        if (folder / "model.gguf").exists():
            for field, value in read_gguf(folder / "model.gguf").metadata.items():
                yield from (Case(folder.name, True, field, other) for other in others(value))
        for field, value in fields(json.loads((folder / "config.json").read_text())):
            yield from (Case(folder.name, False, field, other) for other in others(value))


def fields(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the fields of a config.json, those of nested tables with dots."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from fields(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def others(value: Any) -> Iterator[Any]:
    """Yields other values of the same type; of a list, other first items and other lengths."""
    match value:
        case bool():
            yield not value
        case int():
            yield from (*WIDE, value + 1, 2 * value)
        case float():
            yield from FLOATS
        case [*items] if items:
            yield from (items[:-1], items * 2, [*items, items[0]], items * 5000)
            yield from ([other, *items[1:]] for other in others(items[0]))


def with_gguf_value(file: Path, field: str, value: Any) -> bytes:
    """Returns a GGUF file with another value of a field. What follows a longer head is aligned again."""
    cursor = Cursor(map_file(file))
    tensors, keys = read_head(cursor)
    metadata = Metadata(cursor, keys)
    for _ in range(tensors):
        read_entry(cursor)
    data, end = cursor.data, cursor.at
    kind, start = metadata._places[field]
    after = Cursor(data, start)
    after.skip_value(kind)
    new = packed(kind, value)
    if kind == ARRAY:
        (inner,) = struct.unpack_from("<I", data, start)
        new = struct.pack("<IQ", inner, len(value)) + b"".join(packed(inner, one) for one in value)
    head = data[:start] + new + data[after.at : end]
    return head + bytes(-len(head) % ALIGNMENT) + data[end + -end % ALIGNMENT :]


def packed(kind: int, value: Any) -> bytes:
    """Returns a value as a GGUF file has it. Numbers that its type cannot hold are cut."""
    match value:
        case str():
            return struct.pack("<Q", len(value)) + value.encode()
        case bool() | float():
            return NUMBERS[kind].pack(value)
        case int():
            size = NUMBERS[kind].size
            return (value % (1 << 8 * size)).to_bytes(size, "little")
    return b""


# -- running ----------------------------------------------------------------------------------------------------------


def run(path: Path) -> None:
    """Describes a model as `penstock show` does, loads it and computes a token."""
    checkpoint = open_checkpoint(path)
    with suppress(PenstockError):  # no golden has a tokenizer
        text_of(checkpoint)
    config = configure(path, OPTIONS)
    make_forecasts(config, checkpoint, 1, lambda *_: None)
    engine = open_engine(config)
    try:
        engine.add(Request(1, (1, 2, 3), SamplingParams(temperature=0, ignore_eos=True), 2))
        while not engine.idle:
            for event in engine.step():
                if isinstance(event, Failed) and event.code == "engine_error":
                    raise RuntimeError(event.message)
    finally:
        engine.close()


def outcome(case: Case) -> str:
    """Runs a case in a child; returns "loaded", "refused", or what went wrong."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reading)
        os.write(writing, _in_child(case).encode()[:60_000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return said or "ended without a word"


def _in_child(case: Case) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = case.write(Path(folder))
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * os.sysconf("SC_PAGE_SIZE") + ROOM
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            run(path)
            return "loaded"
        except PenstockError:
            return "refused"
        except BaseException:
            return traceback.format_exc()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=0, help="so many cases; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--huge", action="store_true", help="only values that are much larger than the model's own")
    given = parser.parse_args()
    os.environ["PENSTOCK_HOME"] = tempfile.mkdtemp()
    cases = [case for case in all_cases() if given.only in case.model and (case.huge or not given.huge)]
    if given.cases:
        cases = Random(given.seed).sample(cases, min(given.cases, len(cases)))
    counts: dict[str, int] = {"loaded": 0, "refused": 0, "bad": 0}
    for case in cases:
        found = outcome(case)
        counts[found if found in counts else "bad"] += 1
        if found not in counts:
            kind = "gguf" if case.gguf else "config.json"
            print(f"{case.model} {kind} {case.field} = {str(case.value)[:80]}: {found}", flush=True)
    print(f"{len(cases)} cases: {counts['loaded']} loaded, {counts['refused']} refused, {counts['bad']} bad")
    return 1 if counts["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Writes a bundle about a dead engine: its machine, its last work and its requests, so that the death can be understood
and replayed. Tokens are included only if that is allowed."""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from penstock import __version__
from penstock.config import TOKENS, Config, home
from penstock.engine.flight_recorder import FlightRecord
from penstock.ipc.request_shapes import without_text
from penstock.system.files import make_private_folder
from penstock.types import Hello, Limits, Request

log = logging.getLogger(__name__)

KEPT = 8  # bundles
SUFFIX = ".json"
DRIVER = Path("/proc/driver/nvidia/version")  # its first line names the version of the GPU's driver


class BundledRequest(msgspec.Struct):
    """Describes a request that was in flight. `message` is the request itself, in msgpack."""

    id: int
    suspect: bool  # the engine was working on it, and had not answered it yet
    prompt_tokens: int
    generated_tokens: int
    max_tokens: int
    message: bytes


class PostMortem(msgspec.Struct):
    """Holds the contents of a bundle."""

    version: str
    python: str
    packages: dict[str, str]
    platform: str
    when: str
    reason: str
    stack: str
    config: dict[str, Any]
    limits: Limits
    flight: FlightRecord
    requests: list[BundledRequest]
    tokens: bool  # the requests have their own tokens, not made-up ones


def post_mortem_home() -> Path:
    return home() / "post-mortem"


def describe(
    config: Config, hello: Hello, reason: str, stack: str, flight: FlightRecord, requests: Sequence[Request]
) -> PostMortem:
    """Returns a bundle about an engine that died with these requests."""
    tokens, vocab = config.post_mortem == TOKENS, hello.limits.vocab
    kept = requests if tokens else [without_text(request, vocab) for request in requests]
    return PostMortem(
        version=__version__,
        python=sys.version.split()[0],
        packages=_versions(),
        platform=f"{platform.platform()}, {os.cpu_count()} cores",
        when=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        reason=reason,
        stack=stack,
        config=msgspec.to_builtins(replace(config, secret="")),
        limits=hello.limits,
        flight=flight,
        requests=[_bundled(request, flight.suspects) for request in kept],
        tokens=tokens,
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in ("numpy", "msgspec", "pyzmq", "torch", "triton"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    with suppress(OSError, IndexError):
        found[DRIVER.parent.name] = DRIVER.read_text().splitlines()[0]
    return found


def _bundled(request: Request, suspects: Collection[int]) -> BundledRequest:
    return BundledRequest(
        request.id,
        request.id in suspects,
        len(request.prompt),
        len(request.generated),
        request.max_tokens,
        msgspec.msgpack.encode(request),
    )


def write(bundle: PostMortem) -> Path:
    """Writes a bundle to the folder of bundles, of which it keeps the last ones; returns its path."""
    folder = post_mortem_home()
    make_private_folder(folder)
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns()}{SUFFIX}"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(bundle)))
    for old in sorted(folder.glob(f"*{SUFFIX}"), key=lambda each: each.stat().st_mtime_ns)[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def write_about(
    config: Config, hello: Hello, reason: str, stack: str, flight: FlightRecord, requests: Sequence[Request]
) -> None:
    """Writes a bundle about an engine that died with these requests. Errors are only logged."""
    try:
        path = write(describe(config, hello, reason, stack, flight, requests))
        log.error("what is known of the engine's death is in %s; `penstock replay` runs it again", path)
    except Exception:
        log.exception("what is known of the engine's death could not be written")


def read(path: Path) -> PostMortem:
    """Returns the bundle in a file; raises OSError or msgspec.ValidationError for other files."""
    return msgspec.json.decode(path.read_bytes(), type=PostMortem)


def to_replay(bundle: PostMortem) -> tuple[Config, list[Request]]:
    """Returns the config and the requests with which a death can be replayed: those that the engine was working on
    first."""
    config = replace(msgspec.convert(bundle.config, Config), post_mortem="off")
    ordered = sorted(bundle.requests, key=lambda request: not request.suspect)
    return config, [msgspec.msgpack.decode(request.message, type=Request) for request in ordered]

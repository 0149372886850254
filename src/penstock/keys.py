"""Keeps API keys: a file lists the users of a server, with only hashes of their keys.

A key is 256 random bits, so its plain SHA-256 reveals nothing: an attacker would have to try all keys. A slow hash, as
for passwords that people choose, would not protect better and would cost time with every request.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.errors import ConfigError
from penstock.service_levels import Targets
from penstock.system.files import make_private_folder

PREFIX = "sk-penstock-"  # marks a key for people and secret scanners

log = logging.getLogger(__name__)

NAME = r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}\Z"
Name = Annotated[str, Meta(pattern=NAME)]
Most = Annotated[int, Meta(ge=1, le=2**53)]
Weight = Annotated[float, Meta(ge=0.001, le=1000)]
Priority = Annotated[int, Meta(ge=-(2**31), le=0)]
Moment = Annotated[datetime, Meta(tz=True)]


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    name: Name
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    created: Moment
    expires: Moment | None = None
    requests_per_minute: Most | None = None
    tokens_per_minute: Most | None = None
    concurrent: Most | None = None  # requests at once
    weight: Weight = 1.0  # share of the engine: twice the weight, twice the work
    priority: Priority = 0  # the lowest number, which is served first, that its requests may ask for
    ttft_target_ms: Most | None = None  # default target of its requests
    itl_target_ms: Most | None = None
    models: tuple[str, ...] = ()  # allowed models; empty: all
    admin: bool = False  # may pull, create and delete models
    monitor: bool = False  # may read /metrics

    @property
    def targets(self) -> Targets:
        """Returns the targets of latency of its requests."""
        ttft, itl = (time and time / 1000 for time in (self.ttft_target_ms, self.itl_target_ms))
        return Targets(ttft, itl)

    def expired(self) -> bool:
        return self.expires is not None and self.expires <= now()


class KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[Key]


def now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def read(path: Path) -> list[Key]:
    try:
        return _checked(msgspec.json.decode(path.read_bytes(), type=KeyFile).keys)
    except FileNotFoundError:
        raise ConfigError(f"there is no key file {path}: `penstock keys add NAME --file {path}` makes one") from None
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a key file: {error}") from error


def _checked(keys: list[Key]) -> list[Key]:
    names = [key.name for key in keys]
    if twice := {name for name in names if names.count(name) > 1}:
        raise msgspec.ValidationError(f"two keys are called {min(twice)}")
    return keys


@contextmanager
def changing(path: Path) -> Iterator[list[Key]]:
    """Yields the file's keys, to be changed in place. They are written if the block does not raise, all or none. A
    draft next to the file locks out other writers meanwhile."""
    path = path.resolve()
    make_private_folder(path.parent)
    draft = path.with_name(f"{path.name}.draft")
    try:
        opened = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"another process is changing {path}; if none is, delete {draft}") from None
    try:
        with open(opened, "wb") as file:
            keys = read(path) if path.exists() else []
            yield keys
            file.write(msgspec.json.format(msgspec.json.encode(KeyFile(keys)), indent=1) + b"\n")
        os.replace(draft, path)
    except BaseException:
        draft.unlink()
        raise


class Keyring:
    """Knows a file's keys: it checks the file with every request and reads it if it has changed. While it cannot be
    read, the previous keys stay valid, and the log has a warning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._look()
        self._keys: Sequence[Key] = read(path)

    def find(self, given: Sequence[bytes]) -> Key | None:
        """Returns the key that one of those given is. How long it takes does not depend on which, nor on how alike they
        are."""
        self._refresh()
        found = None
        for digested in map(digest, given):
            for key in self._keys:
                if hmac.compare_digest(key.sha256, digested):
                    found = key
        return found

    def named(self, name: str) -> Key | None:
        self._refresh()
        return next((key for key in self._keys if key.name == name), None)

    def _refresh(self) -> None:
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = read(self._path)
        except ConfigError as error:
            log.warning("%s; the keys it had before stay valid", error)

    def _look(self) -> tuple[int, ...]:
        try:
            found = os.stat(self._path)
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_size, found.st_ino

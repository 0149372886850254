"""Decides which paths on the server's machine requests may name: adapters, and weights that replace a model's."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import NamedTuple

from penstock.errors import Forbidden

MAX_SHOWN = 200  # characters of a path in an error


class RequestPaths(NamedTuple):
    """Lists the folders below which requests may name files; None: every path is allowed."""

    folders: tuple[Path, ...] | None = None

    def check(self, path: str) -> Path:
        """Returns the path without links and `..`. Raises Forbidden, whether the path exists or not, if it lies below
        none of the folders."""
        try:
            place = Path(path).expanduser()
            if self.folders is None:
                return place
            resolved = place.resolve()
            if any(resolved.is_relative_to(folder) for folder in self.folders):
                return resolved
        except (OSError, RuntimeError, ValueError):  # too long, of an unknown user, a loop, or with a zero in it
            if self.folders is None:
                return Path(path)
        raise Forbidden(
            f"requests may not name the path {path[:MAX_SHOWN]!r}: put the files below a folder of --allowed-path, or "
            "start the server with --allowed-path FOLDER"
        )


def request_paths(folders: list[str], host: str, keyless: bool) -> RequestPaths:
    """Returns the paths that requests may name. Without a given folder, all are allowed if the server listens on
    loopback only or asks for keys, and none if strangers may reach it."""
    if folders or (keyless and not _is_loopback(host)):
        return RequestPaths(tuple(Path(folder).expanduser().resolve() for folder in folders))
    return RequestPaths()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"

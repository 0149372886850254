"""Finds plug-ins: other packages list them as entry points, which docs/plugins.md describes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class Plugin:
    """Is an entry point of another package, which is imported when it is first needed."""

    def __init__(self, entry: EntryPoint) -> None:
        self.name = entry.name
        self._entry = entry

    def load(self, kind: type = object, has: Iterable[str] = ()) -> Any:
        """Returns the object that the entry point names. Raises ConfigError if it cannot be imported, is not of this
        kind or lacks one of these attributes."""
        try:
            found = self._entry.load()
        except Exception as error:
            raise self._broken(f"cannot be imported: {type(error).__name__}: {error}") from error
        if not isinstance(found, kind):
            raise self._broken(f"must be a {kind.__name__}, and is a {type(found).__name__}")
        if lacking := [name for name in has if not hasattr(found, name)]:
            raise self._broken(f"lacks {', '.join(lacking)}")
        return found

    def _broken(self, problem: str) -> ConfigError:
        dist = self._entry.dist
        package = "an unknown package" if dist is None else f"{dist.name} {dist.version}"
        where = f"{self._entry.group}: {self._entry.name} = {self._entry.value}"
        return ConfigError(
            f"the plug-in {where} of {package} {problem}. Update or uninstall that package; its author finds the rules "
            "in docs/plugins.md"
        )


@cache
def plugins(group: str) -> tuple[Plugin, ...]:
    """Returns the plug-ins of a group, in the order of their names. Raises ConfigError if two have one name."""
    if not _is_named(group):
        return ()
    from importlib.metadata import entry_points

    found = sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value))
    for one, other in pairwise(found):
        if one.name == other.name and one.value != other.value:
            raise ConfigError(
                f"two packages have a plug-in {one.name!r} in {group}: {one.value} and {other.value}; uninstall one"
            )
    return tuple({entry.name: Plugin(entry) for entry in found}.values())


def plugin(group: str, name: str) -> Plugin | None:
    """Returns the plug-in with this name."""
    return next((each for each in plugins(group) if each.name == name), None)


def _is_named(group: str) -> bool:
    """Returns whether an installed package names the group. importlib.metadata takes ten times as long to import."""
    files = (file for folder in sys.path for file in Path(folder or ".").glob("*-info/entry_points.txt"))
    return any(f"[{group}]".encode() in file.read_bytes() for file in files)

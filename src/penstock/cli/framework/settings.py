"""Finds option values outside the command line: in PENSTOCK_ variables, then in penstock.toml."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import ConfigError

FILE = "penstock.toml"
PREFIX = "PENSTOCK_"
NOT_OPTIONS = ("PENSTOCK_HOME", "PENSTOCK_DEBUG", "PENSTOCK_CONFIG")  # variables with other purposes
SERVICE_LINK = re.compile(  # variables that Kubernetes sets in every pod of a namespace with a service penstock
    PREFIX + r"(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
LINKED = ("tcp://", "udp://", "sctp://")  # prefixes of such a PORT variable


class Setting(NamedTuple):
    """Holds an option's value and its source."""

    value: Any  # in TOML's type; a variable's is text
    source: str


class Settings(NamedTuple):
    """Holds the settings outside the command line."""

    variables: Mapping[str, str] = {}
    path: Path | None = None  # the file
    tables: Mapping[str, Any] = {}  # the file's contents

    def of(self, command: str, option: str, variable: str = "") -> Setting | None:
        """Returns a setting for a command's option. `variable` is another established name for it."""
        for name in (PREFIX + option.upper(), variable):
            if name and name in self.variables:
                return Setting(self.variables[name], f"the variable {name}")
        for table in (self._table(command), self.tables):
            for key in (option, option.replace("_", "-")):
                if key in table:
                    return Setting(table[key], str(self.path))
        return None

    def check(self, options: Mapping[str, Iterable[str]]) -> None:
        """Raises ConfigError if the file has a key that is not an option of its command or, at the top, of any."""
        known = {option for names in options.values() for option in names}
        for key, value in self.tables.items():
            if not isinstance(value, dict):
                self._check_key(key, known, "")
                continue
            nested = {f"{key} {name}": table for name, table in value.items() if isinstance(table, dict)}
            own = {name: each for name, each in value.items() if not isinstance(each, dict)}
            for command, table in (nested | ({key: own} if own or not nested else {})).items():
                if command not in options:
                    near = _near(command, options)
                    raise ConfigError(f"{self.path}: [{command.replace(' ', '.')}] is not a command{near}")
                for name in table:
                    self._check_key(name, set(options[command]), f" of penstock {command}")

    def _check_key(self, key: str, known: set[str], where: str) -> None:
        if key.replace("-", "_") not in known:
            near = _near(key.replace("-", "_"), known)
            raise ConfigError(f"{self.path}: {key!r} is not an option{where}{near}")

    def _table(self, command: str) -> Mapping[str, Any]:
        table: Any = self.tables
        for word in command.split():
            table = table.get(word, {}) if isinstance(table, dict) else {}
        return table if isinstance(table, dict) else {}


def load() -> Settings:
    """Reads the variables, and the file in PENSTOCK_CONFIG or else the first that exists."""
    path = next((path for path in _places() if path.is_file()), None)
    return Settings(option_variables(), path, {} if path is None else _read(path))


def option_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not _is_other(name, value)}


def _is_other(name: str, value: str) -> bool:
    if name in NOT_OPTIONS or SERVICE_LINK.fullmatch(name):
        return True
    return name.startswith(PREFIX) and name.endswith("PORT") and value.startswith(LINKED)


def _places() -> list[Path]:
    if named := os.environ.get("PENSTOCK_CONFIG"):
        if not Path(named).is_file():
            raise ConfigError(f"PENSTOCK_CONFIG names {named!r}, which is not a file: create it, or unset the variable")
        return [Path(named)]
    configuration = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return [Path(FILE), Path(configuration).expanduser() / "penstock" / FILE]


def _read(path: Path) -> dict[str, Any]:
    import tomllib  # slow to import, and few users have such a file

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error


def _near(word: str, known: Iterable[str]) -> str:
    near = [repr(name.replace("_", "-")) for name in get_close_matches(word, known, n=2)]
    return f"; did you mean {' or '.join(near)}?" if near else ""

"""Reads typed values from a checkpoint's config. Missing, mistyped and absurd values are errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import inf
from reprlib import Repr
from typing import Any, NamedTuple

from penstock.errors import MalformedFile, UnsupportedModel

MAX_SIZE = 2**31 - 1  # later stages store sizes and positions as int32
MAX_LAYERS = 10_000  # bounds work per layer before any tensor is seen
MAX_EXPERTS = 10_000
INFINITY = {"__float__": "Infinity"}  # transformers' JSON encoding
MAX_SHOWN = 200  # characters of a value in an error text
MIN_NUMBER, MAX_NUMBER = 1e-30, 1e30  # keeps arithmetic finite

_shortened = Repr()
_shortened.maxstring = _shortened.maxother = MAX_SHOWN
short = _shortened.repr


class Item(NamedTuple):
    """Describes the items of a list in a config."""

    kind: str
    accepts: Callable[[Any], bool]
    converted: Callable[[Any], Any]


SIZES = Item(f"whole numbers from 1 to {MAX_SIZE}", lambda one: type(one) is int and 0 < one <= MAX_SIZE, int)
COUNTS = Item(f"whole numbers from 0 to {MAX_SIZE}", lambda one: type(one) is int and 0 <= one <= MAX_SIZE, int)
NUMBERS = Item(
    f"numbers from {MIN_NUMBER} to {MAX_NUMBER}",
    lambda one: type(one) in (int, float) and MIN_NUMBER <= one <= MAX_NUMBER,
    float,
)
FLAGS = Item("zeros and ones", lambda one: type(one) in (int, bool) and one in (0, 1), bool)


class ConfigReader:
    """Gives typed access to a mapping. Null counts as absent. An absent key takes its default or is an error."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self._values = values
        self._source = source
        self._prefix = prefix
        self._read: set[str] = set()
        self.unknown: list[str] = []  # keys that nothing reads, including nested tables

    def __contains__(self, key: str) -> bool:
        self._read.add(self._prefix + key)
        return self._values.get(self._prefix + key) is not None

    def says_null(self, key: str) -> bool:
        return self._prefix + key in self._values and key not in self

    def raw(self, key: str) -> Any:
        """Returns an unchecked value; None if absent."""
        return self._values[self._prefix + key] if key in self else None

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        value = self._get(key, default)
        if type(value) is not int or not 0 < value <= most:
            raise self.wrong(key, value, f"a whole number from 1 to {most}")
        return value

    def count(self, key: str, default: int, most: int = MAX_SIZE) -> int:
        value = self._get(key, default)
        if type(value) is not int or not 0 <= value <= most:
            raise self.wrong(key, value, f"a whole number from 0 to {most}")
        return value

    def number(self, key: str, default: float | None = None, least: float = MIN_NUMBER) -> float:
        """Reads a number of at least `least`."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not least <= value <= MAX_NUMBER:
            raise self.wrong(key, value, f"a number from {least} to {MAX_NUMBER}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if type(value) is not str:
            raise self.wrong(key, value, "a string")
        return value

    def strings(self, key: str) -> list[str]:
        value = self._get(key, None)
        if type(value) is not list or not all(type(one) is str for one in value):
            raise self.wrong(key, value, "a list of strings")
        return value

    def array(self, key: str, item: Item, count: int | None = None) -> tuple[Any, ...]:
        """Reads a list of `count` items, or of any length, when an absent key means an empty list."""
        value = self._get(key, [] if count is None else None)
        length = "" if count is None else f"{count} "
        if type(value) is not list or count not in (None, len(value)) or not all(map(item.accepts, value)):
            raise self.wrong(key, value, f"a list of {length}{item.kind}")
        return tuple(map(item.converted, value))

    def table(self, key: str) -> ConfigReader:
        """Returns a reader of a nested object; empty if the key is absent."""
        value = self._get(key, {})
        if type(value) is not dict:
            raise self.wrong(key, value, "an object")
        inner = ConfigReader(value, f"{key} in {self._source}")
        inner.unknown = self.unknown
        return inner

    def names(self) -> list[str]:
        return list(self._values)

    def having(self, **values: Any) -> ConfigReader:
        """Returns a reader with other values of these keys."""
        return self._derived({**self._values} | {self._prefix + key: value for key, value in values.items()})

    def without(self, *keys: str) -> ConfigReader:
        left = {key: value for key, value in self._values.items() if key.removeprefix(self._prefix) not in keys}
        return self._derived(left)

    def with_defaults(self, values: Mapping[str, Any]) -> ConfigReader:
        return self._derived({**values, **self._values})

    def _derived(self, values: Mapping[str, Any]) -> ConfigReader:
        made = ConfigReader(values, self._source, self._prefix)
        made.unknown = self.unknown
        return made

    def require(self, key: str, supported: Collection[Any], default: Any = None) -> None:
        """Raises unless the value is supported."""
        value = self._get(key, default)
        if value not in supported:
            raise self.unsupported(key, value, supported)

    def unsupported(self, key: str, value: Any, supported: Collection[Any]) -> UnsupportedModel:
        wanted = ", ".join(str(one) for one in supported)
        return UnsupportedModel(
            f"{self._prefix}{key} = {short(value)} in {self._source} is not supported; supported: {wanted}"
        )

    def ignore(self, *keys: str) -> None:
        """Marks keys without effect as read."""
        self._read.update(self._prefix + key for key in keys)

    def refuse_others(self, known: Collection[str]) -> None:
        """Raises for keys outside `known`: ignoring one could silently change the model's output."""
        for key in self._values:
            name = key.removeprefix(self._prefix)
            if key.startswith(self._prefix) and name not in known and self._values[key] is not None:
                raise UnsupportedModel(
                    f"{key} = {short(self._values[key])} in {self._source} is not known to this engine"
                )

    def note_unread(self, neutral: Collection[str], changing: Mapping[str, Collection[Any]]) -> None:
        """Adds keys that are neither read nor `neutral` to `unknown`. Raises for keys in `changing` whose value is not
        one of those listed as harmless.
        """
        for key, value in self._values.items():
            if value is None or key in self._read or key in neutral:
                continue
            if key not in changing:
                self.unknown.append(key)
                continue
            same = changing[key]
            if value not in same and not (type(value) is list and all(one in same for one in value)):
                raise UnsupportedModel(
                    f"{key} = {short(value)} in {self._source} changes what the model computes and is not supported "
                    f"for this architecture; --config {key}=null runs the model without it"
                )

    def refuse_unread(self, neutral: Collection[str]) -> None:
        """Raises for keys that are neither read nor `neutral`."""
        self.refuse_others({key.removeprefix(self._prefix) for key in self._read}.union(neutral))

    def _get(self, key: str, default: Any) -> Any:
        self._read.add(self._prefix + key)
        value = self._values.get(self._prefix + key)
        if value is not None:
            return value
        if default is None:
            raise MalformedFile(f"{self._source} has no {self._prefix}{key}")
        return default

    def wrong(self, key: str, value: Any, wanted: str) -> MalformedFile:
        return MalformedFile(f"{self._prefix}{key} in {self._source} must be {wanted}; got {short(value)}")


def size_or_all(config: ConfigReader, key: str, default: int | None = None) -> int:
    """Reads a positive integer; -1 means all and returns 0."""
    value = config.raw(key)
    return 0 if (default if value is None else value) == -1 else config.size(key, default)


def size_or_auto(config: ConfigReader, key: str, auto: int) -> int:
    """Reads a positive integer; returns `auto` if the value is "auto" or absent."""
    return auto if config.raw(key) in (None, "auto") else config.size(key)


def size_in_each(config: ConfigReader, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
    """Reads a positive integer, which may be repeated in a list of all layers."""
    value = config.raw(key)
    if type(value) is list and value and all(one == value[0] for one in value):
        return config.having(**{key: value[0]}).size(key, most=most)
    return config.size(key, default, most)


def sizes_in_each(config: ConfigReader, key: str, layers: int) -> tuple[int, ...]:
    """Reads one positive integer per layer; a single value applies to all layers."""
    if type(config.raw(key)) is list:
        return config.array(key, SIZES, layers)
    return (config.size(key),) * layers


def number_or_null(config: ConfigReader, key: str, silent: float) -> float:
    """Reads a number; null means 0, an absent key `silent`."""
    return 0.0 if config.says_null(key) else config.number(key, silent, least=0.0)


def bounds(config: ConfigReader, key: str) -> tuple[float, float]:
    """Reads lower and upper bounds of a value; 0 and infinity if the key is absent."""
    value = config.raw(key)
    stated = [0.0, inf] if value is None else value if type(value) is list else []
    found = [inf if one == INFINITY else one for one in stated]
    if len(found) != 2 or not all(type(one) in (int, float) for one in found) or not 0 <= found[0] <= found[1]:
        raise config.wrong(key, value, "two numbers, the least and the greatest")
    return float(found[0]), float(found[1])

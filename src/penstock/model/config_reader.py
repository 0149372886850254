"""Reads values of a checkpoint's config by type; a value that is missing, of the wrong type or absurd is an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from reprlib import Repr
from typing import Any

from penstock.errors import MalformedFile, UnsupportedModel

MAX_SIZE = 2**31 - 1  # sizes and positions are int32 beyond the loader
MAX_LAYERS = 10_000  # some things are made for each, before any is found in the file
MAX_EXPERTS = 10_000
INFINITY = {"__float__": "Infinity"}  # as transformers writes it in JSON
MAX_SHOWN = 200  # characters of a value in an error: names are shorter, and values of a damaged file may be long
MIN_NUMBER, MAX_NUMBER = 1e-30, 1e30  # all that a model needs, and computing with them stays finite

_shortened = Repr()
_shortened.maxstring = _shortened.maxother = MAX_SHOWN
short = _shortened.repr


class ConfigReader:
    """Gives typed access to a mapping. Null counts as absent; a key that is absent takes its default or is an error."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self._values = values
        self._source = source
        self._prefix = prefix
        self._read: set[str] = set()
        self.unknown: list[str] = []  # keys that nothing reads, those of its tables included

    def __contains__(self, key: str) -> bool:
        self._read.add(self._prefix + key)
        return self._values.get(self._prefix + key) is not None

    def says_null(self, key: str) -> bool:
        """Returns whether the key is there with null, which differs from its being absent."""
        return self._prefix + key in self._values and key not in self

    def is_list(self, key: str) -> bool:
        """Returns whether the value is a list, where it may be a single one."""
        return key in self and type(self._values[self._prefix + key]) is list

    def is_text(self, key: str) -> bool:
        """Returns whether the value is a string, where it may be a number."""
        return key in self and type(self._values[self._prefix + key]) is str

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """Reads a whole number above 0."""
        value = self._get(key, default)
        if type(value) is not int or not 0 < value <= most:
            raise self._wrong(key, value, f"a whole number from 1 to {most}")
        return value

    def size_in_each(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """Reads a whole number above 0, or a list that has the same one for each layer."""
        value = self._get(key, default)
        if type(value) is list and value and all(one == value[0] for one in value):
            value = value[0]
        if type(value) is not int or not 0 < value <= most:
            raise self._wrong(key, value, f"a whole number from 1 to {most}, the same for all layers")
        return value

    def sizes_in_each(self, key: str, layers: int) -> tuple[int, ...]:
        """Reads a whole number above 0 for each layer, or one that all have."""
        return self.sizes(key, layers) if self.is_list(key) else (self.size(key),) * layers

    def count(self, key: str, default: int, most: int = MAX_SIZE) -> int:
        """Reads a whole number that may be 0."""
        value = self._get(key, default)
        if type(value) is not int or not 0 <= value <= most:
            raise self._wrong(key, value, f"a whole number from 0 to {most}")
        return value

    def size_or_all(self, key: str, default: int | None = None) -> int:
        """Reads a whole number above 0; returns 0 if the file says -1, which means all there is."""
        return 0 if self._get(key, default) == -1 else self.size(key, default)

    def size_or_auto(self, key: str, auto: int) -> int:
        """Reads a whole number above 0; returns `auto` if the file says "auto" or nothing."""
        return auto if self._get(key, "auto") == "auto" else self.size(key)

    def number(self, key: str, default: float | None = None, least: float = MIN_NUMBER) -> float:
        """Reads a number that is at least `least`."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not least <= value <= MAX_NUMBER:
            raise self._wrong(key, value, f"a number from {least} to {MAX_NUMBER}")
        return float(value)

    def number_or_null(self, key: str, silent: float) -> float:
        """Reads a number; returns 0 for null, and `silent` if the key is absent."""
        return 0.0 if self.says_null(key) else self.number(key, silent, least=0.0)

    def flag(self, key: str, default: bool) -> bool:
        """Reads true or false."""
        value = self._get(key, default)
        if type(value) is not bool:
            raise self._wrong(key, value, "true or false")
        return value

    def flag_or_count(self, key: str, default: bool) -> bool:
        """Reads true or false, or a whole number that says the same: 0 is false."""
        value = self._get(key, default)
        if type(value) not in (bool, int) or value < 0:
            raise self._wrong(key, value, "true, false or a whole number")
        return bool(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Reads a string."""
        value = self._get(key, default)
        if type(value) is not str:
            raise self._wrong(key, value, "a string")
        return value

    def strings(self, key: str) -> list[str]:
        """Reads a list of strings."""
        value = self._get(key, None)
        if type(value) is not list or not all(type(one) is str for one in value):
            raise self._wrong(key, value, "a list of strings")
        return value

    def sizes(self, key: str, count: int) -> tuple[int, ...]:
        """Reads `count` whole numbers above 0."""
        value = self._get(key, None)
        if type(value) is not list or len(value) != count:
            raise self._wrong(key, value, f"a list of {count} whole numbers")
        if not all(type(size) is int and 0 < size <= MAX_SIZE for size in value):
            raise self._wrong(key, value, f"whole numbers from 1 to {MAX_SIZE}")
        return tuple(value)

    def counts(self, key: str) -> tuple[int, ...]:
        """Reads whole numbers that may be 0; returns none if the key is absent."""
        value = self._get(key, [])
        if type(value) is not list or not all(type(one) is int and 0 <= one <= MAX_SIZE for one in value):
            raise self._wrong(key, value, f"a list of whole numbers from 0 to {MAX_SIZE}")
        return tuple(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Reads `count` numbers above 0."""
        value = self._get(key, None)
        if type(value) is not list or len(value) != count:
            raise self._wrong(key, value, f"a list of {count} numbers")
        if not all(type(one) in (int, float) and MIN_NUMBER <= one <= MAX_NUMBER for one in value):
            raise self._wrong(key, value, f"numbers from {MIN_NUMBER} to {MAX_NUMBER}")
        return tuple(map(float, value))

    def fractions(self, key: str, count: int) -> tuple[float, ...]:
        """Reads `count` numbers from 0 to below 1."""
        value = self._get(key, None)
        if (
            type(value) is not list
            or len(value) != count
            or not all(type(one) in (int, float) and 0 <= one < 1 for one in value)
        ):
            raise self._wrong(key, value, f"a list of {count} numbers from 0 to below 1")
        return tuple(map(float, value))

    def cutoffs(self, key: str, count: int) -> tuple[float, ...]:
        """Reads `count` numbers of either sign; minus infinity may be among them."""
        value = self._get(key, None)
        if (
            type(value) is not list
            or len(value) != count
            or not all(type(one) in (int, float) and one <= MAX_NUMBER for one in value)
        ):
            raise self._wrong(key, value, f"a list of {count} numbers")
        return tuple(map(float, value))

    def bounds(self, key: str) -> tuple[float, float]:
        """Reads the least and the greatest that a value may be; 0 and infinity if the key is absent."""
        value = self._get(key, [0.0, inf])
        found = [inf if one == INFINITY else one for one in value] if type(value) is list else []
        if len(found) != 2 or not all(type(one) in (int, float) for one in found) or not 0 <= found[0] <= found[1]:
            raise self._wrong(key, value, "two numbers, the least and the greatest")
        return float(found[0]), float(found[1])

    def flags(self, key: str, count: int) -> tuple[bool, ...]:
        """Reads `count` zeros and ones."""
        value = self._get(key, None)
        if (
            type(value) is not list
            or len(value) != count
            or not all(type(one) in (int, bool) and one in (0, 1) for one in value)
        ):
            raise self._wrong(key, value, f"a list of {count} zeros and ones")
        return tuple(map(bool, value))

    def table(self, key: str) -> ConfigReader:
        """Returns a reader of a nested object, which is empty if the key is absent."""
        value = self._get(key, {})
        if type(value) is not dict:
            raise self._wrong(key, value, "an object")
        inner = ConfigReader(value, f"{key} in {self._source}")
        inner.unknown = self.unknown
        return inner

    def tables(self, key: str) -> list[ConfigReader]:
        """Returns a reader of each object that is a value of a nested object."""
        outer = self.table(key)
        return [outer.table(name) for name in outer._values]

    def names(self) -> list[str]:
        """Returns all keys."""
        return list(self._values)

    def having(self, **values: Any) -> ConfigReader:
        """Returns a reader that sees other values of these keys."""
        return self._derived({**self._values, **values})

    def with_value(self, key: str, value: Any) -> ConfigReader:
        """Returns a reader that sees another value of a key, which may have a prefix in the file."""
        return self._derived({**self._values, self._prefix + key: value})

    def without(self, *keys: str) -> ConfigReader:
        """Returns a reader that does not see these keys."""
        left = {key: value for key, value in self._values.items() if key.removeprefix(self._prefix) not in keys}
        return self._derived(left)

    def with_defaults(self, values: Mapping[str, Any]) -> ConfigReader:
        """Returns a reader that finds these values where the config is silent."""
        return self._derived({**values, **self._values})

    def _derived(self, values: Mapping[str, Any]) -> ConfigReader:
        made = ConfigReader(values, self._source, self._prefix)
        made.unknown = self.unknown
        return made

    def require(self, key: str, supported: Collection[Any], default: Any = None) -> None:
        """Raises unless the value is one of those that this engine supports."""
        value = self._get(key, default)
        if value not in supported:
            raise self.unsupported(key, value, supported)

    def unsupported(self, key: str, value: Any, supported: Collection[Any]) -> UnsupportedModel:
        """Returns the error for a value that this engine does not support."""
        wanted = ", ".join(str(one) for one in supported)
        return UnsupportedModel(
            f"{self._prefix}{key} = {short(value)} in {self._source} is not supported; supported: {wanted}"
        )

    def ignore(self, *keys: str) -> None:
        """Marks keys that change nothing as read."""
        self._read.update(self._prefix + key for key in keys)

    def refuse_others(self, known: Collection[str]) -> None:
        """Raises if there is a key that nothing reads: ignoring it could silently change the model's answers."""
        for key in self._values:
            name = key.removeprefix(self._prefix)
            if key.startswith(self._prefix) and name not in known and self._values[key] is not None:
                raise UnsupportedModel(
                    f"{key} = {short(self._values[key])} in {self._source} is not known to this engine"
                )

    def note_unread(self, neutral: Collection[str], changing: Mapping[str, Collection[Any]]) -> None:
        """Adds the keys that were not read so far and are not `neutral` to `unknown`. Raises if one of them is known to
        change what is computed: `changing` has the values that do not."""
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
        """Raises if a key was neither read so far nor is `neutral`."""
        self.refuse_others({key.removeprefix(self._prefix) for key in self._read}.union(neutral))

    def _get(self, key: str, default: Any) -> Any:
        self._read.add(self._prefix + key)
        value = self._values.get(self._prefix + key)
        if value is not None:
            return value
        if default is None:
            raise MalformedFile(f"{self._source} has no {self._prefix}{key}")
        return default

    def _wrong(self, key: str, value: Any, wanted: str) -> MalformedFile:
        return MalformedFile(f"{self._prefix}{key} in {self._source} must be {wanted}; got {short(value)}")

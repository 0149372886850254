"""Parses option values: numbers of bytes, and the formats and loss of a KV cache."""

from __future__ import annotations

import re
from math import inf
from typing import Any

from penstock.errors import ConfigError

QUANTIZED_KV = ("int8", "fp8", "int4")  # formats with fewer than 16 bits
ANY = "any"  # the value of kv_loss without a limit
EXAMPLES = "500M or 8G"  # shown in error messages
_PREFIXES = ("", "K", "M", "G", "T")
_WHOLE = r"[0-9]+"
_FRACTION = r"[0-9]{1,9}\.[0-9]+(?= ?[kKMGT])"  # a fraction needs a unit
_SIZE = re.compile(rf"({_WHOLE}|{_FRACTION}) ?([kKMGT]?)(iB|B)?")


def read_bytes(text: str) -> int:
    """Parses a number of bytes with an optional unit: 8G and 8GiB are 8 * 1024**3, 8GB is 8 * 1000**3. Raises
    ValueError if invalid.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number of bytes")
    number, prefix, suffix = match.groups()
    unit = (1000 if suffix == "B" else 1024) ** _PREFIXES.index(prefix.upper())
    return int(number) * unit if number.isdigit() else int(float(number) * unit)


def written_bytes(count: int) -> str:
    """Formats a number of bytes for `read_bytes`, in the largest unit that divides it."""
    power = 0
    while count and count % 1024 == 0 and power + 1 < len(_PREFIXES):
        count, power = count // 1024, power + 1
    return f"{count}{_PREFIXES[power]}"


def read_kv(value: Any) -> str:
    """Checks a value of `--kv`: a format, or those of keys and values separated by a colon. Devices define the formats.
    Raises ConfigError if invalid.
    """
    parts = value.split(":") if isinstance(value, str) else []
    if len(parts) not in (1, 2) or not all(parts):
        raise ConfigError(f"kv is one format, or two, KEYS:VALUES, as in int8:int4; got {value!r}")
    return parts[0] if len(set(parts)) == 1 else str(value)


def read_kv_loss(value: Any) -> str:
    """Normalizes a value of `--kv-loss`: any, or a number of nats; raises ConfigError if invalid."""
    text = value if isinstance(value, str) else repr(value)
    try:
        if text == ANY or (not isinstance(value, bool) and 0 <= float(text) < inf):
            return text
    except ValueError:
        pass
    raise ConfigError(f"kv_loss is {ANY}, or a number of nats, 0 or more; got {value!r}")


def kv_parts(kv: str) -> tuple[str, str]:
    """Splits `read_kv`'s result into the formats of keys and values."""
    keys, _, values = kv.partition(":")
    return keys, values or keys


def is_kv_quantized(kv: str) -> bool:
    return not set(kv_parts(kv)).isdisjoint(QUANTIZED_KV)

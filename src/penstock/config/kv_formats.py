"""Parses `--kv`, the format of a KV cache or of its keys and values, and `--kv-loss`."""

from __future__ import annotations

from math import inf
from typing import Any

from penstock.errors import ConfigError

QUANTIZED_KV = ("int8", "fp8", "int4")  # formats with fewer than 16 bits
ANY = "any"  # the value of kv_loss without a limit


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

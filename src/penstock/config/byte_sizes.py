"""Parses and formats numbers of bytes with units."""

from __future__ import annotations

import re

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

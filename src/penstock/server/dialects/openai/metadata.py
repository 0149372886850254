"""Reads metadata: pairs of texts that clients attach to what they store."""

from __future__ import annotations

from typing import Any

from penstock.errors import InvalidRequest

MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512


def read_metadata(given: Any) -> dict[str, str]:
    """Returns the pairs; raises InvalidRequest if one is not a text, or if they exceed the limits on number and
    length."""
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise InvalidRequest("metadata must be an object of which every value is a text", param="metadata")
    if len(given) > MAX_PAIRS or any(len(key) > MAX_KEY or len(value) > MAX_VALUE for key, value in given.items()):
        raise InvalidRequest(
            f"metadata may have {MAX_PAIRS} pairs, keys of {MAX_KEY} and values of {MAX_VALUE} characters: send less",
            param="metadata",
        )
    return given

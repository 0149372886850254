"""Prints text that others wrote, such as a model's name or answer: a terminal obeys the control characters in it."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but newline and tab; 0x80 to 0x9f are C1


def escaped(text: str) -> str:
    """Returns the text with its control characters as `\\x1b`; newlines and tabs stay."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def escaped_json(text: str) -> str:
    """Returns JSON with the same values and no control character in it: JSON needs no escape for some."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def stripped(text: str) -> str:
    """Returns the text without control characters; newlines and tabs stay. What they would have told a terminal is
    left as text."""
    return _CONTROL.sub("", text)


def print_to_stderr(text: str) -> bool:
    """Prints lines to stderr, escaped. Returns False if they cannot be written: that is no reason to stop."""
    try:
        print(escaped(text), file=sys.stderr, flush=True)
    except OSError:
        return False
    return True


def give_up_unwritable() -> None:
    """Gives up the text that stdout and stderr could not write, so that the exit code stays: Python would make it
    120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with open(os.devnull, "w") as nothing, suppress(OSError):
                os.dup2(nothing.fileno(), stream.fileno())

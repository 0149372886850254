"""Prints untrusted text, such as a model's name or answer, without the control characters that terminals obey."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all except newline and tab; 0x80 to 0x9f are C1


def escaped(text: str) -> str:
    r"""Returns the text with control characters as `\x1b`; newlines and tabs are kept."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def escaped_json(text: str) -> str:
    """Escapes control characters in JSON without changing its values; JSON allows some unescaped."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def stripped(text: str) -> str:
    """Removes control characters except newlines and tabs. The rest of an escape sequence remains as text."""
    return _CONTROL.sub("", text)


def print_to_stderr(text: str) -> bool:
    try:
        print(escaped(text), file=sys.stderr, flush=True)
    except OSError:
        return False
    return True


def give_up_unwritable() -> None:
    """Discards unwritable output on stdout and stderr, because Python would otherwise exit with code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with open(os.devnull, "w") as nothing, suppress(OSError):
                os.dup2(nothing.fileno(), stream.fileno())

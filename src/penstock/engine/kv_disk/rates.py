"""Remembers how fast prompts were computed and read, for the next server, which decides before it has measured."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

FILE = "rates.json"


class Rates(NamedTuple):
    """States what was measured; 0: nothing was."""

    token: float = 0.0  # seconds that a token of a prompt takes to compute
    pair: float = 0.0  # seconds that it takes in addition for each token before it
    read: float = 0.0  # bytes that are read in a second

    def seconds(self, tokens: int, context: int) -> float:
        """Returns how long it takes to compute so many tokens after `context` others."""
        return tokens * (self.token + self.pair * (context + tokens / 2))


def read_rates(folder: Path) -> Rates:
    """Returns what the last server measured, if it can be read."""
    try:
        found = json.loads((folder / FILE).read_text())
        rates = Rates(*(float(found[name]) for name in Rates._fields))
    except (OSError, ValueError, LookupError, TypeError):
        return Rates()
    return rates if all(0 <= rate < float("inf") for rate in rates) else Rates()


def write_rates(folder: Path, rates: Rates) -> None:
    """Keeps rates for the next server, if that is possible."""
    part = folder / f"{FILE}.part"
    with suppress(OSError):
        part.write_text(json.dumps(rates._asdict()))
        os.replace(part, folder / FILE)

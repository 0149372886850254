"""Remembers how fast prompts were computed and read, for the next server, which decides before it has measured."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from penstock.core.step_cost import PromptCost

FILE = "rates.json"
SAVE = 60.0  # seconds between two writes of the file


class Rates(NamedTuple):
    """Holds measured rates; 0: not measured."""

    token: float = 0.0  # seconds that a token of a prompt takes to compute
    pair: float = 0.0  # seconds that it takes in addition for each token before it
    read: float = 0.0  # bytes that are read in a second

    def seconds(self, tokens: int, context: int) -> float:
        return tokens * (self.token + self.pair * (context + tokens / 2))


def read_rates(folder: Path) -> Rates:
    try:
        found = json.loads((folder / FILE).read_text())
        rates = Rates(*(float(found[name]) for name in Rates._fields))
    except (OSError, ValueError, LookupError, TypeError):
        return Rates()
    return rates if all(0 <= rate < float("inf") for rate in rates) else Rates()


def write_rates(folder: Path, rates: Rates) -> None:
    part = folder / f"{FILE}.part"
    with suppress(OSError):
        part.write_text(json.dumps(rates._asdict()))
        os.replace(part, folder / FILE)


UNMEASURED = Rates(token=1 / 2000)  # before any server has measured


class PromptRates:
    """Forecasts how long prompts take to compute: by the `prompts` of this server or, before it has computed any, by
    what the last server has measured."""

    def __init__(self, folder: Path, prompts: PromptCost) -> None:
        self.last = read_rates(folder)
        self._folder = folder
        self._prompts = prompts
        self._saved = time.perf_counter()

    def seconds(self, tokens: int, context: int) -> float:
        last = self.last if self.last.token else UNMEASURED
        return (self._measured(0.0) if self._prompts.known else last).seconds(tokens, context)

    def save(self, read: float, at_once: bool = False) -> None:
        """Writes the rates for the next server, now and then. `read` is the bytes that are read in a second."""
        now = time.perf_counter()
        if self._prompts.known and (at_once or now - self._saved > SAVE):
            self._saved = now
            write_rates(self._folder, self._measured(read))

    def _measured(self, read: float) -> Rates:
        return Rates(self._prompts.seconds(1, 0), self._prompts.seconds(0, 1), read)

"""Records what each API key has used: tokens and cost by key, model and day, in a file that survives restarts.

The file is an SQLite database: adding to a row is one statement, several servers may write to one file, and a reader
never sees half of a change. Lines of JSON would have to be added up and compacted again and again. The cost is added
when tokens are used, by the price of that moment.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from penstock.errors import ConfigError, StorageFailed
from penstock.server.context.request_context import RequestContext
from penstock.server.telemetry.metrics import FinishedRequest
from penstock.system.files import make_private_file, make_private_folder

log = logging.getLogger(__name__)

FLUSH_SECONDS = 2.0  # lost at most when a server is killed
KEPT_DAYS = 400
MOST_ROWS = 200_000  # in the file; the oldest days are deleted first
BUSY_SECONDS = 5.0  # wait for another writer
MILLION = 1_000_000

_TABLE = """
CREATE TABLE IF NOT EXISTS usage (
    day TEXT, key TEXT, model TEXT,
    requests INTEGER, prompt INTEGER, cached INTEGER, generated INTEGER, cost REAL,
    PRIMARY KEY (day, key, model)
) WITHOUT ROWID"""
_ADD = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (day, key, model) DO UPDATE SET
    requests = requests + excluded.requests, prompt = prompt + excluded.prompt, cached = cached + excluded.cached,
    generated = generated + excluded.generated, cost = cost + excluded.cost"""
_FORGET = "DELETE FROM usage WHERE day < ?"
_OVER = "SELECT day FROM usage ORDER BY day DESC LIMIT 1 OFFSET ?"


class Price(NamedTuple):
    """Gives the price of a million tokens of a model, in the operator's currency."""

    prompt: float
    generated: float
    cached: float  # prompt tokens whose KV was reused

    def cost(self, prompt: int, cached: int, generated: int) -> float:
        """Returns the cost of an answer; `cached` tokens are among the prompt's."""
        return ((prompt - cached) * self.prompt + cached * self.cached + generated * self.generated) / MILLION


class KeyUsage(NamedTuple):
    """Gives one key's usage of one model. `prompt` includes `cached` tokens."""

    key: str  # empty: requests without a key
    model: str
    requests: int = 0
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    cost: float = 0.0
    day: str = ""  # empty: all days together

    def plus(self, other: KeyUsage) -> KeyUsage:
        return self._replace(
            requests=self.requests + other.requests,
            prompt=self.prompt + other.prompt,
            cached=self.cached + other.cached,
            generated=self.generated + other.generated,
            cost=self.cost + other.cost,
        )


def parse_price(text: str) -> tuple[str, Price]:
    """Parses MODEL=IN,OUT[,CACHED] into the model and its price; raises ConfigError if it is malformed. CACHED defaults
    to IN."""
    model, _, numbers = text.rpartition("=")
    try:
        values = [float(number) for number in numbers.split(",")]
    except ValueError:
        values = []
    if not model or len(values) not in (2, 3) or not all(0 <= value < 1e9 for value in values):
        raise ConfigError(
            f"a price is written MODEL=IN,OUT or MODEL=IN,OUT,CACHED, each for a million tokens; got {text!r}"
        )
    return model, Price(values[0], values[1], values[2] if len(values) == 3 else values[0])


class UsageRecord:
    """Adds up usage in memory and writes it to the file every few seconds."""

    def __init__(self, path: Path, prices: Mapping[str, Price] | None = None) -> None:
        """Opens the file; raises ConfigError if it cannot be written."""
        self._path = path
        self._prices = dict(prices or {})
        self._pending: dict[tuple[str, str, str], KeyUsage] = {}
        self._failing = False
        self._lock = Lock()  # guards `_pending`, which is written in a thread
        try:
            make_private_folder(path.parent)
            make_private_file(path)
            with _opened(path) as database:
                database.execute("PRAGMA journal_mode = WAL")
                database.execute(_TABLE)
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"usage cannot be recorded in {path}: {error}; name another file with --usage") from error

    def add(self, context: RequestContext, finished: FinishedRequest) -> None:
        """Adds an answer that has ended. Errors before the first token do not count."""
        if finished.reason == "error" and not finished.first:
            return
        tokens, cached = finished.charged, min(finished.cached, finished.charged)
        price = self._prices.get(context.notes.model)
        cost = 0.0 if price is None else price.cost(tokens, cached, finished.generated)
        key = context.caller.owner_name or ""
        use = KeyUsage(
            key, context.notes.model, int(not context.notes.outcome.recorded), tokens, cached, finished.generated, cost
        )
        context.notes.outcome.recorded = True
        place = datetime.now(UTC).date().isoformat(), key, context.notes.model
        self._hold(place, use)

    def _hold(self, place: tuple[str, str, str], use: KeyUsage) -> None:
        with self._lock:
            self._pending[place] = self._pending[place].plus(use) if place in self._pending else use

    def flush(self) -> None:
        """Writes pending usage. After a failure the next call tries again; the log reports it once."""
        with self._lock:
            pending, self._pending = self._pending, {}
        if not pending:
            return
        rows = [(*place, *use[2:7]) for place, use in pending.items()]
        try:
            with _opened(self._path) as database:
                database.executemany(_ADD, rows)
                _forget_old(database)
            self._failing = False
        except (sqlite3.Error, OSError) as error:
            if not self._failing:
                log.error("usage cannot be written to %s, and is kept in memory: %s", self._path, error)
            self._failing = True
            for place, use in pending.items():
                self._hold(place, use)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Writes every few seconds while the block runs, and at its end."""
        task = asyncio.create_task(self._keep_writing())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await asyncio.to_thread(self.flush)

    async def _keep_writing(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            if self._pending:
                await asyncio.shield(asyncio.to_thread(self.flush))


def _forget_old(database: sqlite3.Connection) -> None:
    """Deletes days that are too old, or too many. The present day stays, however many rows it has."""
    today = datetime.now(UTC).date()
    database.execute(_FORGET, ((today - timedelta(KEPT_DAYS)).isoformat(),))
    if over := database.execute(_OVER, (MOST_ROWS,)).fetchone():
        database.execute("DELETE FROM usage WHERE day <= ? AND day < ?", (*over, today.isoformat()))


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as database, database:
        yield database


def read_usage(path: Path, key: str | None = None, since: date | None = None) -> list[KeyUsage]:
    """Returns the usage of each day, by key and model; only of `key` and `since` a day, if they are given."""
    if not path.exists():
        return []
    try:
        with _opened(path) as database:
            rows = database.execute(
                "SELECT key, model, requests, prompt, cached, generated, cost, day FROM usage "
                "WHERE (?1 IS NULL OR key = ?1) AND day >= ?2 ORDER BY day, key, model",
                (key, since.isoformat() if since else ""),
            ).fetchall()
    except sqlite3.Error as error:
        raise StorageFailed(f"usage cannot be read from {path}: {error}") from error
    return [KeyUsage(*row) for row in rows]


def by_key_and_model(rows: Sequence[KeyUsage]) -> list[KeyUsage]:
    sums: dict[tuple[str, str], KeyUsage] = {}
    for row in rows:
        place = row.key, row.model
        sums[place] = sums[place].plus(row) if place in sums else row._replace(day="")
    return [sums[place] for place in sorted(sums)]

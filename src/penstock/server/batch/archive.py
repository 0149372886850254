"""Stores files, batches and answers across restarts, in one folder that is created at its first use.

<folder>/archive.db        records, in SQLite
<folder>/files/<id>        a file's contents, under an id made here
<folder>/files/<id>.part   a file that is being written, or that a killed server left behind
<folder>/lock              held by the one server that uses the folder
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Concatenate, NamedTuple, NoReturn, ParamSpec, Self, TypeVar
from urllib.parse import quote

from penstock.config import home
from penstock.errors import ConfigError, StorageFailed
from penstock.store.paths import locked
from penstock.system.files import make_private_file, make_private_folder

P = ParamSpec("P")
T = TypeVar("T")

VERSION = 5  # changes with the tables below
WRITE_SIZE = 2**20  # bytes

TABLES = """
CREATE TABLE IF NOT EXISTS files (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT UNIQUE NOT NULL,
  bytes INTEGER NOT NULL,
  created_at INTEGER NOT NULL,
  filename TEXT NOT NULL,
  purpose TEXT NOT NULL,
  expires_at INTEGER,
  tenant TEXT
);
CREATE TABLE IF NOT EXISTS batches (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT UNIQUE NOT NULL,
  input TEXT NOT NULL,
  open INTEGER NOT NULL,
  record BLOB NOT NULL,
  owner TEXT,
  payer TEXT,
  tenant TEXT
);
CREATE TABLE IF NOT EXISTS lines (
  batch TEXT NOT NULL,
  number INTEGER NOT NULL,
  start INTEGER NOT NULL,
  size INTEGER NOT NULL,
  custom_id TEXT,
  state INTEGER NOT NULL,
  answer BLOB,
  PRIMARY KEY (batch, number)
);
CREATE TABLE IF NOT EXISTS answers (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  kind TEXT NOT NULL,
  id TEXT NOT NULL,
  tenant TEXT,
  body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS answers_by_id ON answers (id);
"""

UPGRADES = {  # from a version to the next
    1: (
        "ALTER TABLE batches RENAME COLUMN told TO record;"
        "ALTER TABLE batches ADD COLUMN owner TEXT; ALTER TABLE batches ADD COLUMN payer TEXT;"
    ),
    2: "ALTER TABLE files ADD COLUMN tenant TEXT;",
    3: "ALTER TABLE batches ADD COLUMN tenant TEXT; UPDATE batches SET tenant = payer;",
    4: "",  # answers are new
}


class Space(NamedTuple):
    """Says where files and batches are kept, how much there may be of them, and whether `answers` that clients store
    are kept there, too."""

    folder: Path | None = None  # None: the model's own, where models are kept
    file_bytes: int = 200 * 2**20
    total_bytes: int = 10 * 2**30
    files: int = 10_000
    answers: bool = False


SPACE = Space()


class Archive:
    """Reads and writes records in one thread, a transaction at a time, and contents in another: the event loop never
    waits for a disk."""

    def __init__(self, space: Space, model: str) -> None:
        self.space = space
        self._model = model
        self._records = ThreadPoolExecutor(1, thread_name_prefix="penstock-records")
        self._contents = ThreadPoolExecutor(1, thread_name_prefix="penstock-contents")
        self._resources = ExitStack()
        self._db: sqlite3.Connection | None = None

    @property
    def used(self) -> bool:
        """True if this server or an earlier one has kept something here."""
        return self._path.exists()

    @cached_property
    def _folder(self) -> Path:
        return self.space.folder or home() / "data" / (quote(self._model, safe="").lstrip(".") or "model")

    @property
    def _path(self) -> Path:
        return self._folder / "archive.db"

    @property
    def _files(self) -> Path:
        return self._folder / "files"

    async def open(self) -> None:
        """Takes the folder now, and not when it is first used: raises if that is not possible."""
        await self.do(lambda _: None)

    async def do(self, work: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `work` in a transaction and returns its result; nothing that it wrote is kept if it raises. A caller
        that is cancelled meanwhile does not stop it."""

        def transact() -> T:
            try:
                self._db = self._db or self._open()
                with self._db:
                    return work(self._db, *args, **kwargs)
            except sqlite3.OperationalError as error:
                raise StorageFailed(
                    f"the records of files, batches and answers in {self._path} cannot be used: {error}"
                ) from error

        return await in_thread(self._records, transact)

    def path(self, id: str) -> Path:
        """Returns where a file's contents are. `id` comes from a record, never from a request."""
        return self._files / id

    def draft(self) -> Draft:
        return Draft(self._files / f"file-{secrets.token_hex(12)}", self._contents)

    async def keep(
        self,
        drafts: Sequence[Draft],
        work: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Runs `work`, which records the drafts. A starting server deletes contents without a record, so the contents
        are finished first. They stay if the caller is cancelled before the result is known."""
        for draft in drafts:
            await draft.finish()
            draft.kept = True
        try:
            return await self.do(work, *args, **kwargs)
        except Exception:
            for draft in drafts:
                draft.kept = False
            raise

    async def remove(self, ids: list[str]) -> None:
        for id in ids:
            await in_thread(self._contents, partial(self.path(id).unlink, missing_ok=True))

    async def close(self) -> None:
        await in_thread(self._records, self._resources.close)
        self._records.shutdown()
        self._contents.shutdown()

    # -- in the thread -------------------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        with ExitStack() as resources:
            make_private_folder(self._folder)
            make_private_folder(self._files)
            resources.enter_context(locked(self._folder / "lock", self._refuse))
            make_private_file(self._path)
            db = sqlite3.connect(self._path)
            resources.callback(db.close)
            self._prepare(db)
            self._sweep(db)
            self._resources = resources.pop_all()
        return db

    def _refuse(self) -> NoReturn:
        raise StorageFailed(
            f"another server keeps its files, batches and answers in {self._folder}: "
            "give this one its own folder with --data"
        )

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Creates or upgrades the tables. A killed process loses nothing that was committed; a power failure loses the
        last transactions at most."""
        try:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if not 0 <= version <= VERSION:
                raise sqlite3.DatabaseError(f"its version is {version}; this server knows versions up to {VERSION}")
            upgrades = "".join(UPGRADES[each] for each in range(version, VERSION)) if version else ""
            db.executescript(f"BEGIN; {upgrades} {TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"{self._path} cannot be used ({error}): move it away, or give another folder with --data"
            ) from error

    def _sweep(self, db: sqlite3.Connection) -> None:
        """Deletes contents without a record, which were being written or deleted when a server was killed."""
        known = {id for (id,) in db.execute("SELECT id FROM files")}
        for path in self._files.iterdir():
            if path.name not in known:
                path.unlink()


class Draft:
    """Writes a file. It appears with `finish`, and is deleted on leaving unless `kept`."""

    def __init__(self, path: Path, thread: ThreadPoolExecutor) -> None:
        self.id = path.name
        self.size = 0
        self.kept = False
        self._path = path
        self._part = path.with_suffix(".part")
        self._thread = thread
        self._waiting: list[bytes] = []
        self._waiting_size = 0
        self._file: BinaryIO | None = None

    async def write(self, data: bytes) -> None:
        self._waiting.append(data)
        self._waiting_size += len(data)
        self.size += len(data)
        if self._waiting_size >= WRITE_SIZE:
            await self._flush()

    async def finish(self) -> None:
        await self._flush()
        await in_thread(self._thread, self._finish)

    async def __aenter__(self) -> Self:
        await in_thread(self._thread, self._open)
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        if not self.kept:
            await in_thread(self._thread, self._drop)

    async def _flush(self) -> None:
        data, self._waiting, self._waiting_size = b"".join(self._waiting), [], 0
        assert self._file is not None
        await in_thread(self._thread, partial(self._file.write, data))

    # -- in the thread -------------------------------------------------------------------------------------------

    def _open(self) -> None:
        make_private_file(self._part)
        self._file = self._part.open("wb")

    def _finish(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.rename(self._path)

    def _drop(self) -> None:
        assert self._file is not None
        self._file.close()
        self._part.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)


async def in_thread(thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, work)
    except OSError as error:
        raise StorageFailed(f"the disk with the server's files and batches failed: {error}") from error

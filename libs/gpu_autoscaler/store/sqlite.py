"""The store of record in one SQLite file, for services on one machine. Several processes open the same file.

Statements run on a separate thread, so the event loop never waits for the disk. Write-ahead log with synchronous FULL:
a commit is on disk when it returns (SQLite documentation, "PRAGMA synchronous", read 2026-11-21; with NORMAL a power
cut may lose the last commits of a write-ahead log).
"""

import asyncio
import sqlite3
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.store.operations import Operation
from gpu_autoscaler.store.rows import Row
from gpu_autoscaler.store.schema import SchemaVersion, create_or_migrate, version_of
from gpu_autoscaler.store.sql import SqlStore

T = TypeVar("T")

VACUUM_PAGES_MAX = 10_000  # of 4 KiB, a day; the other free pages are used for the next spans
BUSY_SECONDS_MAX = 10.0  # for another process to finish its transaction
URL_PREFIX = "sqlite:///"


def path_of(url: str) -> Path:
    """Return the file of `sqlite:///relative` or `sqlite:////absolute`. Raises ConfigError for other URLs."""
    path = url.removeprefix(URL_PREFIX)
    if path == url or not path:
        raise ConfigError("store", [f"store.url: must be {URL_PREFIX}<file>, such as {URL_PREFIX}gpu-autoscaler.db"])
    return Path(path)


def schema_of(path: Path) -> SchemaVersion:
    """Return the schema of a file, without changing or creating one. Raises TransientError while it is locked."""
    if not path.is_file():
        return SchemaVersion(database="sqlite", place=str(path), base=0, last_addition=0)
    try:
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS_MAX)
        ) as file:
            return version_of(file, str(path))
    except sqlite3.OperationalError as exc:
        raise TransientError(f"store {path}: {exc}; retried") from exc
    except sqlite3.DatabaseError as exc:
        raise ConfigError("store", [f"{path} is not a SQLite database ({exc}); set store.url to another"]) from exc


class SqliteStore(SqlStore):
    """A Store in one file. Create with `open`."""

    spec_sql = "spec"
    audit_sql = "entry"

    def __init__(self, connection: sqlite3.Connection, thread: ThreadPoolExecutor, path: Path) -> None:
        self._connection = connection
        self._thread = thread
        self._path = path

    @classmethod
    async def open(cls, path: Path, *, is_read_only: bool = False, is_migrating: bool = False) -> "SqliteStore":
        """Open or create the file, with `is_migrating` of an older schema too; `is_read_only` only opens it.

        Raises ConfigError for a missing folder, a file that is not a database, or an unsupported schema; TransientError
        while another process locks it.
        """
        if not path.parent.is_dir():
            raise ConfigError(
                "store", [f"folder {path.parent} of {path.name} does not exist; create it or set store.url"]
            )
        thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        try:
            connection = await asyncio.get_running_loop().run_in_executor(
                thread, _connect, path, is_read_only, is_migrating
            )
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(connection, thread, path)

    async def close(self) -> None:
        """Finish pending work and close the file."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()

    async def reclaim_space(self, now: datetime, rolled_before: datetime) -> None:  # noqa: ARG002 - for partitions
        """See Store. A file of an earlier release reuses its free pages, but shrinks by `VACUUM` only."""

        def vacuum() -> None:
            with self._translated_errors():  # a script: `execute` would free one page
                self._connection.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES_MAX:d})")

        await asyncio.get_running_loop().run_in_executor(self._thread, vacuum)

    async def _write(self, operation: Operation[T]) -> T:
        def transaction() -> T:
            with self._translated_errors():
                # IMMEDIATE takes the write lock at once: a transaction that reads first could not wait for it.
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    result = _drive(self._connection, operation)
                    self._connection.execute("COMMIT")
                except BaseException:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
                return result

        return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)

    async def _rows(self, query: str, values: Sequence[object] = ()) -> Sequence[Row]:
        def read() -> list[Row]:
            with self._translated_errors():
                return self._connection.execute(query, values).fetchall()

        return await asyncio.get_running_loop().run_in_executor(self._thread, read)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raise TransientError for a full disk, a lock or a lost file."""
        try:
            yield
        except sqlite3.OperationalError as exc:
            raise TransientError(f"store {self._path}: {exc}; free the disk or the lock; retried") from exc


def _connect(path: Path, is_read_only: bool, is_migrating: bool) -> sqlite3.Connection:  # noqa: FBT001 - by position
    address = f"{path.absolute().as_uri()}?mode={'ro' if is_read_only else 'rwc'}"
    try:
        connection = sqlite3.connect(
            address, uri=True, timeout=BUSY_SECONDS_MAX, isolation_level=None, check_same_thread=False
        )
    except sqlite3.OperationalError as exc:
        raise ConfigError("store", [f"{path} cannot be opened ({exc}); check its permissions"]) from exc
    try:
        if is_read_only:
            version_of(connection, str(path)).require()
            return connection
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # of a new file; no effect on another
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        create_or_migrate(connection, str(path), is_migrating=is_migrating)
    except sqlite3.OperationalError as exc:
        connection.close()
        raise TransientError(f"store {path}: {exc}; retried") from exc
    except sqlite3.DatabaseError as exc:
        connection.close()
        raise ConfigError("store", [f"{path} is not a SQLite database ({exc}); set store.url to another"]) from exc
    except BaseException:
        connection.close()
        raise
    return connection


def _drive(connection: sqlite3.Connection, operation: Operation[T]) -> T:
    try:
        statement = next(operation)
        while True:
            statement = operation.send(connection.execute(*statement).fetchall())
    except StopIteration as ended:
        result: T = ended.value
        return result

"""Migrates a SQLite database to the schema of this version: numbered migrations, each once, under a lock.

Releases up to 0.2 refuse a schema number above their own. Every later migration only adds what those releases do not
use, so its number is kept beside theirs: they start on the newer schema, and a rollback needs no hands.
"""

import sqlite3
from importlib.resources import files
from typing import Literal

from gpu_autoscaler.model.errors import ConfigError

_MIGRATIONS = "gpu_autoscaler.store.migrations"
# The last schemas of 0.2. The number of an additive migration is in the table `schema_additions`.
BASE_NUMBERS = {"sqlite": 3, "postgres": 1}
CREATE_ADDITIONS = "CREATE TABLE IF NOT EXISTS schema_additions (number INTEGER NOT NULL)"
READ_ADDITIONS = "SELECT max(number) FROM schema_additions"


def migrations(database: Literal["sqlite", "postgres"]) -> tuple[tuple[int, str], ...]:
    """Return number and SQL of each migration, in order. The number is the first word of the file's name."""
    scripts = (entry for entry in (files(_MIGRATIONS) / database).iterdir() if entry.name.endswith(".sql"))
    return tuple(sorted((int(entry.name.partition("_")[0]), entry.read_text(encoding="utf-8")) for entry in scripts))


def migrate(connection: sqlite3.Connection, path: str) -> None:
    """Apply missing migrations in one transaction. Raises ConfigError for a newer schema."""
    connection.execute("BEGIN EXCLUSIVE")  # of two concurrent processes the second finds it done
    try:
        _apply(connection, path)
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def require_current_schema(connection: sqlite3.Connection, path: str) -> None:
    """Raise ConfigError unless the schema is that of this version; for readers, which must not migrate it."""
    newest, base = migrations("sqlite")[-1][0], _base(connection)
    current = _current(connection) if base == BASE_NUMBERS["sqlite"] else base
    if current < newest or base > BASE_NUMBERS["sqlite"]:
        raise ConfigError(
            "store", [f"{path} has schema {current}, this version reads {newest}; use the version that wrote it"]
        )


def _apply(connection: sqlite3.Connection, path: str) -> None:
    known, base = migrations("sqlite"), _base(connection)
    newest, current = known[-1][0], _current(connection)
    if base > BASE_NUMBERS["sqlite"]:
        raise ConfigError("store", [f"{path} has schema {base}, this version supports {newest}; run a newer version"])
    for number, script in known:
        if number > current:
            for statement in statements(script):
                connection.execute(statement)
    if newest > current:  # an addition of a later version is left alone
        connection.execute(f"PRAGMA user_version = {BASE_NUMBERS['sqlite']:d}")
        connection.execute(CREATE_ADDITIONS)
        connection.execute("INSERT INTO schema_additions VALUES (?)", (newest,))


def _base(connection: sqlite3.Connection) -> int:
    (base,) = connection.execute("PRAGMA user_version").fetchone()
    return int(base)


def _current(connection: sqlite3.Connection) -> int:
    """Return the number of the last migration, additions included."""
    is_there = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'schema_additions'").fetchone()
    (added,) = connection.execute(READ_ADDITIONS).fetchone() if is_there else (0,)
    return max(_base(connection), added or 0)


def statements(script: str) -> tuple[str, ...]:
    """Return the statements of a script. `executescript` would commit first and so release the lock."""
    complete, statement = [], ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            complete.append(statement)
            statement = ""
    return tuple(complete)

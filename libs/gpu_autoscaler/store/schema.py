"""Brings a SQLite database to the schema that this version knows: numbered migrations, each once, under a lock."""

import sqlite3
from importlib.resources import files
from typing import Literal

from gpu_autoscaler.model.errors import ConfigError

_MIGRATIONS = "gpu_autoscaler.store.migrations"


def migrations(database: Literal["sqlite", "postgres"]) -> tuple[tuple[int, str], ...]:
    """Return number and SQL of each migration, in order. The number is the first word of the file's name."""
    scripts = (entry for entry in (files(_MIGRATIONS) / database).iterdir() if entry.name.endswith(".sql"))
    return tuple(sorted((int(entry.name.partition("_")[0]), entry.read_text(encoding="utf-8")) for entry in scripts))


def migrate(connection: sqlite3.Connection, path: str) -> None:
    """Apply what is missing in one transaction. Raises ConfigError for a schema newer than this version knows."""
    connection.execute("BEGIN EXCLUSIVE")  # two processes that start together: the second finds it done
    try:
        _apply(connection, path)
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def refuse_other(connection: sqlite3.Connection, path: str) -> None:
    """Raise ConfigError unless the schema is the one that this version knows: for readers, who leave it as it is."""
    newest = migrations("sqlite")[-1][0]
    (current,) = connection.execute("PRAGMA user_version").fetchone()
    if current != newest:
        raise ConfigError(
            "store", [f"{path} has schema {current}, this version reads {newest}; use the version that wrote it"]
        )


def _apply(connection: sqlite3.Connection, path: str) -> None:
    known = migrations("sqlite")
    newest = known[-1][0]
    (current,) = connection.execute("PRAGMA user_version").fetchone()
    if current > newest:
        raise ConfigError(
            "store",
            [f"{path} has schema {current}, this version knows {newest}; run the version that wrote it, or a newer"],
        )
    for number, script in known:
        if number > current:
            for statement in statements(script):
                connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {newest:d}")


def statements(script: str) -> tuple[str, ...]:
    """Return the statements of a script. `executescript` would commit before the first and so give up the lock."""
    found, statement = [], ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            found.append(statement)
            statement = ""
    return tuple(found)

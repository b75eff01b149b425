"""Migrates a SQLite database to the schema of this version: numbered migrations, each once, under a lock."""

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
            "store", [f"{path} has schema {current}, this version supports {newest}; run a newer version"]
        )
    for number, script in known:
        if number > current:
            for statement in statements(script):
                connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {newest:d}")


def statements(script: str) -> tuple[str, ...]:
    """Return the statements of a script. `executescript` would commit first and so release the lock."""
    complete, statement = [], ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            complete.append(statement)
            statement = ""
    return tuple(complete)

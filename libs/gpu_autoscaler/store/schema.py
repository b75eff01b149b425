"""The schema of a database: numbered migrations, each applied once, under a lock.

A process creates the schema in an empty database; an older one is migrated by `gpu-autoscaler migrate` alone.

Releases up to 0.2 refuse a schema number above their own. Every later migration only adds what those releases do not
use, so its number is kept beside theirs: they start on the newer schema, and a rollback needs no hands.
"""

import sqlite3
from collections.abc import Mapping
from importlib.resources import files
from typing import Literal, TypeAlias

import msgspec

from gpu_autoscaler.model.errors import MIGRATE_COMMAND, ConfigError

Database: TypeAlias = Literal["sqlite", "postgres"]
_MIGRATIONS = "gpu_autoscaler.store.migrations"
# The last schemas of 0.2. The number of an additive migration is in the table `schema_additions`.
BASE_NUMBERS: Mapping[Database, int] = {"sqlite": 3, "postgres": 1}
CREATE_ADDITIONS = "CREATE TABLE IF NOT EXISTS schema_additions (number INTEGER NOT NULL)"
READ_ADDITIONS = "SELECT max(number) FROM schema_additions"


def migrations(database: Database) -> tuple[tuple[int, str], ...]:
    """Return number and SQL of each migration, in order. The number is the first word of the file's name."""
    scripts = (entry for entry in (files(_MIGRATIONS) / database).iterdir() if entry.name.endswith(".sql"))
    return tuple(sorted((int(entry.name.partition("_")[0]), entry.read_text(encoding="utf-8")) for entry in scripts))


class SchemaVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The schema of a database. All numbers are 0 for an empty one."""

    database: Database
    place: str  # for people, without a password
    base: int  # as releases up to 0.2 read it
    last_addition: int

    @property
    def current(self) -> int:
        """The number of the last migration."""
        return max(self.base, self.last_addition) if self.base == BASE_NUMBERS[self.database] else self.base

    @property
    def newest(self) -> int:
        """The number of the last migration of this version."""
        return migrations(self.database)[-1][0]

    def refuse_newer(self) -> None:
        """Raise ConfigError for a schema that a later version has changed and not only added to."""
        if self.base > BASE_NUMBERS[self.database]:
            mismatch = f"{self.place} has schema {self.base}, this version supports {self.newest}"
            raise ConfigError("store", [f"{mismatch}; run the version that wrote it, or a newer one"])

    def require(self) -> None:
        """Raise ConfigError unless this version works on the schema; additions of a later one are left alone."""
        self.refuse_newer()
        if self.current < self.newest:
            mismatch = f"{self.place} has schema {self.current}, this version needs {self.newest}"
            raise ConfigError("store", [f"{mismatch}; run `{MIGRATE_COMMAND}`"])

    def missing(self) -> tuple[tuple[int, str], ...]:
        """Return number and SQL of each migration that the database lacks."""
        return tuple((number, script) for number, script in migrations(self.database) if number > self.current)


def create_or_migrate(connection: sqlite3.Connection, path: str, *, is_migrating: bool) -> None:
    """Create the schema in an empty database, and with `is_migrating` bring an older one up to date.

    Raises ConfigError for any other schema than that of this version.
    """
    connection.execute("BEGIN EXCLUSIVE")  # of two concurrent processes the second finds it done
    try:
        _apply(connection, version_of(connection, path), is_migrating=is_migrating)
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _apply(connection: sqlite3.Connection, version: SchemaVersion, *, is_migrating: bool) -> None:
    version.refuse_newer()
    if version.current and not is_migrating:
        version.require()
    for _, script in version.missing():
        for statement in statements(script):
            connection.execute(statement)
    if version.missing():
        connection.execute(f"PRAGMA user_version = {BASE_NUMBERS['sqlite']:d}")
        connection.execute(CREATE_ADDITIONS)
        connection.execute("INSERT INTO schema_additions VALUES (?)", (version.newest,))


def version_of(connection: sqlite3.Connection, path: str) -> SchemaVersion:
    """Return the schema of a SQLite database."""
    (base,) = connection.execute("PRAGMA user_version").fetchone()
    is_there = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'schema_additions'").fetchone()
    (added,) = connection.execute(READ_ADDITIONS).fetchone() if is_there else (0,)
    return SchemaVersion(database="sqlite", place=path, base=int(base), last_addition=int(added or 0))


def statements(script: str) -> tuple[str, ...]:
    """Return the statements of a script. `executescript` would commit first and so release the lock."""
    complete, statement = [], ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            complete.append(statement)
            statement = ""
    return tuple(complete)

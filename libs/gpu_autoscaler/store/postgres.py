"""The store of record in PostgreSQL, for services on several machines.

A commit is on the server's disk when it returns: `synchronous_commit` is raised to `on` where the server's default is
`off` (PostgreSQL documentation, "20.5 Write Ahead Log", read 2026-11-21); a stronger default, for replicas, is kept.
Passwords come from `PGPASSWORD`, a password file or the URL; messages never show the URL.
"""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from functools import cache
from typing import TypeAlias, TypeVar
from urllib.parse import urlsplit

import asyncpg
import structlog

from gpu_autoscaler.core.state.ledger import period_start
from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.store.operations import Operation
from gpu_autoscaler.store.rows import Row, number_of
from gpu_autoscaler.store.schema import BASE_NUMBERS, CREATE_ADDITIONS, READ_ADDITIONS, SchemaVersion
from gpu_autoscaler.store.sql import SqlStore

T = TypeVar("T")
Connection: TypeAlias = "asyncpg.Connection | asyncpg.pool.PoolConnectionProxy"

CONNECT_SECONDS_MAX = 10.0
CALL_SECONDS_MAX = 10.0  # one statement; the largest are snapshots of some tens of megabytes
CONNECTION_COUNT_MAX = 4  # per process

log = structlog.get_logger()

_LOCK = 0x6770_7501  # advisory lock of migrations: "gpu" and the schema's table

# Away, full, restarting or a lost race: by classes of SQLSTATE ("Appendix A. PostgreSQL Error Codes").
_TRANSIENT_ERRORS = (
    OSError,  # with ConnectionError and TimeoutError
    asyncpg.InterfaceError,  # the connection was lost during a call
    asyncpg.PostgresConnectionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.TransactionRollbackError,
    asyncpg.PostgresSystemError,
    asyncpg.ReadOnlySQLTransactionError,  # the server is a replica now
)
_CONFIG_ERRORS = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
    asyncpg.ClientConfigurationError,
    ValueError,
)


PARTITIONS_AHEAD_COUNT = 3
_PARTITIONS = (
    "SELECT relname::text FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid "
    "WHERE inhparent = 'ledger'::regclass AND relname ~ '^ledger_[0-9]{8}$' ORDER BY 1"
)
_UNMERGED = (
    "SELECT 1 FROM {} AS spans "
    "WHERE NOT EXISTS (SELECT 1 FROM charged_instances WHERE last_number = spans.number) LIMIT 1"
)
# The last spans of instances are kept: those of no partition are in the default one.
_DROP = "ALTER TABLE ledger DETACH PARTITION {0}; INSERT INTO ledger SELECT * FROM {0}; DROP TABLE {0}"
# A confirmed span is a new row version: with the default of a fifth, dead ones would take up a fifth more.
_VACUUMED = "autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000"
LOCK_SECONDS_MAX = 2
MIGRATION_SECONDS_MAX = 600.0  # to index a ledger that was never rolled up


class PostgresStore(SqlStore):
    """A Store in a PostgreSQL database, with a small connection pool. Create with `open`."""

    spec_sql = "spec::json"
    audit_sql = "entry::json"

    def __init__(self, pool: asyncpg.Pool, server: str) -> None:
        self._pool = pool
        self._server = server

    @classmethod
    async def open(cls, url: str, *, is_read_only: bool = False, is_migrating: bool = False) -> "PostgresStore":
        """Connect, and create the schema in an empty database; with `is_migrating` bring an older one up to date.

        Raises ConfigError for a wrong URL, password, database or permission, or an unsupported schema; TransientError
        while the server is away.
        """
        server = server_name(url)
        settings = {"application_name": "gpu-autoscaler"}
        if is_read_only:
            settings["default_transaction_read_only"] = "on"
        async with _connected(url, server) as connection:
            if is_read_only:
                (await _version_of(connection, server)).require()
            else:
                await _create_or_migrate(connection, server, is_migrating=is_migrating)
            if await connection.fetchval("SHOW synchronous_commit") == "off":
                settings["synchronous_commit"] = "on"
        async with _translated_errors(server), _translated_config_errors(server):
            pool = await asyncpg.create_pool(
                url,
                min_size=0,  # connected on demand: a pool that refills itself logs while the server is away
                max_size=CONNECTION_COUNT_MAX,
                timeout=CONNECT_SECONDS_MAX,
                command_timeout=CALL_SECONDS_MAX,
                server_settings=settings,
            )
        return cls(pool, server)

    async def close(self) -> None:
        await self._pool.close()

    async def reclaim_space(self, now: datetime, rolled_before: datetime) -> None:
        """See Store. Add the partitions of the next days, and drop those whose spans are all merged.

        Each step waits briefly for its lock, so that it never holds up a charge; what fails is done the next day.
        """
        async with _translated_errors(self._server), self._pool.acquire() as connection:
            names = [str(row[0]) for row in await connection.fetch(_PARTITIONS)]
            for days in range(1, PARTITIONS_AHEAD_COUNT + 1):
                start = period_start("day", now + timedelta(days=days))
                if (name := f"ledger_{start:%Y%m%d}") not in names:
                    bounds = f"FROM ({number_of(start)}) TO ({number_of(start + timedelta(days=1))}) WITH ({_VACUUMED})"
                    await _briefly(connection, f"CREATE TABLE {name} PARTITION OF ledger FOR VALUES {bounds}")
            for name in names:
                if name < f"ledger_{rolled_before:%Y%m%d}" and not await connection.fetch(_UNMERGED.format(name)):
                    await _briefly(connection, _DROP.format(name))

    async def _write(self, operation: Operation[T]) -> T:
        async with _translated_errors(self._server), self._pool.acquire() as connection, connection.transaction():
            return await _drive(connection, operation)

    async def _rows(self, query: str, values: Sequence[object] = ()) -> Sequence[Row]:
        async with _translated_errors(self._server), self._pool.acquire() as connection:
            return await _fetch(connection, query, values)


def server_name(url: str) -> str:
    """Return host, port and database of a URL for messages, without user and password. Raises ConfigError."""
    parts = urlsplit(url)
    try:
        port = parts.port or 5432
    except ValueError:
        error = "store.url: invalid host or port; write / : and @ of a password as %2F, %3A and %40, or set PGPASSWORD"
        raise ConfigError("store", [error]) from None
    return f"PostgreSQL at {parts.hostname or 'localhost'}:{port}{parts.path}"


@cache
def numbered(query: str) -> str:
    """Return the query with PostgreSQL's `$1`, `$2`, ... for its `?`."""
    counts = iter(range(1, query.count("?") + 1))
    return re.sub(r"\?", lambda _: f"${next(counts)}", query)


async def _drive(connection: Connection, operation: Operation[T]) -> T:
    try:
        query, values = next(operation)
        while True:
            query, values = operation.send(await _fetch(connection, query, values))
    except StopIteration as ended:
        result: T = ended.value
        return result


async def _fetch(connection: Connection, query: str, values: Sequence[object]) -> list[Row]:
    return [tuple(row) for row in await connection.fetch(numbered(query), *values)]


async def _briefly(connection: Connection, statements: str) -> None:
    """Run statements in one transaction, unless a lock is not free in time."""
    try:
        async with connection.transaction():
            await connection.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS_MAX}s'")
            await connection.execute(statements)
    except asyncpg.LockNotAvailableError:
        log.info("partition left as it is, the ledger is in use", step="none, tried again the next day")


@asynccontextmanager
async def _translated_errors(server: str) -> AsyncIterator[None]:
    try:
        yield
    except _TRANSIENT_ERRORS as exc:
        detail = str(exc) or type(exc).__name__
        raise TransientError(f"store, {server}: {detail}; check that the server runs; retried") from exc
    except asyncpg.InsufficientPrivilegeError as exc:
        raise ConfigError("store", [f"{server}: {exc}; grant it to the role of store.url"]) from exc


@asynccontextmanager
async def _translated_config_errors(server: str) -> AsyncIterator[None]:
    """Raise ConfigError, naming the server, for what only an operator can correct."""
    try:
        yield
    except _CONFIG_ERRORS as exc:
        raise ConfigError("store", [f"{server}: {exc}; check store.url, PGPASSWORD and role permissions"]) from exc


async def schema_of(url: str) -> SchemaVersion:
    """Return the schema of a database, without changing it. Raises as `PostgresStore.open`."""
    server = server_name(url)
    async with _connected(url, server) as connection:
        return await _version_of(connection, server)


@asynccontextmanager
async def _connected(url: str, server: str) -> AsyncIterator[asyncpg.Connection]:
    async with _translated_errors(server), _translated_config_errors(server):
        connection = await asyncpg.connect(url, timeout=CONNECT_SECONDS_MAX, command_timeout=CALL_SECONDS_MAX)
        try:
            yield connection
        finally:
            await connection.close(timeout=CALL_SECONDS_MAX)


async def _version_of(connection: Connection, server: str) -> SchemaVersion:
    base, added = 0, 0
    if await connection.fetchval("SELECT to_regclass('gpu_autoscaler_schema')") is not None:
        base = await connection.fetchval("SELECT number FROM gpu_autoscaler_schema")
        if await connection.fetchval("SELECT to_regclass('schema_additions')") is not None:
            added = await connection.fetchval(READ_ADDITIONS) or 0
    return SchemaVersion(database="postgres", place=server, base=base, last_addition=added)


async def _create_or_migrate(connection: Connection, server: str, *, is_migrating: bool) -> None:
    """Apply missing migrations in one transaction under a lock: of two concurrent processes one finds it done."""
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
        version = await _version_of(connection, server)
        version.refuse_newer()
        if version.current and not is_migrating:
            version.require()
        if version.current == 0:
            await connection.execute("CREATE TABLE IF NOT EXISTS gpu_autoscaler_schema (number INTEGER NOT NULL)")
            await connection.execute("DELETE FROM gpu_autoscaler_schema")
            await connection.execute("INSERT INTO gpu_autoscaler_schema VALUES ($1)", BASE_NUMBERS["postgres"])
        for _, script in version.missing():
            await connection.execute(script, timeout=MIGRATION_SECONDS_MAX)
        if version.missing():
            await connection.execute(CREATE_ADDITIONS)
            await connection.execute("INSERT INTO schema_additions VALUES ($1)", version.newest)

"""Opens a store by its URL."""

import asyncio
from importlib.util import find_spec
from pathlib import Path

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.store import sqlite
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler.store.schema import SchemaVersion
from gpu_autoscaler.store.sqlite import SqliteStore, path_of

POSTGRES_PREFIXES = ("postgresql://", "postgres://")


async def open_store(url: str, *, is_read_only: bool = False, is_migrating: bool = False) -> Store:
    """Open the store, and create it if it is empty, except with `is_read_only`. An older schema is refused, except with
    `is_migrating`.

    Raises ConfigError for what an operator must correct, TransientError for a database that is away or locked.
    """
    if not url.startswith(POSTGRES_PREFIXES):
        return await SqliteStore.open(path_of(url), is_read_only=is_read_only, is_migrating=is_migrating)
    _require_driver()
    from gpu_autoscaler.store.postgres import PostgresStore  # noqa: PLC0415 - its driver is an extra

    return await PostgresStore.open(url, is_read_only=is_read_only, is_migrating=is_migrating)


async def schema_of(url: str) -> SchemaVersion:
    """Return the schema of the store, without changing or creating it. Raises as `open_store`."""
    if not url.startswith(POSTGRES_PREFIXES):
        return await asyncio.to_thread(sqlite.schema_of, path_of(url))
    _require_driver()
    from gpu_autoscaler.store import postgres  # noqa: PLC0415 - its driver is an extra

    return await postgres.schema_of(url)


def _require_driver() -> None:
    if find_spec("asyncpg") is None:
        raise ConfigError(
            "store", ["store.url: the PostgreSQL driver is not installed; install gpu-autoscaler[postgres]"]
        )


def is_missing(url: str) -> bool:
    """True when the URL names a missing file, so that a reading command has nothing to read."""
    return not url.startswith(POSTGRES_PREFIXES) and not Path(path_of(url)).is_file()


def store_url_error(url: str) -> str | None:
    """Return the error in a store URL, None without one. Never shows the URL, which may contain a password."""
    if url.startswith(("sqlite:///", *POSTGRES_PREFIXES)):
        return None
    return f"must start with sqlite:/// or postgresql:// (got {url.partition(':')[0]!r})"

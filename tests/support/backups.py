"""Backups as docs/operations.md describes them: the database by its own tools, streams by the server's API, which
`nats account backup` and `nats account restore` call."""

import asyncio
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from tests.support.postgres import PostgresServer

_SECONDS_MAX = 60.0


class Database(Protocol):
    """A store of record that can be saved and put back."""

    @property
    def url(self) -> str:
        """Its address in the settings."""

    def save(self, target: Path) -> None:
        """Write a backup while services use the database."""

    def put_back(self, source: Path | None) -> None:
        """Replace the database by the backup, by an empty one without it. No service runs."""


class SqliteDatabase:
    """A file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.url = f"sqlite:///{path}"

    def save(self, target: Path) -> None:
        """See Database."""
        subprocess.run(["sqlite3", self._path, f".backup '{target}'"], check=True)

    def put_back(self, source: Path | None) -> None:
        """See Database."""
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        if source is not None:
            shutil.copyfile(source, self._path)


class PostgresDatabase:
    """A database of a server."""

    def __init__(self, server: PostgresServer) -> None:
        self.url = server.url()

    def save(self, target: Path) -> None:
        """See Database."""
        subprocess.run(["pg_dump", "--format=custom", f"--file={target}", self.url], check=True)

    def put_back(self, source: Path | None) -> None:
        """See Database."""
        empty = "DROP SCHEMA public CASCADE; CREATE SCHEMA public"
        subprocess.run(["psql", "--quiet", self.url, "--command", empty], check=True)
        if source is not None:
            subprocess.run(["pg_restore", "--no-owner", f"--dbname={self.url}", source], check=True)


class StreamBackup(msgspec.Struct, frozen=True):
    """A stream with its consumers, as the server packs it."""

    config: dict[str, Any]
    state: dict[str, Any]
    chunks: tuple[bytes, ...]


async def save_streams(url: str, names: Iterable[str]) -> dict[str, StreamBackup]:
    """Read a backup of each stream. Source: NATS documentation, "JetStream / Disaster Recovery" (read 2026-11-23)."""
    connection = Client()
    await connection.connect(url)
    try:
        return {name: await _saved(connection, name) for name in names}
    finally:
        await connection.close()


async def _saved(connection: Client, name: str) -> StreamBackup:
    inbox, chunks = connection.new_inbox(), list[bytes]()
    is_over = asyncio.Event()

    async def receive(message: Msg) -> None:
        if not message.data:
            is_over.set()
            return
        chunks.append(message.data)
        if message.reply:
            await message.respond(b"")  # the server sends the next ones

    subscription = await connection.subscribe(inbox, cb=receive)
    answer = await _asked(connection, f"STREAM.SNAPSHOT.{name}", {"deliver_subject": inbox, "no_consumers": False})
    async with asyncio.timeout(_SECONDS_MAX):
        await is_over.wait()
    await subscription.unsubscribe()
    return StreamBackup(answer["config"], answer["state"], tuple(chunks))


async def put_streams_back(url: str, backups: dict[str, StreamBackup]) -> None:
    """Restore streams that the server does not have, with their consumers."""
    connection = Client()
    await connection.connect(url)
    try:
        for name, backup in backups.items():
            body = {"config": backup.config, "state": backup.state}
            answer = await _asked(connection, f"STREAM.RESTORE.{name}", body)
            for chunk in (*backup.chunks, b""):
                reply = await connection.request(answer["deliver_subject"], chunk, timeout=_SECONDS_MAX)
                assert b"error" not in reply.data, reply.data
    finally:
        await connection.close()


async def _asked(connection: Client, subject: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = await connection.request(f"$JS.API.{subject}", msgspec.json.encode(body), timeout=_SECONDS_MAX)
    answer: dict[str, Any] = msgspec.json.decode(reply.data)
    assert "error" not in answer, (subject, answer)
    return answer

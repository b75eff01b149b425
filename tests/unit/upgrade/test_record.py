"""The recorded store has what its services start from."""

import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from tests.upgrade.record import compact_store

from gpu_autoscaler.store.sqlite import SqliteStore

SAVED_AT = datetime(2026, 11, 21, tzinfo=UTC)


async def test_the_last_snapshot_of_each_service_is_recorded(tmp_path: Path) -> None:
    """The older ones only make it large; a service without its own would start from the streams alone."""
    path = tmp_path / "store.db"
    store = await SqliteStore.open(path)
    for service, body in (("scaler", b"1"), ("cost_tracker", b"2"), ("scaler", b"3"), ("cost_tracker", b"4")):
        await store.save_snapshot(label=b"{}", body=body, saved_at=SAVED_AT, service=service)
    await store.close()
    copy = tmp_path / "copy.db"
    copy.write_bytes(compact_store(path))
    with closing(sqlite3.connect(copy)) as recorded:
        assert recorded.execute("SELECT service, body FROM snapshots ORDER BY number").fetchall() == [
            ("scaler", b"3"),
            ("cost_tracker", b"4"),
        ]

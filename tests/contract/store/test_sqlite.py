"""The SQLite store fulfills the contract, and its errors name the remedy."""

import contextlib
import sqlite3
from datetime import timedelta
from pathlib import Path

import pytest
from tests.contract.store.audit_contract import AuditContract, RunScript, SqlAuditContract, act, chain_of
from tests.contract.store.contract import INSTANCES, T0, Open, StoreContract, job, roll_up, span

from gpu_autoscaler.model.errors import MIGRATE_COMMAND, ConfigError, TransientError
from gpu_autoscaler.store.rows import document, number_of
from gpu_autoscaler.store.schema import READ_ADDITIONS, migrations, statements
from gpu_autoscaler.store.sqlite import SqliteStore, path_of, schema_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that is not there yet."""
    return tmp_path / "store.db"


@pytest.fixture
def open_store(path: Path) -> Open:
    """Opens the same file each time."""

    async def open_it() -> SqliteStore:
        return await SqliteStore.open(path)

    return open_it


@pytest.fixture
def run_script(path: Path) -> RunScript:
    """Runs statements on the same file."""

    async def run_it(script: str) -> None:
        with contextlib.closing(sqlite3.connect(path)) as file:
            file.executescript(script)

    return run_it


class TestSqliteStore(StoreContract, AuditContract, SqlAuditContract):
    """Everything that every store does."""


async def test_a_missing_folder_is_an_error_with_the_next_step(tmp_path: Path) -> None:
    """Nothing is made behind the operator's back."""
    with pytest.raises(ConfigError, match=r"does not exist; create it or set store\.url"):
        await SqliteStore.open(tmp_path / "absent" / "store.db")


@pytest.fixture
def notes(path: Path) -> Path:
    """A file that somebody else wrote."""
    path.write_text("these are notes, long enough to have a header of their own " * 10)
    return path


async def test_a_file_that_is_no_database_is_refused(notes: Path) -> None:
    """Somebody's notes are not overwritten."""
    with pytest.raises(ConfigError, match="is not a SQLite database"):
        await SqliteStore.open(notes)


async def test_a_newer_schema_is_refused(path: Path) -> None:
    """An older version never writes into what it does not understand."""
    await (await SqliteStore.open(path)).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ConfigError, match=f"has schema 99, this version supports {migrations('sqlite')[-1][0]}"):
        await SqliteStore.open(path)


async def test_a_reader_changes_nothing(path: Path) -> None:
    """It sees what a writer has committed, cannot write, and neither makes a file nor brings one up to date."""
    with pytest.raises(ConfigError, match="cannot be opened"):
        await SqliteStore.open(path, is_read_only=True)
    assert not path.exists()  # noqa: ASYNC240 - a look, no work
    writer = await SqliteStore.open(path)
    await writer.accept_job(job(), request_digest="a", accepted_at=T0)
    reader = await SqliteStore.open(path, is_read_only=True)
    assert await reader.job(job().job_id) is not None
    with pytest.raises(TransientError, match="readonly"):
        await reader.accept_job(job("more"), request_digest="a", accepted_at=T0)
    await reader.close()
    writer._connection.execute("PRAGMA user_version = 1")
    await writer.close()
    with pytest.raises(ConfigError, match=rf"has schema 1, this version needs \d; run `{MIGRATE_COMMAND}`"):
        await SqliteStore.open(path, is_read_only=True)


async def test_a_locked_store_is_for_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another process writes, the caller gets a retryable error; afterwards it works."""
    monkeypatch.setattr("gpu_autoscaler.store.sqlite.BUSY_SECONDS_MAX", 0.05)
    store = await SqliteStore.open(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(TransientError, match="locked"):
        await store.accept_job(job(), request_digest="a", accepted_at=T0)
    other.execute("ROLLBACK")
    other.close()
    assert await store.accept_job(job(), request_digest="a", accepted_at=T0) == "accepted"
    await store.close()


async def test_a_full_disk_is_for_later_and_loses_nothing(path: Path) -> None:
    """A job whose row does not fit is not accepted; what was accepted stays."""
    store = await SqliteStore.open(path)
    await store.accept_job(job("job-1"), request_digest="a", accepted_at=T0)
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(TransientError, match="full"):
        await store.accept_job(job("more"), request_digest="a" * 1_000_000, accepted_at=T0)
    assert await store.job(job("more").job_id) is None
    assert await store.job(job("job-1").job_id) is not None
    await store.close()


async def test_commits_reach_the_disk_before_they_return(path: Path) -> None:
    """FULL: an accepted job survives a power cut."""
    store = await SqliteStore.open(path)
    assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    await store.close()


def test_migrations_are_numbered_without_gaps() -> None:
    """Each is applied once, in order."""
    assert [number for number, _ in migrations("sqlite")] == list(range(1, len(migrations("sqlite")) + 1))


def test_scripts_are_split_into_their_statements() -> None:
    """A semicolon in a comment or a text ends nothing."""
    script = "-- one; two\nCREATE TABLE a (b TEXT DEFAULT ';');\nCREATE TABLE c (d);\n"
    assert len(statements(script)) == 2


@pytest.mark.parametrize("url", ["mysql://db", "sqlite://file", "sqlite:///", "file.db"])
def test_other_urls_are_refused(url: str) -> None:
    """The message shows what a URL looks like."""
    with pytest.raises(ConfigError, match="sqlite:///<file>"):
        path_of(url)


def test_three_slashes_are_relative_and_four_absolute() -> None:
    """As in other tools that name SQLite files by URL."""
    assert path_of("sqlite:///a/b.db") == Path("a/b.db")
    assert path_of("sqlite:////a/b.db") == Path("/a/b.db")


async def test_an_addition_is_no_newer_schema_to_an_older_release(path: Path) -> None:
    """Releases compare `user_version` with their own last number: additions do not raise it, and later ones are left
    alone."""
    await (await SqliteStore.open(path)).close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (3,)
    assert connection.execute(READ_ADDITIONS).fetchone() == (migrations("sqlite")[-1][0],)
    connection.execute("INSERT INTO schema_additions VALUES (99)")
    connection.commit()
    for is_read_only in (False, True):
        await (await SqliteStore.open(path, is_read_only=is_read_only)).close()
    assert connection.execute(READ_ADDITIONS).fetchone() == (99,)
    connection.close()


async def test_a_store_of_the_last_release_is_migrated(path: Path) -> None:
    """By the command alone. Its spans and charges are as before; a charge that ended long ago is no longer open."""
    connection = sqlite3.connect(path)
    for number, script in migrations("sqlite"):
        for statement in statements(script) if number <= 3 else ():
            connection.execute(statement)
    connection.execute("PRAGMA user_version = 3")
    spans = [span(0, provider_id="sim:///a/i-2"), *(span(minutes) for minutes in (0, 1, 60 * 24 * 9))]
    for each in spans:
        connection.execute(
            "INSERT INTO ledger (provider_id, from_at, to_at, total_micro_usd, idle_micro_usd, fact, is_confirmed) "
            "VALUES (?, ?, ?, 100, 25, ?, 1)",
            (each.provider_id, number_of(each.from_at), number_of(each.to_at), document(each)),
        )
    insert = "INSERT INTO charged_instances VALUES (?, ?, ?, ?)"
    connection.execute(insert, ("sim:///a/i-2", number_of(T0), 1, 100))
    connection.execute(insert, ("sim:///a/i-1", number_of(T0), 4, 300))
    connection.commit()
    connection.close()

    with pytest.raises(ConfigError, match=f"has schema 3, this version needs .* run `{MIGRATE_COMMAND}`"):
        await SqliteStore.open(path)
    assert schema_of(path).current == 3
    store = await SqliteStore.open(path, is_migrating=True)
    assert schema_of(path).missing() == ()
    assert (await store.ledger()).rows == tuple(reversed(spans))
    assert set(await store.last_charges()) == {"sim:///a/i-1"}
    assert set(await store.last_charges(INSTANCES)) == set(INSTANCES)
    await roll_up(store, T0 + timedelta(days=20))
    assert sum(row.total_micro_usd for row in (await store.ledger()).rows) == 400
    assert await store.append_audit([act(1)]) == 1
    assert (await chain_of(store)).violation is None
    await store.close()


@pytest.mark.parametrize(("field", "index"), [("job_name", "jobs_by_name"), ("submitted_by", "jobs_by_user")])
async def test_lists_by_name_and_by_user_read_an_index(path: Path, field: str, index: str) -> None:
    """The history of years is not read for one name, nor sorted."""
    store = await SqliteStore.open(path)
    query = f"SELECT job_id FROM jobs WHERE {store.spec_sql} ->> '{field}' = ? AND TRUE ORDER BY number DESC LIMIT 2"  # noqa: S608 - a constant
    steps = store._connection.execute(f"EXPLAIN QUERY PLAN {query}", ("train",)).fetchall()
    assert [index in detail and "SORT" not in detail for *_, detail in steps] == [True], steps
    await store.close()


async def test_merged_spans_leave_the_file(path: Path) -> None:
    """The space of a new file is returned to the disk; it does not only wait for more spans."""
    store = await SqliteStore.open(path)
    spans = [span(minutes) for minutes in range(24 * 60 * 3)]
    await store.charge(spans)
    store._connection.execute("UPDATE ledger SET is_confirmed = 1")
    store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = path.stat().st_size  # noqa: ASYNC240 - a look, no work
    await roll_up(store, T0 + timedelta(days=5))
    await store.reclaim_space(T0, T0)
    store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert path.stat().st_size < before / 10  # noqa: ASYNC240 - a look, no work
    await store.close()

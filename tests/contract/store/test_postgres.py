"""The PostgreSQL store fulfills the contract, and its errors name the remedy."""

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
from tests.contract.store.audit_contract import AuditContract, RunScript, SqlAuditContract, act, chain_of
from tests.contract.store.contract import INSTANCES, T0, Open, StoreContract, job, roll_up, span
from tests.support.postgres import PostgresServer, postgres, postgres_server_url, postgres_url

from gpu_autoscaler.core.state.ledger import period_start
from gpu_autoscaler.model.errors import MIGRATE_COMMAND, ConfigError, TransientError
from gpu_autoscaler.store.opening import open_store as open_by_url
from gpu_autoscaler.store.opening import schema_of
from gpu_autoscaler.store.postgres import PostgresStore, numbered
from gpu_autoscaler.store.rows import document, number_of
from gpu_autoscaler.store.schema import migrations

__all__ = ["postgres", "postgres_server_url", "postgres_url"]  # fixtures

OPERATIONS = Path(__file__).parents[3] / "docs/operations.md"


@pytest.fixture
def open_store(postgres_url: str) -> Open:
    """Opens the same database each time."""

    async def open_it() -> PostgresStore:
        return await PostgresStore.open(postgres_url)

    return open_it


@pytest.fixture
def run_script(postgres_url: str) -> RunScript:
    """Runs statements in the same database."""

    async def run_it(script: str) -> None:
        connection = await asyncpg.connect(postgres_url)
        try:
            await connection.execute(script)
        finally:
            await connection.close()

    return run_it


class TestPostgresStore(StoreContract, AuditContract, SqlAuditContract):
    """Everything that every store does."""


async def test_services_that_start_together_find_one_schema(postgres_url: str) -> None:
    """All tables are made once, whoever comes first."""
    stores = await asyncio.gather(*(PostgresStore.open(postgres_url) for _ in range(6)))
    taken = await asyncio.gather(*(store.accept_job(job(), request_digest="a", accepted_at=T0) for store in stores))
    assert sorted(taken) == ["accepted", *["same"] * 5]
    await asyncio.gather(*(store.close() for store in stores))


async def test_two_that_charge_the_same_minutes_charge_them_once(postgres_url: str) -> None:
    """Two trackers over one ledger, at the same time: each span is one of theirs, and the sums are of one."""
    first, second = await PostgresStore.open(postgres_url), await PostgresStore.open(postgres_url)
    for minutes in range(20):
        spans = [span(minutes)]
        assert sum(await asyncio.gather(first.charge(spans), second.charge(spans))) == 1
    (charged,) = (await first.last_charges()).values()
    assert charged.total_micro_usd == 20 * 100
    await first.close()
    await second.close()


@pytest.mark.parametrize(("field", "index"), [("job_name", "jobs_by_name"), ("submitted_by", "jobs_by_user")])
async def test_lists_by_name_and_by_user_read_an_index(postgres_url: str, field: str, index: str) -> None:
    """The history of years is not read for one name, nor sorted."""
    await (await PostgresStore.open(postgres_url)).close()
    connection = await asyncpg.connect(postgres_url)
    await connection.execute("SET enable_seqscan = off; SET enable_bitmapscan = off")  # of an empty table it is cheaper
    term = f"{PostgresStore.spec_sql} ->> '{field}' = 'train'"
    steps = await connection.fetch(f"EXPLAIN SELECT job_id FROM jobs WHERE {term} ORDER BY number DESC LIMIT 2")  # noqa: S608 - a constant
    plan = "\n".join(step[0] for step in steps)
    assert index in plan, plan
    assert "Sort" not in plan, plan
    await connection.close()


async def test_a_killed_server_is_for_later_and_loses_nothing(postgres: PostgresServer) -> None:
    """During an outage callers get a retryable error; accepted jobs are there afterwards."""
    store = await PostgresStore.open(postgres.url())
    await store.accept_job(job("kept"), request_digest="a", accepted_at=T0)
    postgres.kill()
    for _ in range(2):  # the connection is lost under the first call; the second finds nobody
        with pytest.raises(TransientError, match="check that the server runs"):
            await store.accept_job(job("later"), request_digest="a", accepted_at=T0)
    with pytest.raises(TransientError, match=f"127.0.0.1:{postgres.port}/postgres"):
        await PostgresStore.open(postgres.url())
    postgres.start()
    assert await store.job(job("kept").job_id) is not None
    assert await store.job(job("later").job_id) is None
    assert await store.accept_job(job("later"), request_digest="a", accepted_at=T0) == "accepted"
    await store.close()


async def test_a_wrong_password_is_reported_without_showing_it(postgres: PostgresServer) -> None:
    """The message names the server and what to check, never the password or the user's URL."""
    with pytest.raises(ConfigError, match=r"PostgreSQL at 127\.0\.0\.1.*check store\.url, PGPASSWORD") as caught:
        await PostgresStore.open(postgres.url(password="wr0ng"))
    assert "wr0ng" not in str(caught.value)


async def test_a_password_that_breaks_the_url_is_not_shown() -> None:
    """A slash in it ends the host; the error explains how to encode it."""
    with pytest.raises(ConfigError, match="%2F") as caught:
        await PostgresStore.open("postgresql://tests:se/cret@127.0.0.1:5432/db")
    assert "cret" not in str(caught.value)


async def test_a_missing_database_is_reported(postgres: PostgresServer) -> None:
    """It is not made behind the operator's back."""
    with pytest.raises(ConfigError, match='database "absent" does not exist'):
        await PostgresStore.open(postgres.url("absent"))


async def test_another_schema_is_refused(postgres_url: str) -> None:
    """An older version never writes into what it does not understand, and a reader brings nothing up to date."""
    with pytest.raises(ConfigError, match=r"has schema 0, this version needs \d"):
        await open_by_url(postgres_url, is_read_only=True)
    await (await open_by_url(postgres_url)).close()
    connection = await asyncpg.connect(postgres_url)
    await connection.execute("UPDATE gpu_autoscaler_schema SET number = 99")
    await connection.close()
    with pytest.raises(ConfigError, match=f"has schema 99, this version supports {migrations('postgres')[-1][0]}"):
        await open_by_url(postgres_url)


READER_GRANT = "GRANT SELECT ON gpu_autoscaler_schema, schema_additions, snapshots TO {}"


async def test_a_role_that_may_read_snapshots_suffices_for_a_start(postgres_url: str) -> None:
    """With the rights that docs/operations.md names; what it may not read is for the operator to correct."""
    assert READER_GRANT.removesuffix(" TO {}") in OPERATIONS.read_text(encoding="utf-8")
    writer, role = await PostgresStore.open(postgres_url), f"reader_{uuid.uuid4().hex}"
    await writer.save_snapshot(label=b"label", body=b"body", saved_at=T0)
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'reads'; {READER_GRANT.format(role)}")
    url = urlsplit(postgres_url)
    login = url._replace(netloc=f"{role}:reads@{url.netloc.rpartition('@')[2]}").geturl()
    reader = await PostgresStore.open(login, is_read_only=True)
    try:
        (row,) = await reader.snapshots()
        assert await reader.snapshot_body(row.number) == b"body"
        with pytest.raises(ConfigError, match="permission denied for table jobs"):
            await reader.job(job().job_id)
        with pytest.raises(TransientError, match="read-only"):
            await reader.delete_snapshots([row.number])
    finally:
        await reader.close()
        await writer.close()
        await connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
        await connection.close()


async def test_a_reader_changes_nothing(postgres_url: str) -> None:
    """It sees what a writer has committed, and cannot write."""
    writer = await PostgresStore.open(postgres_url)
    await writer.accept_job(job(), request_digest="a", accepted_at=T0)
    reader = await PostgresStore.open(postgres_url, is_read_only=True)
    assert await reader.job(job().job_id) is not None
    with pytest.raises(TransientError, match="read-only"):
        await reader.accept_job(job("more"), request_digest="a", accepted_at=T0)
    await reader.close()
    await writer.close()


async def test_commits_reach_the_disk_before_they_return(postgres_url: str) -> None:
    """An accepted job survives a power cut, also where the server's default is quicker."""
    name = postgres_url.rpartition("/")[2]
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    await connection.close()
    store = await PostgresStore.open(postgres_url)
    assert await store._rows("SHOW synchronous_commit") == [("on",)]
    await store.close()


def test_values_are_numbered() -> None:
    """PostgreSQL counts what SQLite marks."""
    assert numbered("SELECT a FROM b WHERE c = ? AND d < ?") == "SELECT a FROM b WHERE c = $1 AND d < $2"


def test_migrations_are_numbered_without_gaps() -> None:
    """Each is applied once, in order."""
    assert [number for number, _ in migrations("postgres")] == list(range(1, len(migrations("postgres")) + 1))


async def test_the_ledger_has_a_partition_a_day_until_it_is_merged(postgres_url: str) -> None:
    """Partitions are made ahead; a merged day leaves its partition, whose space is free at once. The last span of an
    instance stays, and charging continues from it."""
    store, connection = await PostgresStore.open(postgres_url), await asyncpg.connect(postgres_url)
    today = period_start("day", datetime.now(UTC))
    await store.reclaim_space(today, today)
    first = (today - T0) // timedelta(minutes=1) + 1
    spans = [span(first + minutes) for minutes in range(0, 4 * 24 * 60, 60)]  # the last day is in no partition yet
    await store.charge(spans)
    for each in spans:
        await store.confirm_charge(each)
    names = [f"ledger_{today + timedelta(days=days):%Y%m%d}" for days in range(4)]
    assert [name for name, _ in await partitions(connection)] == [*names, "ledger_rest"]

    await roll_up(store, today + timedelta(days=3))
    await store.reclaim_space(today + timedelta(days=4), today + timedelta(days=3))
    kept = await partitions(connection)
    assert [name for name, _ in kept][:1] == names[3:]
    assert not {name for name, _ in kept} & set(names[:3])
    assert sum(row.total_micro_usd for row in (await store.ledger(count_max=1000)).rows) == 100 * len(spans)

    await roll_up(store, today + timedelta(days=9))
    await store.reclaim_space(today + timedelta(days=9), today + timedelta(days=9))
    assert {count for _, count in await partitions(connection)} == {0, 1}
    (charge,) = (await store.last_charges()).values()
    assert charge.last == spans[-1]
    assert await store.charge(spans) == 0
    assert await store.charge([span(first + 4 * 24 * 60)]) == 1
    await connection.close()
    await store.close()


async def partitions(connection: asyncpg.Connection) -> list[tuple[str, int]]:
    """Return name and number of rows of each partition."""
    names = await connection.fetch(
        "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'ledger'::regclass"
    )
    return sorted([(name, await connection.fetchval(f"SELECT count(*) FROM {name}")) for (name,) in names])  # noqa: S608


async def test_a_busy_ledger_keeps_its_partitions(postgres_url: str) -> None:
    """Maintenance waits briefly for its lock and gives up: a charge is never held up for longer."""
    store, connection = await PostgresStore.open(postgres_url), await asyncpg.connect(postgres_url)
    now = datetime.now(UTC)
    async with connection.transaction():
        await connection.execute("LOCK TABLE ledger IN ROW EXCLUSIVE MODE")
        async with asyncio.timeout(20):
            await store.reclaim_space(now, now)
    assert len(await partitions(connection)) == 2
    await store.reclaim_space(now, now)
    assert len(await partitions(connection)) == 5
    await connection.close()
    await store.close()


async def test_a_store_of_the_last_release_is_migrated(postgres_url: str) -> None:
    """By the command alone. Its spans, charges and cursors are as before; a charge that ended long ago is not open."""
    connection = await asyncpg.connect(postgres_url)
    await connection.execute("CREATE TABLE gpu_autoscaler_schema (number INTEGER NOT NULL)")
    await connection.execute("INSERT INTO gpu_autoscaler_schema VALUES (1)")
    await connection.execute(migrations("postgres")[0][1])
    spans = [span(0, provider_id="sim:///a/i-2"), *(span(minutes) for minutes in (0, 1, 60 * 24 * 9))]
    for each in spans:
        await connection.execute(
            "INSERT INTO ledger (provider_id, from_at, to_at, total_micro_usd, idle_micro_usd, fact, is_confirmed) "
            "VALUES ($1, $2, $3, 100, 25, $4, 1)",
            each.provider_id, number_of(each.from_at), number_of(each.to_at), document(each),
        )  # fmt: skip
    insert = "INSERT INTO charged_instances VALUES ($1, $2, $3, $4)"
    await connection.execute(insert, "sim:///a/i-2", number_of(T0), 1, 100)
    await connection.execute(insert, "sim:///a/i-1", number_of(T0), 4, 300)

    with pytest.raises(ConfigError, match=f"has schema 1, this version needs .* run `{MIGRATE_COMMAND}`"):
        await PostgresStore.open(postgres_url)
    assert (await schema_of(postgres_url)).current == 1
    store = await PostgresStore.open(postgres_url, is_migrating=True)
    assert (await schema_of(postgres_url)).missing() == ()
    assert (await store.ledger()).rows == tuple(reversed(spans))
    assert set(await store.last_charges()) == {"sim:///a/i-1"}
    assert set(await store.last_charges(INSTANCES)) == set(INSTANCES)
    await store.charge([span(60 * 24 * 9 + 1)])
    assert (await store.ledger(count_max=1)).rows == (span(60 * 24 * 9 + 1),)
    await roll_up(store, T0 + timedelta(days=20))
    assert sum(row.total_micro_usd for row in (await store.ledger()).rows) == 500
    assert await connection.fetchval("SELECT number FROM gpu_autoscaler_schema") == 1
    await connection.close()
    assert await store.append_audit([act(1)]) == 1
    assert (await chain_of(store)).violation is None
    await store.close()

"""Restoring from backups, rehearsed: last night's database beside empty streams, and whole streams beside last night's
database or a new one. What is promised is checked, with the cloud's own invoice."""

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.e2e.test_rebuild import ledger, made_at, stop_services, until_quiet
from tests.e2e.test_story import QUIET_SECONDS_MAX, has, request
from tests.support.backups import Database, PostgresDatabase, SqliteDatabase, put_streams_back, save_streams
from tests.support.outside import ask
from tests.support.postgres import PostgresServer, programs
from tests.support.running import Running, followed, started

from gpu_autoscaler.bus.streams import BUCKETS, STREAMS
from gpu_autoscaler.events.job import JobFinished, JobPlaced, JobQueued, JobStarted
from gpu_autoscaler.store.opening import open_store
from gpu_autoscaler_services.demo.run import differing_plans
from gpu_autoscaler_services.local.system import ExternalSystems, LocalSystem

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(600)]

NAMES = tuple(spec.name for spec in STREAMS)
BEFORE, SINCE = ("done", "runs", "over"), ("later", "short")  # accepted before the backup, and since


@asynccontextmanager
async def system_on(kind: str, folder: Path) -> AsyncIterator[tuple[LocalSystem, Database]]:
    """A system with a database of this kind."""
    if kind == "sqlite":
        async with started(folder / "system") as system:
            yield system, SqliteDatabase(folder / "system" / "store.db")
        return
    server = PostgresServer(programs())
    server.start()
    try:
        external = ExternalSystems(store_url=server.url())
        async with started(folder / "system", external=external) as system:
            yield system, PostgresDatabase(server)
    finally:
        server.stop()


async def a_night(cluster: Running, database: Database, target: Path) -> None:
    """Jobs that end before the backup, after it and not yet; and jobs that were accepted after it."""
    player = cluster.player
    await player.submit(request("done", run_seconds=20.0), "rest")
    await player.submit(request("runs", run_seconds=1500.0), "rest")
    await player.submit(request("over", gpus=4, run_seconds=300.0), "nats")
    await cluster.until(lambda record: has(record, JobFinished, job_id="done"), "the first job is over", 240.0)
    await cluster.until(
        lambda record: all(has(record, JobStarted, job_id=name) for name in ("runs", "over")), "two jobs run", 240.0
    )
    await asyncio.sleep(6)  # the first minute of the cluster is charged
    await asyncio.to_thread(database.save, target)
    await player.submit(request("short", run_seconds=20.0), "nats")
    await player.submit(request("later", run_seconds=1200.0), "rest")
    await cluster.until(
        lambda record: all(has(record, JobFinished, job_id=name) for name in ("short", "over")), "two are over", 240.0
    )
    await cluster.until(lambda record: has(record, JobStarted, job_id="later"), "the last job runs", 240.0)


async def outcomes(url: str) -> dict[str, str | None]:
    """Return the outcome of each job that the store has."""
    store = await open_store(url, is_read_only=True)
    try:
        return {row.spec.job_id: row.outcome for row in (await store.jobs()).rows}
    finally:
        await store.close()


async def charged(url: str) -> Counter[str]:
    """Return the ledger."""
    store = await open_store(url, is_read_only=True)
    try:
        return await ledger(store)
    finally:
        await store.close()


@pytest.mark.sweep  # a rehearsal of two minutes
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_last_nights_database_beside_empty_streams(tmp_path: Path, kind: str) -> None:
    """Nothing is bought, drained or run twice, and every instance that lives is charged from its launch to its end.
    What was accepted since runs to its end in Kubernetes, and is unknown here."""
    async with system_on(kind, tmp_path) as (system, database):
        async with followed(system) as before:
            await a_night(before, database, tmp_path / "backup")
            jobs, truth = await made_at(before), await before.world.truth()
        names = await stop_services(system)
        await system.nats.kill()
        shutil.rmtree(system.nats.store / "jetstream")
        await system.nats.start()
        await asyncio.to_thread(database.put_back, tmp_path / "backup")
        for name in names:
            await system.children[name].start()
        async with followed(system) as after:
            await after.until(lambda record: has(record, JobQueued, job_id="runs"), "it is known again", 240.0)
            quiet = await until_quiet(after, database.url)

            assert set(quiet.launches_by_token.values()) == {1}
            assert set(quiet.launches_by_token) == set(truth.launches_by_token), "nothing more was bought"
            made = await made_at(after)
            assert {name: uid for name, uid in made.items() if name in jobs} == {name: jobs[name] for name in made}
            assert await outcomes(database.url) == dict.fromkeys(BEFORE, "completed")
            ends = Counter(fact.job_id for fact, _ in after.record.of(JobFinished))
            assert set(ends) <= {*BEFORE, *SINCE}
            assert has(after.record, JobFinished, job_id="later", outcome="completed")
            assert (await ask(after, "GET", "/api/v1/gpu/jobs/later")).status in (200, 404)
            assert differing_plans(after.record, after.policy) == ()


@pytest.mark.sweep  # the restored database beside empty streams represents both in every run
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
@pytest.mark.parametrize("database_of", ["last night", "nobody"])
async def test_whole_streams_beside_an_older_database(tmp_path: Path, kind: str, database_of: str) -> None:
    """Streams that are restored with their consumers complete jobs and ledger: every promise is kept, over the whole
    story, and no charge counts twice."""
    async with system_on(kind, tmp_path) as (system, database):
        async with followed(system) as before:
            await a_night(before, database, tmp_path / "backup")
            jobs = await made_at(before)
        names = await stop_services(system)
        streams = await save_streams(system.nats_url, (*NAMES, *(bucket.stream for bucket in BUCKETS)))
        await system.nats.kill()
        shutil.rmtree(system.nats.store / "jetstream")
        await system.nats.start()
        await put_streams_back(system.nats_url, streams)
        await asyncio.to_thread(database.put_back, tmp_path / "backup" if database_of == "last night" else None)
        for name in names:
            await system.children[name].start()
        async with followed(system) as after:
            report = await after.report_when_quiet(QUIET_SECONDS_MAX)
            truth = await until_quiet(after, database.url)

            assert report.broken_promises == ()
            assert report.jobs_finished == len(BEFORE) + len(SINCE)
            assert await outcomes(database.url) == dict.fromkeys((*BEFORE, *SINCE), "completed")
            assert await charged(database.url) == Counter(truth.bill_micro_usd)
            made = await made_at(after)
            assert {name: uid for name, uid in made.items() if name in jobs} == {name: jobs[name] for name in made}
            assert {fact.attempt for fact, _ in after.record.of(JobPlaced)} == {1}, "no job ran twice"

"""A rolling upgrade to a release that changes streams, consumers and the store, and the rollback, under the story."""

import asyncio
import os
import sqlite3
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client
from tests.support.nats_cluster import SERVERS_COUNT, NatsCluster, servers_of, until_formed
from tests.support.next_release import next_release
from tests.support.running import POLICY, Running, followed
from tests.upgrade import PROCESSES

from gpu_autoscaler.bus.differences import NANOSECONDS
from gpu_autoscaler.bus.streams import DEAD, STREAMS
from gpu_autoscaler.events.job import JobFinished, JobStarted
from gpu_autoscaler.events.scaling import ScalingNodeOrdered
from gpu_autoscaler.runtime import config
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.demo.story import JOBS_COUNT, STORY
from gpu_autoscaler_services.local.system import LocalSystem
from gpu_autoscaler_services.permissions import MIGRATOR
from gpu_autoscaler_services.service_spec import Role

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.sweep, pytest.mark.timeout(600)]

CLOCK_FACTOR = 15.0
QUIET_SECONDS_MAX = 180.0


class Servers:
    """Three servers in the place of the launcher's one."""

    def __init__(self, cluster: NatsCluster) -> None:
        self.cluster = cluster
        self.process_group = 0

    @property
    def port(self) -> int:
        return self.cluster.servers[0].port

    @property
    def url(self) -> str:
        return self.cluster.servers[0].url

    async def start(self) -> None:
        for server in self.cluster.servers:
            server.process_group = self.process_group
        await asyncio.gather(*(server.start() for server in self.cluster.servers))
        await until_formed(self.cluster.urls)

    async def stop(self) -> None:
        await asyncio.gather(*(server.stop() for server in self.cluster.servers))


class ClusteredSystem(LocalSystem):
    """The local system on three brokers, which declares this many copies of each stream."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, clock=Clock(CLOCK_FACTOR), policy=POLICY, gateway_port=0)
        servers = servers_of(folder / "nats", self.nats._settings, self.nats._variables)
        self.nats: Any = Servers(NatsCluster(servers))
        self.copies_count = 1

    def nats_url_of(self, user: str) -> str:
        password = self._passwords[f"NATS_PASSWORD_{user.upper()}"]
        return ",".join(url.replace("://", f"://{user}:{password}@") for url in self.nats.cluster.urls)

    def _settings(self, name: str, service: str, role: Role | None) -> config.Settings:
        settings = super()._settings(name, service, role)
        nats = msgspec.structs.replace(settings.nats, replicas_count=self.copies_count)
        return msgspec.structs.replace(settings, nats=nats)


class Release:
    """One of the two releases: its code, and the copies that it declares."""

    def __init__(self, system: ClusteredSystem, code: Path | None, copies_count: int) -> None:
        self._system = system
        self._code = code
        self._copies_count = copies_count

    async def command(self, *arguments: str, killed_after_seconds: float | None = None) -> int:
        """Run `gpu-autoscaler migrate` of this release; return its exit code."""
        system = self._system
        nats = config.NatsSettings(url=system.nats_url_of(MIGRATOR), replicas_count=self._copies_count)
        settings = config.Settings(nats=nats, store=config.StoreSettings(url=system._store_url))
        variables: Mapping[str, str] = {} if self._code is None else {"PYTHONPATH": str(self._code)}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gpu_autoscaler_services.cli.main", "migrate", *arguments),
            env={**os.environ, **variables, **config.to_environment(settings)},
        )
        if killed_after_seconds is not None:
            await asyncio.sleep(killed_after_seconds)
            process.kill()
        return await process.wait()

    async def roll_out(self) -> None:
        """Replace every process, as a chart does: all at once."""
        system = self._system
        system.copies_count = self._copies_count
        for name in PROCESSES:
            if self._code is None:
                system.code.pop(name, None)
            else:
                system.code[name] = self._code
        await asyncio.gather(*(system.restart_process(name) for name in PROCESSES))


class Broker:
    """What the servers have, as an operator sees it."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def info(self, request: str) -> dict[str, Any]:
        answer = await self._client.request(f"$JS.API.{request}", timeout=10)
        found: dict[str, Any] = msgspec.json.decode(answer.data)
        assert "error" not in found, (request, found)
        return found

    async def limits(self) -> dict[str, tuple[Any, ...]]:
        """Return what the releases change of each stream."""
        keys = ("description", "max_age", "max_bytes", "duplicate_window", "num_replicas")
        found = {spec.name: (await self.info(f"STREAM.INFO.{spec.name}"))["config"] for spec in STREAMS}
        return {name: tuple(config.get(key) for key in keys) for name, config in found.items()}

    async def consumer(self, path: str) -> dict[str, Any]:
        """Return the properties of a durable consumer."""
        found: dict[str, Any] = (await self.info(f"CONSUMER.INFO.{path}"))["config"]
        return found


@asynccontextmanager
async def connected(system: ClusteredSystem) -> AsyncIterator[Broker]:
    """A connection with all permissions."""
    client = Client()
    await client.connect(system.nats_url)
    try:
        yield Broker(client)
    finally:
        await client.close()


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[tuple[ClusteredSystem, Running]]:
    """The current release on three brokers with one copy of each stream."""
    system = ClusteredSystem(folder)
    await system.start(lambda _: None)
    try:
        async with followed(system) as cluster:
            yield system, cluster
        logs = [path.read_text() for path in (folder / "nats").glob("*/nats-server.log")]
        assert [line for log in logs for line in log.splitlines() if "iolation" in line] == []
    finally:
        await system.stop()


async def test_changes_of_each_kind_forwards_and_back_under_the_story(tmp_path: Path) -> None:
    """Limits and copies of streams, settings and filter of consumers, a column and an index: all are applied while jobs
    arrive, run and end, and the rollback finds its own. Nothing is lost or done twice."""
    code = next_release(tmp_path / "next")
    async with started(tmp_path / "system") as (system, cluster), connected(system) as broker:
        current, following = Release(system, None, 1), Release(system, code, SERVERS_COUNT)
        limits = await broker.limits()
        consumer = await broker.consumer("JOB.scheduler-job-act")
        # Without REST: there is one gateway, and who calls it while it restarts tries again.
        moments = [msgspec.structs.replace(moment, input="nats") for moment in STORY if not moment.refused_as]
        story = asyncio.create_task(cluster.player.play(moments))
        await cluster.until(lambda record: record.count(JobStarted) > 0, "a job runs")

        assert await following.command("--apply", "--only", "required") == 0
        assert await broker.limits() == limits, "of the running release, until the next one runs"
        await following.roll_out()
        await following.command("--apply", killed_after_seconds=2.0)
        assert await following.command("--apply") == 0
        assert await following.command() == 0, "nothing is left"
        after = await broker.limits()
        assert {copies for *_, copies in after.values()} == {SERVERS_COUNT}
        assert all(after[name][2] == 2 * limits[name][2] for name in limits)
        changed = await broker.consumer("JOB.scheduler-job-act")
        assert set(changed["filter_subjects"]) - set(consumer["filter_subjects"]) == {"job.started"}
        assert (changed["ack_wait"], changed["max_deliver"]) == (6 * NANOSECONDS, 30_000)
        with sqlite3.connect(system.folder / "store.db") as store:
            assert "note" in [column[1] for column in store.execute("PRAGMA table_info(jobs)")]

        assert await current.command("--apply", "--only", "required") == 0
        await current.roll_out()
        assert await current.command("--apply") == 0
        assert await broker.limits() == limits
        assert await broker.consumer("JOB.scheduler-job-act") == consumer

        await story
        report = await cluster.report_when_quiet(QUIET_SECONDS_MAX)
        # There is one process of each service, and all are replaced at once: a notice waits for their start.
        assert [promise for promise in report.broken_promises if "was answered after" not in promise] == []
        assert report.jobs_requested == report.jobs_finished == JOBS_COUNT
        assert report.bill_micro_usd == report.allocated_micro_usd + report.idle_micro_usd > 0
        for facts in (
            [fact.job_id for fact, _ in cluster.record.of(JobFinished)],
            [fact.action_id for fact, _ in cluster.record.of(ScalingNodeOrdered)],
        ):
            assert len(facts) == len(set(facts)), "each once"
        assert set((await cluster.world.truth()).launches_by_token.values()) == {1}
        assert await cluster.player._bus.last_sequence(DEAD) == 0

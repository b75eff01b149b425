"""The current version starts with streams, store and cluster left by an earlier one."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

import aiohttp
import msgspec
import pytest
from nats.aio.client import Client
from tests.e2e.test_story import has
from tests.e2e.test_upgrade import is_of, replaced
from tests.support.running import POLICY, Running, followed
from tests.upgrade import PROCESSES, RECORDED, unpacked
from tests.upgrade.record import About
from tests.upgrade.streams import Exported, Line, restored

from gpu_autoscaler.bus.streams import DEAD
from gpu_autoscaler.events.job import JobFinished, JobQueued, JobStarted
from gpu_autoscaler.events.scaling import ScalingNodeLaunched, ScalingNodeOrdered
from gpu_autoscaler.runtime.clock import CLOCK_ENVIRONMENT, Clock
from gpu_autoscaler_services.local.child import Child
from gpu_autoscaler_services.local.system import LocalSystem

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]

QUIET_SECONDS_MAX = 180.0


class Found(LocalSystem):
    """A system in a folder with the earlier version's files, whose cluster continues."""

    def __init__(self, folder: Path, left: Path) -> None:
        about = msgspec.json.decode((left / "about.json").read_bytes(), type=About)
        super().__init__(folder, clock=continued(about), policy=POLICY, gateway_port=0)
        self._left = left

    def _simcluster(self) -> Child:
        port = self.simcluster_url.rsplit(":", 1)[1]
        return Child(
            "simcluster",
            [sys.executable, "-m", "tests.upgrade.world", "--port", port, "--world", str(self._left / "world.json")],
            environment={CLOCK_ENVIRONMENT: self.clock.to_text()},
            log=self.folder / "logs" / "simcluster.log",
            ready_url=f"{self.simcluster_url}/readyz",
            process_group=self._reaper.process_group,
        )

    async def put_back(self, kept: Exported) -> None:
        """Restore the streams into a broker, and the store."""
        (self.folder / "nats").mkdir(parents=True)
        (self._left / "store.db").rename(self.folder / "store.db")
        await self.nats.start()
        connection = Client()
        await connection.connect(self.nats_url)
        try:
            await restored(connection, kept)
        finally:
            await connection.close()
            await self.nats.stop()


def continued(about: About) -> Clock:
    """Return a clock that continues the recorded cluster time."""
    clock = Clock.from_text(about.clock, "about.json")
    at, now, factor = datetime.fromisoformat(about.at), clock.wall_now(), clock.factor
    return Clock(factor, now + (now - at) / (factor - 1))


def exported(left: Path) -> Exported:
    """The streams of the record."""
    lines = (left / "streams.jsonl").read_bytes().splitlines()
    return Exported(
        configs=msgspec.json.decode((left / "configs.json").read_bytes()),
        lines=tuple(msgspec.json.decode(line, type=Line) for line in lines),
    )


@asynccontextmanager
async def over_what_was_left(folder: Path, kept: Exported) -> AsyncIterator[Running]:
    """The current system, started with these files."""
    system = Found(folder / "system", folder / "left")
    await system.put_back(kept)
    await system.start(lambda _: None)
    try:
        async with followed(system) as cluster:
            yield cluster
    finally:
        await system.stop()


async def listed(cluster: Running) -> dict[str, str]:
    """Return each job of the gateway with its state."""
    async with aiohttp.ClientSession() as session:
        url = f"{cluster.system.gateway_url}/api/v1/gpu/jobs"
        async with session.get(url) as answer:
            assert answer.status == 200, await answer.text()
            return {job["job_id"]: job["status"] for job in (await answer.json())["items"]}


@pytest.mark.sweep  # a whole system of the last release, then of this one
async def test_the_current_version_continues_an_earlier_one(tmp_path: Path) -> None:
    """Each stream under its sequences: jobs are known, what nobody had read is read, nothing is launched or placed
    twice, every cent is charged once; and after one step back the earlier version goes on from there."""
    left = exported(unpacked(tmp_path / "left", RECORDED))
    recorded_count = len(left.lines)
    async with over_what_was_left(tmp_path, left) as cluster:
        assert is_of(cluster, tmp_path / "earlier") == set()
        await cluster.until(lambda record: len(record.seen) >= recorded_count, "the whole record is read")
        launched = {fact.action_id for fact, _ in cluster.record.of(ScalingNodeLaunched)}
        known = await listed(cluster)
        assert (known["done"], known["cancelled"]) == ("completed", "cancelled")
        assert known["gang"] in ("running", "completed"), "it goes on, and on a busy machine has come to its end"
        await cluster.until(lambda record: has(record, JobQueued, job_id="unread"), "what nobody had read is read")
        await cluster.until(lambda record: has(record, JobStarted, job_id="unread"), "and it runs", 120.0)

        earlier = unpacked(tmp_path / "earlier")
        await cluster.system.migrate(to="0.2")
        back = await replaced(cluster, earlier, PROCESSES, jobs="back")
        assert is_of(cluster, earlier) == set(PROCESSES)
        report = await cluster.report_when_quiet(QUIET_SECONDS_MAX)
        assert report.broken_promises == ()
        assert report.jobs_completed == len(("done", "gang", "unread", *back))
        ends = [fact.job_id for fact, _ in cluster.record.of(JobFinished)]
        assert len(ends) == len(set(ends)), "each ends once"
        orders = [fact.action_id for fact, _ in cluster.record.of(ScalingNodeOrdered)]
        assert len(orders) == len(set(orders))
        truth = await cluster.world.truth()
        assert launched <= set(truth.launches_by_token)
        assert set(truth.launches_by_token.values()) == {1}
        assert await cluster.player._bus.last_sequence(DEAD) == 0, "each version reads what the other says"

"""A service as a process on a cluster of three whose leader is killed under it, and then two of the three."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from tests.support.cluster import running_cluster as running_kubernetes
from tests.support.nats_cluster import NatsCluster, running_cluster
from tests.support.outside import request_body
from tests.support.working import RECOVERY_SECONDS_MAX, persistently, until

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.protocol import Publication
from gpu_autoscaler.bus.streams import BusDeclaration, streams
from gpu_autoscaler.events.job import JobQueued
from gpu_autoscaler_services.local.child import free_port

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

COUNT = 200


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[NatsCluster]:
    """Three servers that have found each other."""
    async with running_cluster(tmp_path / "nats") as cluster:
        yield cluster


async def ask_for_jobs(bus: NatsBus) -> None:
    """Somebody asks for jobs, one after the other, and repeats what was not confirmed."""
    for number in range(COUNT):
        payload = json.dumps(request_body(f"job-{number}")).encode()
        await persistently(bus, [Publication(subject="job.requested", payload=payload, message_id=f"job-{number}")])


async def queued(bus: NatsBus) -> list[str | None]:
    """The id of each `job.queued` in the stream."""
    last = await bus.last_sequence("JOB")
    messages = [await bus.message_at("JOB", sequence) for sequence in range(1, last + 1)]
    return [one.message_id for one in messages if one is not None and one.subject == JobQueued.subject_root()]


async def until_queued(bus: NatsBus, count: int) -> None:
    """Wait until `count` jobs are accepted."""
    async with asyncio.timeout(RECOVERY_SECONDS_MAX):
        while len(await queued(bus)) < count:
            await asyncio.sleep(0.2)


async def watch_readiness(port: int, said: list[str]) -> None:
    """Record each change of the answer of `/readyz`."""
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{port}/readyz") as answer:
                    word = (await answer.text()).strip()
                    if word != said[-1]:
                        said.append(word)
            await asyncio.sleep(0.05)


async def test_a_scheduler_accepts_each_job_once_while_servers_are_killed(cluster: NatsCluster, tmp_path: Path) -> None:
    """A real process with its store and its Kubernetes: every request is one row, one `job.queued` and one Job."""
    load = await NatsBus.connect(cluster.urls, name="load", declared=BusDeclaration(streams=streams(replicas_count=3)))
    async with running_kubernetes() as here:
        await load.ensure()
        port, said = free_port(), ["nothing yet"]
        settings = {
            "NATS_URL": ",".join(cluster.urls),
            "NATS_REPLICAS_COUNT": "3",
            "KUBE_URL": here.url,
            "STORE_URL": f"sqlite:///{tmp_path / 'store.db'}",
            "HTTP_PORT": str(port),
        }
        log = (tmp_path / "scheduler.log").open("wb")
        scheduler = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gpu_autoscaler_services.serve", "scheduler",
            env={**os.environ, **{f"GPU_AUTOSCALER_{name}": value for name, value in settings.items()}},
            stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        log.close()
        try:
            asking = asyncio.create_task(ask_for_jobs(load))
            watching = asyncio.create_task(watch_readiness(port, said))
            for number in range(2):
                await until_queued(load, COUNT * (number + 1) // 4)
                victims = [await cluster.leader_of(load, "JOB")]
                if number == 1:  # with another one: two left would be quick enough that nobody is ever not ready
                    victims.append(next(one for one in cluster.servers if one not in victims))
                for victim in victims:
                    await victim.kill()
                await asyncio.sleep(2)
                if number == 1:
                    await until(lambda: any("not ready" in word for word in said), "it says that it is not ready")
                for victim in victims:
                    await victim.start()
                await cluster.until_whole(load, "JOB")
            await asyncio.wait_for(asking, RECOVERY_SECONDS_MAX)
            await until_queued(load, COUNT)
            await until(lambda: len(here.items("jobs")) == COUNT, "a Kubernetes Job for each")
            async with asyncio.timeout(60):
                while said[-1] != "ready":
                    await asyncio.sleep(0.1)
            watching.cancel()
            assert any("not ready" in word and ("broker" in word or "storing" in word) for word in said), said
            scheduler.terminate()
            assert await asyncio.wait_for(scheduler.wait(), 60) == 0
        finally:
            if scheduler.returncode is None:
                scheduler.kill()
                await scheduler.wait()
        assert len(await queued(load)) == COUNT
        await load.close()

"""A service on a real broker: killed in the middle of its work, or with the broker killed under it."""

import asyncio
import os
import signal
import sys

import pytest
from tests.support.ender import Ender, cancel, consumers, envelope_of
from tests.support.nats import nats_store, server

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.nats.link import Timeouts
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import BusDeclaration, streams
from gpu_autoscaler.events.catalog import FACT_CATALOG
from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.loop_context import Limits
from gpu_autoscaler.runtime.retry import Backoff
from gpu_autoscaler.runtime.runner import Runner

__all__ = ["nats_store", "server"]  # fixtures

pytestmark = pytest.mark.integration

COUNT = 60
MANY_COUNT = 500  # five seconds of work at the least: somebody is killed in the middle of it


async def connect(url: str, name: str) -> NatsBus:
    """Return a hand on the broker."""
    declared = BusDeclaration(streams=streams(), consumers=consumers())
    timeouts = Timeouts(publish_seconds_max=60.0, request_seconds_max=2.0)
    bus = await NatsBus.connect(url, name=name, declared=declared, timeouts=timeouts)
    await bus.ensure()
    return bus


async def ends(bus: NatsBus) -> list[JobId]:
    """Return the job of each `job.finished` in the stream."""
    messages = [await bus.message_at("JOB", number) for number in range(1, await bus.last_sequence("JOB") + 1)]
    facts = [
        FACT_CATALOG.decode(message.payload).fact
        for message in messages
        if message is not None and message.subject == JobFinished.subject_root()
    ]
    return [fact.job_id for fact in facts if isinstance(fact, JobFinished)]


async def until_ended(bus: NatsBus, count: int) -> None:
    """Wait until `count` jobs have ended."""
    async with asyncio.timeout(60):
        while len(await ends(bus)) < count:
            await asyncio.sleep(0.1)


def is_ready(runner: Runner) -> bool:
    """True when `/readyz` would say so now."""
    return runner.readiness.is_ready


async def test_work_goes_on_through_a_crash_of_the_broker(server: NatsServer) -> None:
    """Not ready meanwhile, ready afterwards; every fact has its effect once, and a clean stop follows."""
    bus, publisher = await connect(server.url, "ender"), await connect(server.url, "publisher")
    service = Ender()
    limits = Limits(backoff=Backoff(first_seconds=0.05, seconds_max=0.5))
    runner = Runner(service, bus, view=service.view, clock=Clock(), limits=limits)
    run = asyncio.create_task(runner.run())
    for number in range(COUNT):
        await publisher.publish(*envelope_of(cancel(number)), message_id=str(number))
    async with asyncio.timeout(60):
        while len(service.handled) < COUNT // 3:
            await asyncio.sleep(0.005)
    await server.kill()
    async with asyncio.timeout(60):
        while is_ready(runner):
            await asyncio.sleep(0.05)
    await server.start()
    await until_ended(publisher, COUNT)
    async with asyncio.timeout(60):
        while not is_ready(runner) or len(service.view.state.jobs) < COUNT:
            await asyncio.sleep(0.05)
    runner.stop()
    await asyncio.wait_for(run, 60)
    assert sorted(await ends(publisher)) == sorted(cancel(number).job_id for number in range(COUNT))
    for hand in (bus, publisher):
        await hand.close()


async def test_a_killed_process_leaves_nothing_half_done(server: NatsServer) -> None:
    """SIGKILL with messages in progress: the next process ends every job once. SIGTERM ends that one with 0."""
    publisher = await connect(server.url, "publisher")
    for number in range(MANY_COUNT):
        await publisher.publish(*envelope_of(cancel(number)), message_id=str(number))

    async def start() -> asyncio.subprocess.Process:
        environment = {**os.environ, "GPU_AUTOSCALER_NATS_URL": server.url, "GPU_AUTOSCALER_HTTP_PORT": "0"}
        return await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.support.ender", env=environment)

    first = await start()
    async with asyncio.timeout(60):
        while await publisher.last_sequence("JOB") <= MANY_COUNT:
            await asyncio.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    await first.wait()
    assert 0 < len(await ends(publisher)) < MANY_COUNT
    second = await start()
    await until_ended(publisher, MANY_COUNT)
    second.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(second.wait(), 60) == 0
    assert sorted(await ends(publisher)) == sorted(cancel(number).job_id for number in range(MANY_COUNT))
    await publisher.close()

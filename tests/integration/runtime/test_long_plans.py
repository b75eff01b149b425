"""Plans of five seconds, on a real broker and in two processes: the leader stays the leader, and its effects go on."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.support.ender import cancel, envelope_of
from tests.support.nats import nats_store, server
from tests.support.slow_planner import HERE, IN_THREAD, MODE, PLAN_SECONDS, SlowPlanner, declared

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import LEASES
from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.runtime.lease import holder_of

__all__ = ["nats_store", "server"]  # fixtures

pytestmark = pytest.mark.integration

PLANS_COUNT = 3
STEP_SECONDS = 0.2
# A plan holds its results back for 5 s; the machine of the test is shared.
LATENCY_SECONDS_MAX = 1.5


@asynccontextmanager
async def leaders(url: str, mode: str) -> AsyncIterator[NatsBus]:
    """Start two processes and yield a connection of the test's own once one of them leads."""
    environment = {**os.environ, "GPU_AUTOSCALER_NATS_URL": url, "GPU_AUTOSCALER_HTTP_PORT": "0", MODE: mode}
    bus = await NatsBus.connect(url, name="test", declared=declared())
    await bus.ensure()
    command = (sys.executable, "-m", "tests.support.slow_planner")
    processes = [await asyncio.create_subprocess_exec(*command, env=environment) for _ in range(2)]
    try:
        async with asyncio.timeout(120):
            while await holder_of(bus, SlowPlanner.name) is None:
                await asyncio.sleep(0.05)
        yield bus
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        codes = await asyncio.wait_for(asyncio.gather(*(process.wait() for process in processes)), 60)
        await bus.close()
    assert codes == [0, 0]


async def step(bus: NatsBus, number: int) -> float:
    """Return the seconds from a fact to its effect in the stream."""
    began = time.monotonic()
    await bus.publish(*envelope_of(cancel(number)), message_id=str(number))
    async with asyncio.timeout(60):
        while True:
            message = await bus.last_message(JobFinished.stream(), JobFinished.subject_root())
            if message is not None and f"job-{number}".encode() in message.payload:
                return time.monotonic() - began
            await asyncio.sleep(0.01)


async def observed(bus: NatsBus) -> tuple[list[str | None], list[float]]:
    """Return the holders of the lease, and the latency of each step, over some plans."""
    holders, latencies, number = [], [], 0
    until = time.monotonic() + PLANS_COUNT * PLAN_SECONDS
    while time.monotonic() < until:
        holders.append(await holder_of(bus, SlowPlanner.name))
        latencies.append(await step(bus, number))
        number += 1
        await asyncio.sleep(STEP_SECONDS)
    return holders, latencies


@pytest.mark.timeout(300)
async def test_leader_keeps_its_lease_and_its_effects_during_long_plans(server: NatsServer) -> None:
    """No change of the lease, and no step waits for a plan."""
    async with leaders(server.url, IN_THREAD) as bus:
        await step(bus, 9_999)
        holders, latencies = await observed(bus)
    assert len(set(holders)) == 1
    assert len(latencies) > PLANS_COUNT * PLAN_SECONDS / (STEP_SECONDS + LATENCY_SECONDS_MAX)
    assert max(latencies) < LATENCY_SECONDS_MAX


@pytest.mark.sweep
@pytest.mark.timeout(300)
async def test_planning_on_the_event_loop_is_noticed(server: NatsServer) -> None:
    """The measurement of the test above finds it: steps wait for plans, or the lease changes hands."""
    async with leaders(server.url, HERE) as bus:
        holders, latencies = await observed(bus)
    assert LEASES.ttl_seconds < PLAN_SECONDS
    assert max(latencies) > LATENCY_SECONDS_MAX or len(set(holders)) > 1

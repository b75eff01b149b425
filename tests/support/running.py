"""A whole system of processes under test: started, watched through the bus, ended."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from nats.aio.client import Client

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.policies import load_policy
from gpu_autoscaler_services.demo.player import Player
from gpu_autoscaler_services.demo.record import Record
from gpu_autoscaler_services.demo.report import Report, make_report
from gpu_autoscaler_services.demo.run import wait_until_quiet
from gpu_autoscaler_services.demo.subscriber import STREAMS, Subscriber, connect
from gpu_autoscaler_services.local.simulated_world import SimulatedWorld
from gpu_autoscaler_services.local.system import ExternalSystems, LocalSystem

CLOCK_FACTOR = 15.0
POLICY = Path(__file__).with_name("policy.toml")
_LOOK_SECONDS = 0.02


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """Handles on everything that a test of the whole system needs."""

    system: LocalSystem
    player: Player
    world: SimulatedWorld
    record: Record
    clock: Clock
    policy: ScalingPolicy

    async def report_when_quiet(self, seconds_max: float) -> Report:
        """Wait until every job has ended and the cluster is empty, or for the limit; then report."""
        truth = await wait_until_quiet(self.record, self.world, seconds_max)
        return make_report(self.record, truth, self.policy, clock_factor=self.clock.factor, wall_seconds=0.0)

    async def until(self, is_so: Callable[[Record], bool], what: str, seconds_max: float = 60.0) -> None:
        """Wait until the record shows it; fails with the words of `what`."""
        try:
            async with asyncio.timeout(seconds_max):
                while not is_so(self.record):
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            raise AssertionError(f"not seen within {seconds_max:g} s: {what}") from None

    def freeze(self, process: str) -> int:
        """Freeze a process (SIGSTOP); return its pid."""
        pid = self.system.children[process].pid
        assert pid is not None, f"{process} does not run"
        os.kill(pid, signal.SIGSTOP)
        return pid

    async def kill(self, process: str) -> None:
        """SIGKILL, and wait until it has been started again and is ready."""
        child = self.system.children[process]
        starts_count = child.starts_count
        child.kill()
        async with asyncio.timeout(60):
            while child.starts_count == starts_count:
                await asyncio.sleep(_LOOK_SECONDS)
        await child.wait_ready()

    async def unacknowledged_count(self, stream: str, durable: str) -> int:
        """Return the unacknowledged messages of a durable consumer: delivered or pending."""
        connection = Client()
        await connection.connect(self.system.nats_url)
        try:
            info = await connection.jetstream().consumer_info(stream, durable)
        finally:
            await connection.close()
        return (info.num_pending or 0) + (info.num_ack_pending or 0)

    async def until_unacknowledged(self, stream: str, durable: str) -> None:
        """Wait until the consumer has something open."""
        async with asyncio.timeout(60):
            while not await self.unacknowledged_count(stream, durable):
                await asyncio.sleep(_LOOK_SECONDS)


@asynccontextmanager
async def started(
    folder: Path,
    say: Callable[[str], Any] = lambda _: None,
    *,
    clock_factor: float = CLOCK_FACTOR,
    policy: Path = POLICY,
    shadow: Path | None = None,
    offers: Path | None = None,
    external: ExternalSystems | None = None,
    code: Mapping[str, Path] | None = None,
) -> AsyncIterator[LocalSystem]:
    """Run a system, by default with `POLICY` and a fast clock; stop it afterwards. `code`: the path of another
    version, by process."""
    system = LocalSystem(
        folder,
        clock=Clock(clock_factor),
        policy=policy,
        gateway_port=0,
        offers=offers,
        shadow=shadow,
        external=external,
    )
    system.code.update(code or {})
    await system.start(say)
    try:
        yield system
        refused = [
            line for line in (folder / "nats" / "nats-server.log").read_text().splitlines() if "iolation" in line
        ]
        assert refused == [], "a service wants more of the broker than it may"
    finally:
        await system.stop()


@asynccontextmanager
async def followed(
    system: LocalSystem, say: Callable[[str], Any] = lambda _: None, *, policy: Path = POLICY
) -> AsyncIterator[Running]:
    """The system, followed from the first fact that its streams have."""
    bus = await connect(system.nats_url)
    try:
        await _until_made(bus)
        async with SimulatedWorld(system.simcluster_url) as world, Subscriber(bus, system.clock) as subscriber:
            yield Running(
                system=system,
                player=Player(bus=bus, gateway_url=system.gateway_url, world=world, clock=system.clock, print_line=say),
                world=world,
                record=subscriber.record,
                clock=system.clock,
                policy=load_policy(policy),
            )
    finally:
        await bus.close()


async def _until_made(bus: Bus) -> None:
    """On a broker that was started empty the services make the streams, not we."""
    async with asyncio.timeout(60):
        for stream in STREAMS:
            while True:
                try:
                    await bus.span(stream)
                    break
                except (PermanentError, TransientError):
                    await asyncio.sleep(_LOOK_SECONDS)


@asynccontextmanager
async def running(
    folder: Path, say: Callable[[str], Any] = lambda _: None, *, shadow: Path | None = None
) -> AsyncIterator[Running]:
    """A system as `started`, followed from its first fact."""
    async with started(folder, say, shadow=shadow) as system, followed(system, say) as cluster:
        yield cluster

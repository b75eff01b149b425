"""Three servers, three copies: one or two of them are killed under load. Times are the machine's, promises are held."""

import asyncio
import contextlib
import itertools
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import ClassVar

import pytest
from nats.aio.client import Client
from tests.support.ender import AT, Ender, cancel, declared, envelope_of
from tests.support.nats_cluster import NatsCluster, running_cluster
from tests.support.working import RECOVERY_SECONDS_MAX, persistently, until, working

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.protocol import Message, Publication
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outputs

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

COUNT = 3000
# What we may add to the broker's own outage is two seconds; the machine is shared, so five times that decides.
ADDED_SECONDS_MAX = 5 * 2.0


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[NatsCluster]:
    """Three servers that have found each other."""
    async with running_cluster(tmp_path / "nats") as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def connected(cluster: NatsCluster, name: str) -> AsyncIterator[NatsBus]:
    """A hand on the cluster, with three copies of everything declared."""
    bus = await NatsBus.connect(cluster.urls, name=name, declared=declared(replicas_count=3))
    try:
        await bus.ensure()
        yield bus
    finally:
        await bus.close()


async def stored(bus: NatsBus, stream: str) -> list[Message]:
    """Everything that the stream has, asked again while the servers still agree on who leads."""
    async with asyncio.timeout(RECOVERY_SECONDS_MAX):
        while True:
            with contextlib.suppress(TransientError):
                return await _stored(bus, stream)
            await asyncio.sleep(0.2)


async def _stored(bus: NatsBus, stream: str) -> list[Message]:
    last_sequence = await bus.last_sequence(stream)
    projection = await bus.projection(stream)
    messages: list[Message] = []
    if last_sequence:
        async for batch in projection:
            messages += batch
            if messages[-1].sequence >= last_sequence:
                break
    await projection.close()
    return messages


class Gaps:
    """When somebody last got what they wanted, and the longest wait since `reset`."""

    def __init__(self) -> None:
        self._last = 0.0
        self.longest = 0.0

    def reset(self) -> None:
        """Forget the longest."""
        self.longest = 0.0

    def tick(self) -> None:
        """It went well now."""
        now = asyncio.get_running_loop().time()
        self.longest = max(self.longest, now - self._last if self._last else 0.0)
        self._last = now


async def eager(urls: Sequence[str], gaps: Gaps, stop: asyncio.Event) -> None:
    """The broker's own outage: somebody who tries again all the time, over several connections.

    Ends by `stop`: the client may lose a cancellation that comes with an answer.
    """
    clients = [Client() for _ in urls]
    for client, url in zip(clients, urls, strict=True):
        await client.connect(url, max_reconnect_attempts=-1, error_cb=_ignore)
    try:
        for number in itertools.count():
            if stop.is_set():
                break
            for client in clients:
                with contextlib.suppress(Exception):
                    await client.jetstream(timeout=0.1).publish(
                        "job.noise", b"", headers={"Nats-Msg-Id": f"eager/{number}"}
                    )
                    gaps.tick()
                    break
            await asyncio.sleep(0.01)
    finally:
        for client in clients:
            await asyncio.wait_for(client.close(), 60)


async def _ignore(_: Exception) -> None:
    """Said by the test's own clients when servers go."""


@pytest.mark.sweep
async def test_nothing_is_lost_or_done_twice_when_a_leader_and_a_follower_are_killed(cluster: NatsCluster) -> None:
    """What was confirmed is stored once and has one effect, and the outage is the broker's own and little more."""
    async with connected(cluster, "load") as load, connected(cluster, "ender") as bus:
        service = Ender(job_seconds=0.0)
        async with working(bus, service) as runner:
            broker, ours, effects = Gaps(), Gaps(), Gaps()
            outages: list[tuple[float, float, float]] = []  # seconds: the broker's own, of our publisher, of effects
            stop = asyncio.Event()
            probing = asyncio.create_task(eager(cluster.urls, broker, stop))
            confirmed: dict[str, int] = {}

            async def publish() -> None:
                for number in range(COUNT):
                    subject, payload = envelope_of(cancel(number))
                    one = Publication(subject=subject, payload=payload, message_id=str(number))
                    (ack,) = await persistently(load, [one])
                    confirmed[str(number)] = ack.sequence
                    ours.tick()

            async def watch_effects() -> None:
                seen = 0
                while True:
                    if len(service.handled) > seen:
                        seen = len(service.handled)
                        effects.tick()
                    await asyncio.sleep(0.01)

            watching = asyncio.create_task(watch_effects())
            publishing = asyncio.create_task(publish())
            leader = await cluster.leader_of(load, "JOB")
            for number, victim in enumerate((leader, next(one for one in cluster.servers if one is not leader))):
                threshold = COUNT * (number + 1) // 4
                await until(lambda: len(confirmed) > threshold, "load before the kill")  # noqa: B023 - awaited here
                for gaps in (broker, ours, effects):
                    gaps.reset()
                before, handled_before = len(confirmed), len(service.handled)
                await victim.kill()
                await until(lambda: publishing.done() or len(confirmed) > before + 100, "publishing again")  # noqa: B023
                if publishing.done():
                    publishing.result()  # or why there is none
                await until(lambda: len(service.handled) > handled_before + 50, "effects again")  # noqa: B023
                outages.append((broker.longest, ours.longest, effects.longest))
                await victim.start()
                await cluster.until_whole(load, "JOB")
            await asyncio.wait_for(publishing, RECOVERY_SECONDS_MAX)
            await until(lambda: len(service.view.state.jobs) == COUNT, "all folded")
            await until(lambda: len(set(service.handled)) == COUNT, "all handled")
            await until(lambda: runner.readiness.is_ready, "ready again")
            stop.set()
            watching.cancel()
            await asyncio.wait_for(asyncio.gather(probing, watching, return_exceptions=True), RECOVERY_SECONDS_MAX)

        for own, publisher, effect in outages:
            assert max(publisher, effect) <= own + ADDED_SECONDS_MAX, f"(broker, publisher, effects): {outages}"
        kept = {one.message_id: one.sequence for one in await stored(load, "JOB") if one.subject != "job.noise"}
        assert {name: kept.get(name) for name in confirmed} == confirmed
        assert len(kept) == 2 * COUNT, "each job is asked to end once, and ends once"


class Fountain:
    """A source that never runs dry, and remembers how often it was asked."""

    name: ClassVar[str] = "fountain"
    consumes: ClassVar[tuple[type[Fact], ...]] = ()
    folds: ClassVar[tuple[type[Fact], ...]] = (JobCancelRequested,)
    publishes: ClassVar[tuple[type[Fact], ...]] = (JobFinished,)
    urgent: ClassVar[tuple[type[Fact], ...]] = ()
    tick_seconds: ClassVar[float | None] = 0.1

    def __init__(self) -> None:
        self.view = StateView()
        self.pulled = 0

    def sources(self) -> Sequence[AsyncIterator[int]]:
        """One source."""
        return (self._numbers(),)

    async def _numbers(self) -> AsyncIterator[int]:
        while True:
            self.pulled += 1
            yield self.pulled

    async def on_item(self, item: int) -> Outputs:
        """Each number is the end of a job."""
        return [JobFinished(job_id=cancel(item).job_id, outcome="completed", finished_at=AT, message="x" * 1000)]

    async def on_tick(self, now: datetime) -> Outputs:  # noqa: ARG002 - the numbers make each end another one
        """A tick publishes a fact too."""
        return [JobFinished(job_id=cancel(-self.pulled).job_id, outcome="completed", finished_at=AT)]


async def test_without_a_quorum_all_services_wait_and_report_it(cluster: NatsCluster) -> None:
    """Two of three killed: not ready, with the reason; nothing is pulled that cannot be stored; then work resumes."""
    async with connected(cluster, "fountain") as bus:
        service = Fountain()
        async with working(bus, service) as runner:
            await until(lambda: runner.readiness.is_ready and service.pulled > 200, "at work")
            victims = [one for one in cluster.servers if str(one.port) not in _server_of(bus)][:2]
            for victim in victims:
                await victim.kill()
            await until(lambda: not runner.readiness.is_ready, "not ready")
            await asyncio.sleep(1.0)
            tracemalloc.start()
            pulled = service.pulled
            await asyncio.sleep(6.0)
            why = runner.readiness.conditions["bus"]
            grown_bytes, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert why is not None
            assert "storing messages" in why or "broker" in why
            assert service.pulled <= pulled + 1, "the source waits for the stream"
            assert grown_bytes < 8 * 1024 * 1024
            assert runner.metrics.is_ready._value.get() == 0
            for victim in victims:
                await victim.start()
            await until(lambda: service.pulled > pulled + 200, "storing again")
            await until(lambda: runner.readiness.is_ready, "ready again")
            pulled = service.pulled
        ends = [one.message_id for one in await stored(bus, "JOB")]
        assert len(ends) == len(set(ends))
        assert len([one for one in ends if one and "job--" not in one]) >= pulled - 1


def _server_of(bus: NatsBus) -> str:
    url = bus._link.client.connected_url
    return "" if url is None else url.netloc

"""A network that drops packets silently: detected in seconds, reported, and over when the network recovers."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import structlog
from tests.support.black_hole import BlackHole, black_hole
from tests.support.ender import Ender, cancel, declared, envelope_of
from tests.support.nats import nats_store, server
from tests.support.working import persistently, until, working

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.nats.link import UNSENT_BYTES_MAX, Timeouts
from gpu_autoscaler.bus.nats.projection import NatsProjection
from gpu_autoscaler.bus.protocol import Publication
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import MEBIBYTE
from gpu_autoscaler.model.errors import TransientError

__all__ = ["nats_store", "server"]  # fixtures

pytestmark = pytest.mark.integration

COUNT = 300


@pytest.fixture
async def way(server: NatsServer) -> AsyncIterator[BlackHole]:
    """The service's way to the broker; everybody else has another one."""
    async with black_hole(server.port) as way:
        yield way


async def connect(url: str, name: str, timeouts: Timeouts | None = None) -> NatsBus:
    """A hand on the broker."""
    bus = await NatsBus.connect(url, name=name, declared=declared(), timeouts=timeouts)
    await bus.ensure()
    return bus


async def test_a_service_reports_the_outage_and_resumes_afterwards(server: NatsServer, way: BlackHole) -> None:
    """Not ready with the reason, a line in the log; every fact has its effect once when the packets flow again."""
    bus, load = await connect(way.url, "ender"), await connect(server.url, "load")
    service = Ender()
    with structlog.testing.capture_logs() as lines:
        async with working(bus, service) as runner:
            for number in range(COUNT):
                await load.publish(*envelope_of(cancel(number)), message_id=str(number))
            await until(lambda: len(service.handled) > COUNT // 4, "at work")
            way.swallow()
            # A second of silence, five until it is proven, two until the new connection is given up; five times that.
            await until(lambda: not runner.readiness.is_ready, "not ready")
            await until(lambda: not bus.is_connected, "the connection given up")
            await until(lambda: runner.metrics.is_bus_connected._value.get() == 0, "counted")
            assert runner.readiness.conditions["bus"] == "broker does not answer; reconnecting"
            way.restore()
            await until(lambda: len(set(service.handled)) == COUNT, "all handled")
            await until(lambda: runner.readiness.is_ready, "ready again")
    assert any(line["event"] == "broker silent, reconnect started" for line in lines)
    assert await load.last_sequence("JOB") == 2 * COUNT, "each job is asked to end once, and ends once"
    for hand in (bus, load):
        await hand.close()


async def test_what_cannot_be_sent_is_refused_not_hoarded(server: NatsServer, way: BlackHole) -> None:
    """Callers wait and hear it within their limit; memory is bounded; a repeat afterwards stores each once."""
    bus = await connect(way.url, "load", Timeouts(publish_seconds_max=4.0))
    many = [
        [
            Publication(subject="pod.noise", payload=b"x" * (4 * MEBIBYTE), message_id=f"{caller}/{number}")
            for number in range(4)
        ]
        for caller in range(8)
    ]
    way.swallow()
    storing = [asyncio.create_task(bus.publish_many(each)) for each in many]
    most = 0
    while not all(task.done() for task in storing):
        most = max(most, bus._link.client.pending_data_size)
        await asyncio.sleep(0.05)
    for task in storing:
        assert isinstance(task.exception(), TransientError)
    assert most <= UNSENT_BYTES_MAX + 5 * MEBIBYTE

    way.restore()
    await until(lambda: bus.is_connected, "the broker is back")
    acks = [ack for each in many for ack in await persistently(bus, each)]

    assert len({ack.sequence for ack in acks}) == 32
    assert await bus.last_sequence("POD") == 32
    await bus.close()


async def test_what_was_on_its_way_when_the_connection_broke_is_read_again(server: NatsServer, way: BlackHole) -> None:
    """Sent by the broker, never come, and nothing follows: a reader that was busy meanwhile has all, once."""
    bus, load = await connect(way.url, "reader"), await connect(server.url, "load")
    await load.publish_many(
        [Publication(subject="pod.noise", payload=b"x" * 4096, message_id=str(number)) for number in range(COUNT)]
    )
    projection = NatsProjection(bus._link, "POD", (), 0)
    pull = await projection.open()
    while not pull.waiting_count:
        await asyncio.sleep(0)
    way.swallow()
    await asyncio.sleep(0.5)  # what is on this side of the hole arrives
    async with asyncio.timeout(60):
        while (await load._link.call(f"CONSUMER.INFO.POD.{projection._consumer}"))["delivered"]["consumer_seq"] < COUNT:
            await asyncio.sleep(0.05)
    assert 0 < pull.waiting_count < COUNT, "cut in the middle"
    await way.close()
    way.restore()
    await until(lambda: bus._link.connections_count == 2, "connected anew")

    seen: list[int] = []
    async with asyncio.timeout(60):
        async for batch in projection:
            seen += [message.sequence for message in batch]
            if len(seen) >= COUNT:
                break
    assert seen == list(range(1, COUNT + 1))
    await projection.close()
    for hand in (bus, load):
        await hand.close()

"""Work continues across restarts of the broker: no confirmed message is lost, no effect happens twice."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
from tests.support.nats import nats_store, server

from gpu_autoscaler.bus.nats import link
from gpu_autoscaler.bus.nats import pull as nats_pull
from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.nats.link import Timeouts
from gpu_autoscaler.bus.nats.projection import BATCH_COUNT_MAX, NatsProjection
from gpu_autoscaler.bus.nats.wire import Frame
from gpu_autoscaler.bus.protocol import Delivery, Message, Publication
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import MEBIBYTE, BusDeclaration, ConsumerSpec, StreamSpec
from gpu_autoscaler.model.errors import ConfigError, TransientError

__all__ = ["nats_store", "server"]  # fixtures

pytestmark = pytest.mark.integration

STREAM = StreamSpec(
    name="WORK", subjects=("work.>",), description="of a test", max_age_seconds=3600, max_bytes=64 * MEBIBYTE
)
ASKED = ConsumerSpec(
    durable="worker-work-act", stream="WORK", subjects=("work.asked",), ack_wait_seconds=1.0, max_deliver=100
)
DECLARED = BusDeclaration(streams=(STREAM,), consumers=(ASKED,))
Connect = Callable[[str], Awaitable[NatsBus]]
PROMPT = Timeouts(publish_seconds_max=60.0, request_seconds_max=2.0)


@pytest.fixture
async def connect(server: NatsServer) -> AsyncIterator[Connect]:
    """Connections to it, closed afterwards."""
    buses: list[NatsBus] = []

    async def connected(name: str) -> NatsBus:
        bus = await NatsBus.connect(server.url, name=name, declared=DECLARED, timeouts=PROMPT)
        await bus.ensure()
        buses.append(bus)
        return bus

    yield connected
    for bus in buses:
        await bus.close()


async def work(bus: NatsBus, handled: list[str]) -> None:
    """An effect: publish an output named after its cause, then acknowledge. Errors are tried again by redelivery."""
    consumer = await bus.effect_consumer(ASKED.durable)
    while True:
        try:
            for delivery in await consumer.fetch(20, 0.5):
                cause = delivery.message.message_id or ""
                await bus.publish("work.done", delivery.message.payload, message_id=f"done/{cause}")
                handled.append(cause)
                await delivery.ack()
        except TransientError:
            await asyncio.sleep(0.05)


async def watch(bus: NatsBus, seen: list[Message]) -> None:
    """A projection of the whole stream."""
    async for batch in await bus.projection("WORK"):
        seen.extend(batch)


async def test_work_goes_on_through_two_crashes_of_the_broker(server: NatsServer, connect: Connect) -> None:
    """Every confirmed message is stored once, has one effect, and is seen in order by a reader that never stopped."""
    publisher, worker, reader = [await connect(name) for name in ("publisher", "worker", "reader")]
    handled: list[str] = []
    seen: list[Message] = []
    background = [asyncio.create_task(work(worker, handled)), asyncio.create_task(watch(reader, seen))]
    confirmed: dict[str, int] = {}

    async def publish() -> None:
        for number in itertools.count():
            if number > 300 and len(crashes) == 2:
                return
            ack = await publisher.publish("work.asked", b"%d" % number, message_id=str(number))
            confirmed[str(number)] = ack.sequence
            await asyncio.sleep(0.002)

    crashes: list[int] = []
    publishing = asyncio.create_task(publish())
    for _ in range(2):
        before = len(handled)
        async with asyncio.timeout(60):
            while len(handled) < before + 20:  # in the middle of the work, with messages in flight
                await asyncio.sleep(0.01)
        await server.kill()
        await asyncio.sleep(0.3)
        await server.start()
        crashes.append(1)
    await asyncio.wait_for(publishing, 60)
    total = len(confirmed)
    async with asyncio.timeout(60):
        while sum(1 for message in seen if message.subject == "work.done") < total:
            await asyncio.sleep(0.05)
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)

    asked = [message for message in seen if message.subject == "work.asked"]
    done = [message for message in seen if message.subject == "work.done"]
    assert [message.sequence for message in seen] == list(range(1, 2 * total + 1))
    assert {message.message_id: message.sequence for message in asked} == confirmed
    assert sorted(message.message_id or "" for message in done) == sorted(f"done/{name}" for name in confirmed)
    assert set(handled) == set(confirmed)


async def test_an_id_is_known_after_a_crash(server: NatsServer, connect: Connect) -> None:
    """A publish whose answer was lost in a crash can be repeated without harm."""
    bus = await connect("publisher")
    first = await bus.publish("work.asked", b"", message_id="same")
    await server.kill()
    await server.start()

    again = await bus.publish("work.asked", b"", message_id="same")

    assert (again.sequence, again.is_duplicate) == (first.sequence, True)


async def test_many_in_flight_survive_a_crash(server: NatsServer, connect: Connect) -> None:
    """Windows of messages on their way when the broker dies are sent again, each stored once."""
    bus = await connect("publisher")
    many = [Publication(subject="work.asked", payload=b"x" * 200, message_id=str(n)) for n in range(20_000)]
    storing = asyncio.create_task(bus.publish_many(many))
    async with asyncio.timeout(60):
        while await bus.last_sequence("WORK") < 1000:
            await asyncio.sleep(0.005)
    await server.kill()
    await server.start()

    acks = await asyncio.wait_for(storing, 60)

    assert sorted(ack.sequence for ack in acks) == list(range(1, 20_001))
    assert await bus.last_sequence("WORK") == 20_000


async def test_a_broker_that_stays_away_is_a_transient_error(server: NatsServer) -> None:
    """Within the limit, and the bus reports that it is not connected."""
    timeouts = Timeouts(publish_seconds_max=1.0, request_seconds_max=0.5)
    bus = await NatsBus.connect(server.url, name="publisher", declared=DECLARED, timeouts=timeouts)
    await bus.ensure()
    consumer = await bus.effect_consumer(ASKED.durable)
    was_connected = bus.is_connected
    await server.kill()

    with pytest.raises(TransientError, match=r"'1' on work.asked and 0 others were not confirmed within 1 s"):
        await asyncio.wait_for(bus.publish("work.asked", b"", message_id="1"), 60)
    with pytest.raises(TransientError, match=r"broker at 127.* does not answer"):
        await asyncio.wait_for(consumer.fetch(1, 10), 60)

    assert (was_connected, bus.is_connected) == (True, False)
    await asyncio.wait_for(bus.close(), 60)


async def test_a_consumer_deleted_under_us_is_loud(server: NatsServer, connect: Connect) -> None:
    """It does not look like a quiet stream; it is made again, but not where its stream was deleted."""
    bus = await connect("worker")
    consumer = await bus.effect_consumer(ASKED.durable)
    waiting = asyncio.create_task(consumer.fetch(1, 30))
    async with asyncio.timeout(60):
        while not (await bus._link.call("CONSUMER.INFO.WORK.worker-work-act"))["num_waiting"]:
            await asyncio.sleep(0.01)
    await bus._link.call("CONSUMER.DELETE.WORK.worker-work-act")

    with pytest.raises(TransientError, match="worker-work-act of WORK does not deliver: Consumer Deleted"):
        await asyncio.wait_for(waiting, 60)
    await bus.publish("work.asked", b"", message_id="1")
    # The server may take a moment to answer for a consumer that it was just given; services ask again as well.
    deliveries: Sequence[Delivery] = ()
    async with asyncio.timeout(60):
        while not deliveries:
            with contextlib.suppress(TransientError):
                deliveries = await consumer.fetch(1, 60)
    (delivery,) = deliveries
    assert delivery.message.message_id == "1"

    await bus._link.call("STREAM.DELETE.WORK")
    with pytest.raises(ConfigError, match="stream WORK was deleted while its consumer worker-work-act was in use"):
        await asyncio.wait_for(consumer.fetch(1, 30), 60)


async def test_a_store_that_is_gone_is_noticed(server: NatsServer, connect: Connect) -> None:
    """A reader does not wait for a new, shorter stream to grow up to where it was."""
    bus = await connect("reader")
    await bus.publish("work.asked", b"", message_id="1")
    seen: list[Message] = []
    reading = asyncio.create_task(watch(bus, seen))
    async with asyncio.timeout(60):
        while not seen:
            await asyncio.sleep(0.01)
    await bus._link.call("STREAM.DELETE.WORK")
    await bus.ensure()

    with pytest.raises(ConfigError, match="ends at sequence 0, but was read up to 1"):
        await asyncio.wait_for(reading, 60)


@pytest.mark.parametrize("lost", [slice(4, 5), slice(6, 10), slice(0, 10)], ids=["one amid", "the last", "all"])
async def test_a_message_lost_on_the_way_is_read_again(server: NatsServer, connect: Connect, lost: slice) -> None:
    """Whether others follow or none ever will: it is noticed; all are given once, in order."""
    bus = await connect("reader")
    await bus.publish_many([Publication(subject="work.asked", payload=b"", message_id=str(n)) for n in range(10)])
    projection = NatsProjection(bus._link, "WORK", (), 0)
    pull = await projection.open()
    async with asyncio.timeout(60):
        while pull.waiting_count < 10:
            await asyncio.sleep(0.01)
    arrived = list(pull._frames)
    del arrived[lost]
    pull._frames.clear()
    pull._frames.extend(arrived)

    seen: list[int] = []
    async with asyncio.timeout(60):  # heartbeats of a request that finds nothing tell how much was sent
        async for batch in projection:
            seen += [message.sequence for message in batch]
            if len(seen) >= 10:
                break
    await projection.close()

    assert seen == list(range(1, 11))


async def test_a_long_decision_is_not_taken_for_a_silent_broker(server: NatsServer) -> None:
    """What came while this process did something else for longer than any wait is read before silence is called so."""
    timeouts = Timeouts(request_seconds_max=1.0, silence_seconds_max=1.0, read_seconds_max=1.0)
    bus = await NatsBus.connect(server.url, name="planner", declared=DECLARED, timeouts=timeouts)
    await bus.ensure()
    connections_count = bus._link.connections_count

    asked = asyncio.create_task(bus.last_sequence("WORK"))
    said = asyncio.create_task(bus.publish("work.asked", b"", message_id="1"))
    for _ in range(6):  # both are on the wire, and no answer is read yet
        await asyncio.sleep(0)
    time.sleep(3.0)  # noqa: ASYNC251 - a plan over a large cluster

    assert await asked in (0, 1)
    assert not (await said).is_duplicate
    assert bus._link.connections_count == connections_count
    await bus.close()


async def test_a_slow_reader_is_sent_one_batch_at_a_time(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that come in pieces make it ask for no more; else the server would end the connection in the end."""
    monkeypatch.setattr(nats_pull, "LINGER_SECONDS", 0.0)
    bus = await connect("reader")
    count = 4 * BATCH_COUNT_MAX
    await bus.publish_many([Publication(subject="work.asked", payload=b"", message_id=str(n)) for n in range(count)])
    projection = NatsProjection(bus._link, "WORK", (), 0)
    pull = await projection.open()
    seen: list[int] = []
    most = 0
    async with asyncio.timeout(60):
        async for batch in projection:
            seen += [message.sequence for message in batch]
            await asyncio.sleep(0.05)
            most = max(most, pull.waiting_count)
            if len(seen) >= count:
                break
    await projection.close()

    assert seen == list(range(1, count + 1))
    assert most <= BATCH_COUNT_MAX


class Slow:
    """Takes what comes to it slowly, and keeps this process from everything else meanwhile."""

    def receive(self, frames: Sequence[Frame]) -> None:
        """Do something long with all that came together, and keep nothing."""
        del frames
        time.sleep(0.1)


async def test_a_slow_reader_is_not_taken_for_a_silent_broker(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While there is so much to read that an answer's turn comes late, the connection carries, and stays."""
    monkeypatch.setattr(link, "VERIFY_SECONDS_MAX", 0.1)
    bus, load = await connect("reader"), await connect("load")
    connections_count = bus._link.connections_count
    inbox = await bus._link.subscribe(Slow())
    await bus._link.client.flush()
    for number in range(32):
        await load._link.send(f"{inbox}.{number}", b"x" * 32 * 1024)
    await load._link.client.flush()

    bus._link.verify()
    proof = bus._link._verification
    assert proof is not None
    await asyncio.wait_for(proof, 60)
    await asyncio.sleep(0.5)

    assert (bus._link.connections_count, bus.is_connected) == (connections_count, True)

"""Time in the bus of one process: what takes minutes on a real broker takes none, and every run is the same."""

import asyncio
from datetime import UTC, datetime, timedelta

from tests.support.memory_bus import MemoryBus

from gpu_autoscaler.bus.memory_broker import MemoryBroker
from gpu_autoscaler.bus.streams import BusDeclaration, ConsumerSpec, StreamSpec

STREAM = StreamSpec(
    name="WORK", subjects=("work.>",), description="of a test", max_age_seconds=3600, max_bytes=100,
    duplicate_window_seconds=300,
)  # fmt: skip
CONSUMER = ConsumerSpec(durable="worker-work-act", stream="WORK", subjects=("work.asked",))


class Hands:
    """A clock that advances by hand and wakes the sleepers that are due."""

    def __init__(self) -> None:
        self.now = datetime(2026, 5, 4, tzinfo=UTC)
        self._sleepers: list[tuple[datetime, asyncio.Future[None]]] = []

    async def sleep(self, seconds: float) -> None:
        """Wait until the hands were moved that far."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + timedelta(seconds=seconds), woken))
        await woken

    async def move(self, seconds: float) -> None:
        """Let time pass."""
        self.now += timedelta(seconds=seconds)
        for at, woken in self._sleepers:
            if at <= self.now and not woken.done():
                woken.set_result(None)
        for _ in range(5):
            await asyncio.sleep(0)


async def bus_with(hands: Hands) -> MemoryBus:
    """A bus whose time is in our hands."""
    declared = BusDeclaration(streams=(STREAM,), consumers=(CONSUMER,))
    bus = MemoryBus(MemoryBroker(), declared, now=lambda: hands.now, sleep=hands.sleep)
    await bus.ensure()
    return bus


async def test_an_id_is_forgotten_after_the_window() -> None:
    """Beyond it only `fold` makes repeats harmless."""
    hands = Hands()
    bus = await bus_with(hands)
    await bus.publish("work.asked", b"", message_id="same")
    await hands.move(299)
    within = await bus.publish("work.asked", b"", message_id="same")
    await hands.move(2)

    beyond = await bus.publish("work.asked", b"", message_id="same")

    assert (within.is_duplicate, beyond.is_duplicate, beyond.sequence) == (True, False, 2)


async def test_a_waiting_reader_is_woken_by_redelivery() -> None:
    """A fetch that began before the ack wait ended returns when it ends, not when its own time is over."""
    hands = Hands()
    bus = await bus_with(hands)
    consumer = await bus.effect_consumer(CONSUMER.durable)
    await bus.publish("work.asked", b"", message_id="1")
    await consumer.fetch(1, 0)
    waiting = asyncio.create_task(consumer.fetch(1, 600))
    await hands.move(0)

    await hands.move(29)
    early = waiting.done()
    await hands.move(1)

    assert not early
    assert [delivery.delivered_count for delivery in await waiting] == [2]


async def test_a_fetch_ends_when_its_time_is_over() -> None:
    """Empty, by the clock that was given."""
    hands = Hands()
    bus = await bus_with(hands)
    waiting = asyncio.create_task((await bus.effect_consumer(CONSUMER.durable)).fetch(1, 10))
    await hands.move(0)

    await hands.move(10)

    assert await waiting == []


async def test_a_stream_forgets_by_age_and_by_size() -> None:
    """The oldest go first; a reader at an earlier sequence continues with the remaining messages."""
    hands = Hands()
    bus = await bus_with(hands)
    await bus.publish("work.asked", b"", message_id="old")
    await hands.move(3600)
    for number in range(3):
        await bus.publish("work.asked", bytes(40), message_id=str(number))

    kept = [await bus.message_at("WORK", sequence) is not None for sequence in (1, 2, 3, 4)]
    batch = await anext(aiter(await bus.projection("WORK")))

    assert kept == [False, False, True, True]
    assert [message.sequence for message in batch] == [3, 4]

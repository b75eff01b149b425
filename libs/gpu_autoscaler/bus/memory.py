"""The bus in one process, for tests and the simulator. Same contract as `bus/nats.py`, time from outside.

Every bus of a process shares one `MemoryBroker`. With a `now` and a `sleep` of the simulator's own nothing here knows
real time, and the same calls give the same order on every run.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Self

from gpu_autoscaler.bus.memory_broker import MemoryBroker, MemoryConsumer, MemoryStream
from gpu_autoscaler.bus.protocol import Ack, Bus, Delivery, EffectConsumer, Message, Projection, Publication, StreamSpan
from gpu_autoscaler.bus.streams import Declared, differences
from gpu_autoscaler.model.errors import ConfigError, PermanentError

BATCH_COUNT_MAX = 1000

Now = Callable[[], datetime]
Sleep = Callable[[float], Awaitable[None]]


class _Signal:
    """Wakes one reader when the broker has something new, or when time has come."""

    def __init__(self, broker: MemoryBroker, sleep: Sleep) -> None:
        self._broker = broker
        self._sleep = sleep
        self._event = asyncio.Event()

    def __enter__(self) -> Self:
        self._broker.listen(self._event.set)
        return self

    def __exit__(self, *_: object) -> None:
        self._broker.unlisten(self._event.set)

    async def wait(self, seconds: float | None) -> None:
        """Return after a change since the last wait, or after `seconds`."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._event.wait())]
        if seconds is not None:
            waits.append(asyncio.ensure_future(self._sleep(seconds)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        self._event.clear()


class MemoryDelivery:
    """A message in our hand."""

    def __init__(
        self, consumer: MemoryConsumer, message: Message, delivered_count: int, now: Now, tell: Callable[[], None]
    ) -> None:
        self._consumer = consumer
        self._message = message
        self._delivered_count = delivered_count
        self._now = now
        self._tell = tell

    @property
    def message(self) -> Message:
        """The message."""
        return self._message

    @property
    def delivered_count(self) -> int:
        """1 at the first delivery."""
        return self._delivered_count

    async def ack(self) -> None:
        """Confirm."""
        self._consumer.settle(self._message.sequence)
        self._tell()  # there is room in flight again

    async def nak(self, delay_seconds: float) -> None:
        """Ask for another delivery, not before `delay_seconds`."""
        self._consumer.postpone(self._message.sequence, self._now() + timedelta(seconds=delay_seconds))
        self._tell()

    async def term(self, reason: str) -> None:  # noqa: ARG002 - here the dead letter alone keeps the reason
        """Never deliver again."""
        await self.ack()

    async def in_progress(self) -> None:
        """Ask for another ack wait."""
        self._consumer.progress(self._message.sequence, self._now())


class MemoryEffectConsumer:
    """A hand on a durable consumer."""

    def __init__(self, broker: MemoryBroker, consumer: MemoryConsumer, now: Now, sleep: Sleep) -> None:
        self._broker = broker
        self._consumer = consumer
        self._now = now
        self._sleep = sleep

    async def fetch(self, count_max: int, wait_seconds_max: float) -> Sequence[Delivery]:
        """Return up to `count_max` deliveries, none after waiting."""
        deadline = self._now() + timedelta(seconds=wait_seconds_max)
        with _Signal(self._broker, self._sleep) as signal:
            while True:
                now = self._now()
                given = self._consumer.deliver(count_max, now)
                if given or now >= deadline:
                    return [
                        MemoryDelivery(self._consumer, message, count, self._now, self._broker.tell)
                        for message, count in given
                    ]
                due_at = self._consumer.next_due_at()
                until = deadline if due_at is None else min(deadline, due_at)
                await signal.wait(max((until - now).total_seconds(), 0.0))

    async def pending_count(self) -> int:
        """Messages not yet delivered to anybody."""
        return self._consumer.pending_count(self._now())

    async def close(self) -> None:
        """Nothing is on its way."""


class MemoryProjection:
    """An ordered read of one stream."""

    def __init__(
        self, broker: MemoryBroker, stream: MemoryStream, subjects: Sequence[str], after: int, now: Now, sleep: Sleep
    ) -> None:
        self._broker = broker
        self._stream = stream
        self._subjects = subjects
        self._last_sequence = after
        self._now = now
        self._sleep = sleep
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[Sequence[Message]]:
        """Batches of at most BATCH_COUNT_MAX messages in stream order."""
        with _Signal(self._broker, self._sleep) as signal:
            while not self._closed:
                batch = []
                for message in self._stream.after(self._last_sequence, self._subjects, self._now()):
                    batch.append(message)
                    if len(batch) == BATCH_COUNT_MAX:
                        break
                if batch:
                    self._last_sequence = batch[-1].sequence
                    yield batch
                else:
                    await signal.wait(None)

    async def lag_count(self) -> int:
        """Messages that are stored but not given yet."""
        return sum(1 for _ in self._stream.after(self._last_sequence, self._subjects, self._now()))

    @property
    def is_closed(self) -> bool:
        """True when nobody reads here any more."""
        return self._closed

    async def close(self) -> None:
        """Stop reading; an iteration that waits ends."""
        self._closed = True
        self._broker.tell()


class MemoryBus(Bus):
    """One service's hand on the broker of this process."""

    def __init__(self, broker: MemoryBroker, declared: Declared, *, now: Now, sleep: Sleep = asyncio.sleep) -> None:
        self._broker = broker
        self._declared = declared
        self._now = now
        self._sleep = sleep
        self._projections: list[MemoryProjection] = []

    @property
    def is_connected(self) -> bool:
        """Always: there is nothing between us and the broker."""
        return True

    async def publish_many(self, publications: Sequence[Publication]) -> Sequence[Ack]:
        """Store messages; see `Bus.publish_many`."""
        return [self._broker.store(publication, self._now()) for publication in publications]

    async def effect_consumer(self, durable: str) -> EffectConsumer:
        """Bind to a declared durable consumer. Raises ConfigError when it is missing or drifted."""
        spec = self._declared.consumer(durable)
        if spec is None:
            raise ConfigError("broker", [f"consumer {durable} is not among those declared for this process"])
        consumer = self._broker.consumers.get((spec.stream, durable))
        if consumer is None:
            mistake = f"consumer {durable} of {spec.stream} does not exist; make it with `ensure`"
            raise ConfigError("broker", [mistake])
        drift = differences(f"consumer {durable}", spec.config(), consumer.spec.config())
        if drift:
            raise ConfigError("broker", drift)
        return MemoryEffectConsumer(self._broker, consumer, self._now, self._sleep)

    async def projection(self, stream: str, *, subjects: Sequence[str] = (), after_sequence: int = 0) -> Projection:
        """Read a stream from the message after `after_sequence`. Raises ConfigError when there is no such stream."""
        known = self._broker.streams.get(stream)
        if known is None:
            raise ConfigError("broker", [f"there is no stream {stream}; make it with `ensure`"])
        if known.last_sequence < after_sequence:
            mistake = (
                f"stream {stream} ends at sequence {known.last_sequence}, but was read up to {after_sequence}: it was "
                "made anew or lost messages; start again from the beginning"
            )
            raise ConfigError("broker", [mistake])
        projection = MemoryProjection(self._broker, known, subjects, after_sequence, self._now, self._sleep)
        self._projections = [one for one in self._projections if not one.is_closed] + [projection]
        return projection

    async def span(self, stream: str) -> StreamSpan:
        """Return which stream this is and what it has. Raises PermanentError when there is none of this name."""
        return self._broker.stream(stream).span(self._now())

    async def message_at(self, stream: str, sequence: int) -> Message | None:
        """Return the message at this sequence; None when it has aged out or never was."""
        return self._broker.stream(stream).at(sequence, self._now())

    async def last_message(self, stream: str, subject: str) -> Message | None:
        """Return the stream's last message on the subject, None where it has none."""
        return self._broker.stream(stream).last_on(subject, self._now())

    async def ensure(self) -> None:
        """Make what is declared and missing. Raises ConfigError with both values of each drift, which it leaves."""
        mistakes: list[str] = []
        for spec in self._declared.streams:
            mistakes += differences(f"stream {spec.name}", spec.config(), self._broker.make_stream(spec, self._now()))
        for bucket in self._declared.buckets:
            mistakes += differences(
                f"bucket {bucket.name}", bucket.config(), self._broker.make_bucket(bucket, self._now())
            )
        for consumer in self._declared.consumers:
            thing = f"consumer {consumer.durable} of {consumer.stream}"
            try:
                mistakes += differences(thing, consumer.config(), self._broker.make_consumer(consumer))
            except PermanentError as exc:
                mistakes.append(f"{thing}: {exc}")
        if mistakes:
            raise ConfigError("broker", [*mistakes, "make both equal: change the settings, or edit it on the broker"])

    async def close(self) -> None:
        """End what this bus reads."""
        for projection in self._projections:
            await projection.close()

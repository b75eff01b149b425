"""The bus in one process, for tests and the simulator. Same contract as `bus/nats/bus.py`, with a given clock.

All buses of a process share one `MemoryBroker`. With `now` and `sleep` of the simulator nothing depends on real time,
and the same calls give the same order on every run.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Self

from gpu_autoscaler.bus.differences import Difference, refuse_differences
from gpu_autoscaler.bus.memory_broker import MemoryBroker, MemoryConsumer, MemoryStream
from gpu_autoscaler.bus.protocol import (
    Ack,
    Bus,
    Delivery,
    EffectConsumer,
    Message,
    Projection,
    Publication,
    StreamSpan,
    refuse_gap,
)
from gpu_autoscaler.bus.streams import BusDeclaration
from gpu_autoscaler.model.errors import ConfigError, PermanentError

BATCH_COUNT_MAX = 1000

Now = Callable[[], datetime]
Sleep = Callable[[float], Awaitable[None]]


class _Signal:
    """Wakes one reader after a change on the broker or at a given time."""

    def __init__(self, broker: MemoryBroker, sleep: Sleep) -> None:
        self._broker = broker
        self._sleep = sleep
        self._event = asyncio.Event()

    def __enter__(self) -> Self:
        self._broker.add_listener(self._event.set)
        return self

    def __exit__(self, *_: object) -> None:
        self._broker.remove_listener(self._event.set)

    async def wait(self, seconds: float | None) -> None:
        """Return after a change since the last wait, or after `seconds`."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._event.wait())]
        if seconds is not None:
            waits.append(asyncio.ensure_future(self._sleep(seconds)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        self._event.clear()


class MemoryDelivery:
    """A message delivered to this process."""

    def __init__(
        self, consumer: MemoryConsumer, message: Message, delivered_count: int, now: Now, notify: Callable[[], None]
    ) -> None:
        self._consumer = consumer
        self._message = message
        self._delivered_count = delivered_count
        self._now = now
        self._notify = notify

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
        self._consumer.complete(self._message.sequence)
        self._notify()  # another message may be delivered

    async def nak(self, delay_seconds: float) -> None:
        """Request redelivery, not before `delay_seconds`."""
        self._consumer.postpone(self._message.sequence, self._now() + timedelta(seconds=delay_seconds))
        self._notify()

    async def term(self, reason: str) -> None:  # noqa: ARG002 - only the dead letter keeps the reason
        """Never deliver again."""
        await self.ack()

    async def in_progress(self) -> None:
        """Extend the ack wait."""
        self._consumer.progress(self._message.sequence, self._now())


class MemoryEffectConsumer:
    """A subscription to a durable consumer."""

    def __init__(self, broker: MemoryBroker, consumer: MemoryConsumer, now: Now, sleep: Sleep) -> None:
        self._broker = broker
        self._consumer = consumer
        self._now = now
        self._sleep = sleep

    async def fetch(self, count_max: int, wait_seconds_max: float) -> Sequence[Delivery]:
        """Return up to `count_max` deliveries; none when the wait ends."""
        deadline = self._now() + timedelta(seconds=wait_seconds_max)
        with _Signal(self._broker, self._sleep) as signal:
            while True:
                now = self._now()
                deliveries = self._consumer.deliver(count_max, now)
                if deliveries or now >= deadline:
                    return [
                        MemoryDelivery(self._consumer, message, count, self._now, self._broker.notify)
                        for message, count in deliveries
                    ]
                due_at = self._consumer.next_due_at()
                until = deadline if due_at is None else min(deadline, due_at)
                await signal.wait(max((until - now).total_seconds(), 0.0))

    async def pending_count(self) -> int:
        """Messages not yet delivered to any process."""
        return self._consumer.pending_count(self._now())

    async def acknowledged_sequence(self) -> int:
        """The sequence up to which every message is acknowledged."""
        return self._consumer.acknowledged_sequence(self._now())

    async def close(self) -> None:
        """Nothing to return: messages are only taken by `fetch`."""


class MemoryProjection:
    """An ordered read of one stream."""

    def __init__(
        self, broker: MemoryBroker, stream: MemoryStream, subjects: Sequence[str], after: int, now: Now, sleep: Sleep
    ) -> None:
        self._broker = broker
        self._stream = stream
        self._subjects = subjects
        self._last_sequence = self._seen_sequence = after
        self._now = now
        self._sleep = sleep
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[Sequence[Message]]:
        """Batches of at most BATCH_COUNT_MAX messages in stream order."""
        with _Signal(self._broker, self._sleep) as signal:
            while not self._closed:
                self._refuse_gap()
                batch = []
                for message in self._stream.after(self._last_sequence, self._subjects, self._now()):
                    batch.append(message)
                    if len(batch) == BATCH_COUNT_MAX:
                        break
                if batch:
                    self._last_sequence = self._seen_sequence = batch[-1].sequence
                    yield batch
                else:
                    self._seen_sequence = self._stream.last_sequence
                    await signal.wait(None)

    def _refuse_gap(self) -> None:
        refuse_gap(self._stream.spec.name, self._seen_sequence, self._stream.span(self._now()).first_sequence)

    async def lag_count(self) -> int:
        """Messages that are stored but not deliveries yet."""
        lag_count = sum(1 for _ in self._stream.after(self._last_sequence, self._subjects, self._now()))
        if lag_count == 0:
            self._seen_sequence = self._stream.last_sequence
        return lag_count

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._closed

    async def close(self) -> None:
        """Stop reading; a waiting iteration ends."""
        self._closed = True
        self._broker.notify()


class MemoryBus(Bus):
    """One service's connection to the broker of this process."""

    def __init__(
        self, broker: MemoryBroker, declared: BusDeclaration, *, now: Now, sleep: Sleep = asyncio.sleep
    ) -> None:
        self._broker = broker
        self._declared = declared
        self._now = now
        self._sleep = sleep
        self._projections: list[MemoryProjection] = []

    @property
    def is_connected(self) -> bool:
        """Always true: the broker is in this process."""
        return True

    async def publish_many(self, publications: Sequence[Publication]) -> Sequence[Ack]:
        """Store messages; see `Bus.publish_many`."""
        return [self._broker.store(publication, self._now()) for publication in publications]

    async def effect_consumer(self, durable: str) -> EffectConsumer:
        """Bind to a declared durable consumer. Raises ConfigError when it is missing or differs."""
        spec = self._declared.consumer(durable)
        if spec is None:
            raise ConfigError("broker", [f"consumer {durable} is not declared for this process"])
        consumer = self._broker.consumers.get((spec.stream, durable))
        if consumer is None:
            error = f"consumer {durable} of stream {spec.stream} does not exist; create it with `ensure`"
            raise ConfigError("broker", [error])
        found = spec.differences(consumer.spec.config())
        if not all(difference.is_tolerated for difference in found):
            refuse_differences(found)
        return MemoryEffectConsumer(self._broker, consumer, self._now, self._sleep)

    async def projection(self, stream: str, *, subjects: Sequence[str] = (), after_sequence: int = 0) -> Projection:
        """Read a stream from the message after `after_sequence`. Raises ConfigError when there is no such stream."""
        known = self._broker.streams.get(stream)
        if known is None:
            raise ConfigError("broker", [f"stream {stream} does not exist; create it with `ensure`"])
        if known.last_sequence < after_sequence:
            error = (
                f"stream {stream} ends at sequence {known.last_sequence}, but was read up to {after_sequence}: it was "
                "recreated or lost messages; restart the process"
            )
            raise ConfigError("broker", [error])
        projection = MemoryProjection(self._broker, known, subjects, after_sequence, self._now, self._sleep)
        self._projections = [reader for reader in self._projections if not reader.is_closed] + [projection]
        return projection

    async def span(self, stream: str) -> StreamSpan:
        """Return identity and range of a stream. Raises PermanentError when it does not exist."""
        return self._broker.stream(stream).span(self._now())

    async def message_at(self, stream: str, sequence: int) -> Message | None:
        """Return the message at this sequence; None when it aged out or never existed."""
        return self._broker.stream(stream).at(sequence, self._now())

    async def last_message(self, stream: str, subject: str) -> Message | None:
        """Return the stream's last message on the subject, None without one."""
        return self._broker.stream(stream).last_on(subject, self._now())

    async def ensure(self) -> None:
        """Create what is declared and missing. Raises ConfigError with both values of each difference."""
        errors: list[str] = []
        found: list[Difference] = []
        for spec in self._declared.streams:
            found += spec.differences(self._broker.make_stream(spec, self._now()))
        for bucket in self._declared.buckets:
            found += bucket.differences(self._broker.make_bucket(bucket, self._now()))
        for consumer in self._declared.consumers:
            try:
                found += consumer.differences(self._broker.make_consumer(consumer, self._now()))
            except PermanentError as exc:
                errors.append(f"{consumer.thing}: {exc}")
        refuse_differences(found, errors)

    async def close(self) -> None:
        """Close all projections of this bus."""
        for projection in self._projections:
            await projection.close()

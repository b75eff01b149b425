"""The newest facts of every stream in memory, for lists of recent facts and for event streams.

One `Tail` per process reads each stream once, whatever the number of listeners. It has no effects, so it is a
projection. Each stream has a ring of its own, so that frequent telemetry does not displace rare decisions. Rings and
the queues of listeners are limited in bytes of messages; a decoded plan takes two to four times those bytes.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice

import msgspec
import structlog

from gpu_autoscaler.bus.protocol import Bus, Message
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.model.errors import InvalidFact, TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.decode import decode_message
from gpu_autoscaler_services.gateway.subjects import SubjectFilter

STREAMS = tuple(sorted({fact.stream() for fact in FACTS}))
RING_COUNT_MAX = 500  # facts kept per stream
RINGS_BYTES_MAX = 48 * 2**20  # of the messages of all rings together; about 200 MiB of the gateway's 1 GiB
LISTENER_BYTES_MAX = 2**20  # of the unread messages of one listener
RECONNECT_SECONDS = 1.0  # wall time between attempts to open an unreadable stream

Observe = Callable[[Recorded], None]

log = structlog.get_logger()


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded fact with its subject and storage time."""

    recorded: Recorded
    subject: str
    stored_at: datetime
    message_bytes: int

    @property
    def position(self) -> str:
        """Return the position in the record: `SCALING:12`."""
        return f"{self.recorded.stream}:{self.recorded.sequence}"


class Listener:
    """One who listens. A queue that overflows ends the listening: a slow reader never holds up the others."""

    def __init__(self, subjects: SubjectFilter, buffer_count_max: int, caller: str = "") -> None:
        """`caller`: who listens; empty: unknown."""
        self.subjects = subjects
        self.closed_because: str | None = None
        self.caller = caller
        self.unread_bytes = 0
        self._queue: asyncio.Queue[Entry | None] = asyncio.Queue()
        self._buffer_count_max = buffer_count_max

    def offer(self, entry: Entry) -> None:
        """Queue a matching entry; close if too many or too large ones are queued. A single one may have any size."""
        if self.closed_because is not None or not self.subjects.matches(entry.subject):
            return
        if self._queue.qsize() >= self._buffer_count_max:
            self.close(f"{self._buffer_count_max} facts unread; resume with Last-Event-ID and a narrower filter")
        elif self.unread_bytes and self.unread_bytes + entry.message_bytes > LISTENER_BYTES_MAX:
            self.close(f"{LISTENER_BYTES_MAX >> 10} KiB unread; resume with Last-Event-ID and a narrower filter")
        else:
            self.unread_bytes += entry.message_bytes
            self._queue.put_nowait(entry)

    def close(self, reason: str) -> None:
        """Stop queueing; queued entries are still returned, then `next` returns None."""
        if self.closed_because is None:
            self.closed_because = reason
            self._queue.put_nowait(None)

    async def next(self, wait_seconds_max: float) -> Entry | None:
        """Return the next entry; None at the end. Raises TimeoutError after `wait_seconds_max` of wall time."""
        entry = await asyncio.wait_for(self._queue.get(), wait_seconds_max)
        self.unread_bytes -= 0 if entry is None else entry.message_bytes
        return entry


class Rings:
    """The newest entries of each stream, limited in number by stream and in bytes of messages over all streams."""

    def __init__(self, streams: Sequence[str], count_max: int, bytes_max: int) -> None:
        self._rings: dict[str, deque[Entry]] = {stream: deque() for stream in streams}
        self._bytes = dict.fromkeys(streams, 0)
        self._count_max = count_max
        self._bytes_max = bytes_max

    @property
    def message_bytes(self) -> int:
        """Return the bytes of all kept messages."""
        return sum(self._bytes.values())

    def append(self, entry: Entry) -> None:
        """Keep the entry. Over the limit of bytes, the largest ring gives up its oldest entries, but never its last."""
        stream = entry.recorded.stream
        self._rings[stream].append(entry)
        self._bytes[stream] += entry.message_bytes
        if len(self._rings[stream]) > self._count_max:
            self._drop_oldest(stream)
        while self.message_bytes > self._bytes_max:
            shortened = [name for name, ring in self._rings.items() if len(ring) > 1]
            if not shortened:
                break
            self._drop_oldest(max(shortened, key=self._bytes.__getitem__))

    def newest_first(self) -> Iterator[Entry]:
        """Yield all entries, those stored last first."""
        return heapq.merge(
            *(reversed(ring) for ring in self._rings.values()), key=lambda entry: entry.stored_at, reverse=True
        )

    def _drop_oldest(self, stream: str) -> None:
        self._bytes[stream] -= self._rings[stream].popleft().message_bytes


class Tail:
    """Follows all streams and passes entries to listeners."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        *,
        streams: Sequence[str] = STREAMS,
        observers: Mapping[str, Observe] | None = None,
        ring_count_max: int = RING_COUNT_MAX,
        rings_bytes_max: int = RINGS_BYTES_MAX,
    ) -> None:
        """`observers`, by stream, are called with every fact of the stream from its beginning."""
        self.streams = tuple(streams)
        self._bus = bus
        self._clock = clock
        self._observers = dict(observers or {})
        self._ring_count_max = ring_count_max
        self._rings = Rings(streams, ring_count_max, rings_bytes_max)
        self._positions = dict.fromkeys(streams, 0)
        self._read: set[str] = set()  # streams read up to their end at the start
        self._listeners: set[Listener] = set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for stream in self.streams:
                group.create_task(self._follow(stream), name=f"tail {stream}")

    def position(self, stream: str) -> int:
        """Return the last sequence read of the stream; 0: none yet."""
        return self._positions[stream]

    def has_read(self, stream: str) -> bool:
        """Return True once the stream was read up to its end at the start."""
        return stream in self._read

    def recent(self, subjects: SubjectFilter, count_max: int | None = None) -> list[Entry]:
        """Return the newest matching entries, newest first; None: all that are in memory."""
        matching = (entry for entry in self._rings.newest_first() if subjects.matches(entry.subject))
        return list(islice(matching, count_max))

    def listen(self, subjects: SubjectFilter, buffer_count_max: int, caller: str = "") -> Listener:
        """Return a new listener; remove it with `forget`. `caller`: who listens; empty: unknown."""
        listener = Listener(subjects, buffer_count_max, caller)
        self._listeners.add(listener)
        return listener

    def forget(self, listener: Listener) -> None:
        self._listeners.discard(listener)

    @property
    def listeners_count(self) -> int:
        return len(self._listeners)

    def listeners_count_of(self, caller: str) -> int:
        """Return the number of listeners of one caller."""
        return sum(listener.caller == caller for listener in self._listeners)

    def close(self, reason: str) -> None:
        for listener in self._listeners:
            listener.close(reason)

    def entry(self, message: Message) -> Entry | None:
        """Return the message as an entry; None if it is not a valid fact, which its effect consumer dead-letters."""
        try:
            recorded = decode_message(message, self._clock)
        except InvalidFact:
            return None
        return Entry(
            recorded=recorded, subject=message.subject, stored_at=message.stored_at, message_bytes=len(message.payload)
        )

    async def _follow(self, stream: str) -> None:
        while True:
            try:
                last = await self._bus.last_sequence(stream)
                start = 0 if stream in self._observers else max(0, last - self._ring_count_max)
                after = self._positions[stream] or start
                projection = await self._bus.projection(stream, after_sequence=after)
                try:
                    if await projection.lag_count() == 0:
                        self._read.add(stream)
                    async for batch in projection:
                        self.take(batch)
                        if self._positions[stream] >= last:
                            self._read.add(stream)
                finally:
                    await projection.close()
            except TransientError as error:
                log.warning("stream unreadable, recent facts are stale", stream=stream, error=str(error))
            except Exception:
                # A bug in one stream must not stop the others, nor this one for good.
                log.exception("tail failed, restarting", stream=stream)
            await asyncio.sleep(RECONNECT_SECONDS)

    def take(self, batch: Sequence[Message]) -> None:
        """Keep the facts of these messages and pass them to observers and listeners."""
        for message in batch:
            entry = self.entry(message)
            self._positions[message.stream] = message.sequence
            if entry is not None:
                self._rings.append(entry)
                if (observe := self._observers.get(message.stream)) is not None:
                    observe(entry.recorded)
                for listener in self._listeners:
                    listener.offer(entry)

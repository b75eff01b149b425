"""A broker in this process: streams, durable consumers, redelivery; the server's rules, no threads, no clock.

Time comes in with every call. `bus/memory.py` puts the bus protocol before it; tests and the simulator use that.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from gpu_autoscaler.bus.protocol import Ack, Message, Publication, StreamSpan, microseconds_of
from gpu_autoscaler.bus.streams import (
    ADVISORY_ROOT,
    MESSAGE_BYTES_MAX,
    SERVER_PAYLOAD_BYTES_MAX,
    BucketSpec,
    ConsumerSpec,
    StreamSpec,
    covers,
)
from gpu_autoscaler.model.errors import PermanentError, StalePlan


class Stored(msgspec.Struct, frozen=True):
    """A message and when it leaves before its stream's own age limit."""

    message: Message
    expires_at: datetime | None


class MemoryStream:
    """One stream: an append-only list that forgets its oldest."""

    def __init__(self, spec: StreamSpec, created_at: datetime) -> None:
        self.spec = spec
        self.last_sequence = 0
        self._created_at = created_at
        # Ordered dictionaries, because a plain one takes longer to find its first entry the more were removed before.
        self._stored: OrderedDict[int, Stored] = OrderedDict()  # by sequence
        self._bytes = 0
        self._last_by_subject: dict[str, int] = {}
        self._ids: OrderedDict[str, tuple[int, datetime]] = OrderedDict()  # by time
        self._duplicate_window = timedelta(seconds=spec.duplicate_window_seconds)
        self._age_max = timedelta(seconds=spec.max_age_seconds)

    def store(self, publication: Publication, now: datetime) -> Ack:
        """Append, or say which earlier message it repeats. Raises StalePlan, PermanentError."""
        self._refuse_too_large(publication)
        self._forget(now)
        if publication.expected_last_subject_sequence is not None:
            stale = self._stale(publication, publication.expected_last_subject_sequence)
            if stale is not None:
                return stale
        if publication.message_id in self._ids:
            sequence = self._ids[publication.message_id][0]
            return Ack(stream=self.spec.name, sequence=sequence, is_duplicate=True)
        self.last_sequence += 1
        ttl_seconds = self.spec.ttl_seconds(publication.subject)
        self._stored[self.last_sequence] = Stored(
            Message(
                subject=publication.subject,
                payload=publication.payload,
                message_id=publication.message_id,
                stream=self.spec.name,
                sequence=self.last_sequence,
                stored_microseconds=microseconds_of(now),
                headers=dict(publication.headers),
            ),
            None if ttl_seconds is None else now + timedelta(seconds=ttl_seconds),
        )
        self._bytes += len(publication.payload)
        self._last_by_subject[publication.subject] = self.last_sequence
        self._ids[publication.message_id] = (self.last_sequence, now)
        while self._bytes > self.spec.max_bytes and len(self._stored) > 1:
            self._drop(next(iter(self._stored)))
        return Ack(stream=self.spec.name, sequence=self.last_sequence, is_duplicate=False)

    def _stale(self, publication: Publication, expected: int) -> Ack | None:
        """The server looks at the fence before the id: a repeat is known only while it is the subject's last."""
        last = self._last_by_subject.get(publication.subject, 0)
        if last == expected:
            return None
        stored = self._stored.get(last)
        if stored is not None and stored.message.message_id == publication.message_id:
            return Ack(stream=self.spec.name, sequence=last, is_duplicate=True)
        raise StalePlan(
            f"{publication.subject}: sequence {expected} is no longer the last one (wrong last sequence: {last}); "
            "fold what came since and decide again"
        )

    def _refuse_too_large(self, publication: Publication) -> None:
        limit = MESSAGE_BYTES_MAX if self.spec.message_bytes_max >= 0 else SERVER_PAYLOAD_BYTES_MAX
        if len(publication.payload) > limit:
            raise PermanentError(
                f"message {publication.message_id!r} on {publication.subject} has {len(publication.payload)} bytes, at "
                f"most {limit} are taken; split it"
            )

    def _forget(self, now: datetime) -> None:
        oldest_id = now - self._duplicate_window
        while self._ids:
            message_id, (_, stored_at) = next(iter(self._ids.items()))
            if stored_at > oldest_id:
                break
            del self._ids[message_id]
        oldest = now - self._age_max
        while self._stored:
            sequence, stored = next(iter(self._stored.items()))
            if stored.message.stored_at > oldest:
                break
            self._drop(sequence)

    def _drop(self, sequence: int) -> None:
        stored = self._stored.pop(sequence)
        self._bytes -= len(stored.message.payload)
        if self._last_by_subject.get(stored.message.subject) == sequence:
            del self._last_by_subject[stored.message.subject]

    def span(self, now: datetime) -> StreamSpan:
        """Which stream this is, and what it still has."""
        self._forget(now)
        return StreamSpan(
            created_at=self._created_at,
            first_sequence=next(iter(self._stored), self.last_sequence + 1),
            last_sequence=self.last_sequence,
        )

    def at(self, sequence: int, now: datetime) -> Message | None:
        """The message at this sequence, unless it has aged out."""
        self._forget(now)
        stored = self._stored.get(sequence)
        if stored is None or (stored.expires_at is not None and stored.expires_at <= now):
            return None
        return stored.message

    def last_on(self, subject: str, now: datetime) -> Message | None:
        """The last message on the subject, unless it has aged out."""
        return self.at(self._last_by_subject.get(subject, 0), now)

    def after(self, sequence: int, subjects: Sequence[str], now: datetime) -> Iterator[Message]:
        """Messages after this sequence in order; `subjects` narrows them, empty means all."""
        self._forget(now)
        first = next(iter(self._stored), self.last_sequence + 1)
        for number in range(max(sequence + 1, first), self.last_sequence + 1):
            message = self.at(number, now)
            if message is not None and (not subjects or any(covers(s, message.subject) for s in subjects)):
                yield message


class _Pending(msgspec.Struct):
    """Delivered and not yet acknowledged."""

    delivered_count: int
    due_at: datetime  # when it comes again


class MemoryConsumer:
    """One durable consumer: who has what, since when, how often."""

    def __init__(
        self, spec: ConsumerSpec, stream: MemoryStream, advise: Callable[[Publication, datetime], None]
    ) -> None:
        self.spec = spec
        self._stream = stream
        self._advise = advise
        self._read_up_to = 0
        self._pending: dict[int, _Pending] = {}

    def deliver(self, count_max: int, now: datetime) -> list[tuple[Message, int]]:
        """Messages with their delivered count: what is due again first, then new ones within `max_ack_pending`."""
        given: list[tuple[Message, int]] = []
        for sequence in sorted(sequence for sequence, pending in self._pending.items() if pending.due_at <= now):
            if len(given) == count_max:
                return given
            message = self._again(sequence, now)
            if message is not None:
                given.append((message, self._pending[sequence].delivered_count))
        for message in self._stream.after(self._read_up_to, self.spec.subjects, now):
            if len(given) == count_max or len(self._pending) >= self.spec.max_ack_pending:
                break
            self._read_up_to = message.sequence
            self._pending[message.sequence] = _Pending(1, self._due(now))
            given.append((message, 1))
        return given

    def _again(self, sequence: int, now: datetime) -> Message | None:
        pending = self._pending[sequence]
        message = self._stream.at(sequence, now)
        if message is None or pending.delivered_count >= self.spec.max_deliver:
            del self._pending[sequence]
            if message is not None:
                self._give_up(sequence, pending.delivered_count, now)
            return None
        pending.delivered_count += 1
        pending.due_at = self._due(now)
        return message

    def _give_up(self, sequence: int, deliveries: int, now: datetime) -> None:
        stream, durable = self.spec.stream, self.spec.durable
        advice = {"stream": stream, "consumer": durable, "stream_seq": sequence, "deliveries": deliveries}
        self._advise(
            Publication(
                subject=f"{ADVISORY_ROOT}.{stream}.{durable}",
                payload=msgspec.json.encode(advice),
                message_id=f"{stream}/{sequence}/{durable}",
            ),
            now,
        )

    def _due(self, now: datetime) -> datetime:
        return now + timedelta(seconds=self.spec.ack_wait_seconds)

    def settle(self, sequence: int) -> None:
        """It is done with; also accepted from an earlier delivery than the last."""
        self._pending.pop(sequence, None)

    def postpone(self, sequence: int, due_at: datetime) -> None:
        """Let it come again at `due_at`."""
        pending = self._pending.get(sequence)
        if pending is not None:
            pending.due_at = due_at

    def progress(self, sequence: int, now: datetime) -> None:
        """Another ack wait from now."""
        self.postpone(sequence, self._due(now))

    def next_due_at(self) -> datetime | None:
        """When the next message comes again."""
        return min((pending.due_at for pending in self._pending.values()), default=None)

    def pending_count(self, now: datetime) -> int:
        """Messages not yet delivered to anybody."""
        return sum(1 for _ in self._stream.after(self._read_up_to, self.spec.subjects, now))


class MemoryBroker:
    """What all buses of one process share."""

    def __init__(self) -> None:
        self.streams: dict[str, MemoryStream] = {}
        self.consumers: dict[tuple[str, str], MemoryConsumer] = {}
        self.buckets: dict[str, BucketSpec] = {}
        self._listeners: dict[Callable[[], None], None] = {}  # an ordered set: every run wakes them alike

    def make_stream(self, spec: StreamSpec, now: datetime) -> Mapping[str, Any]:
        """Make it where it is missing; return what is there."""
        stream = self.streams.setdefault(spec.name, MemoryStream(spec, now))
        return stream.spec.config()

    def make_bucket(self, spec: BucketSpec, now: datetime) -> Mapping[str, Any]:
        """Make it, and the stream that it is, where it is missing; return what is there."""
        stream = StreamSpec(
            name=spec.stream,
            subjects=(spec.subject(">"),),
            description=spec.description,
            max_age_seconds=spec.ttl_seconds,
            max_bytes=spec.max_bytes,
            duplicate_window_seconds=min(spec.ttl_seconds, 120),
        )
        self.make_stream(stream, now)
        return self.buckets.setdefault(spec.name, spec).config()

    def make_consumer(self, spec: ConsumerSpec) -> Mapping[str, Any]:
        """Make it where it is missing; return what is there. Raises PermanentError without its stream."""
        key = (spec.stream, spec.durable)
        if key not in self.consumers:
            self.consumers[key] = MemoryConsumer(spec, self.stream(spec.stream), self._advise)
        return self.consumers[key].spec.config()

    def stream(self, name: str) -> MemoryStream:
        """The stream of this name. Raises PermanentError."""
        stream = self.streams.get(name)
        if stream is None:
            raise PermanentError(f"there is no stream {name}; make it with `ensure`")
        return stream

    def store(self, publication: Publication, now: datetime) -> Ack:
        """Store on the stream that takes the subject. Raises StalePlan, PermanentError."""
        stream = self._stream_of(publication.subject)
        if stream is None:
            raise PermanentError(
                f"no stream takes messages on {publication.subject}; declare one, or correct the subject"
            )
        ack = stream.store(publication, now)
        self.tell()
        return ack

    def _stream_of(self, subject: str) -> MemoryStream | None:
        for stream in self.streams.values():
            if any(covers(pattern, subject) for pattern in stream.spec.subjects):
                return stream
        return None

    def _advise(self, publication: Publication, now: datetime) -> None:
        """As on the server, nothing is kept where no stream takes advisories."""
        if self._stream_of(publication.subject) is not None:
            self.store(publication, now)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever there may be something new, until `unlisten`."""
        self._listeners[listener] = None

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Stop calling it."""
        self._listeners.pop(listener, None)

    def tell(self) -> None:
        """Something changed: readers that wait look again."""
        for listener in tuple(self._listeners):
            listener()

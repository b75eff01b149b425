"""A broker in this process: streams, durable consumers, redelivery by the server's rules, without threads or clock.

Every call passes the time. `tests/support/memory_bus.py` implements the bus protocol on it, for tests and the
simulator.
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
from gpu_autoscaler.model.errors import MessageTooLarge, PermanentError, StalePlan


class Stored(msgspec.Struct, frozen=True):
    """A message, and when it expires before its stream's age limit."""

    message: Message
    expires_at: datetime | None


class MemoryStream:
    """One stream: an append-only list that drops its oldest messages."""

    def __init__(self, spec: StreamSpec, created_at: datetime) -> None:
        self.spec = spec
        self.last_sequence = 0
        self._created_at = created_at
        # OrderedDict: finding the first entry of a dict slows down with the number of entries removed before it.
        self._stored: OrderedDict[int, Stored] = OrderedDict()  # by sequence
        self._bytes = 0
        self._last_by_subject: dict[str, int] = {}
        self._ids: OrderedDict[str, tuple[int, datetime]] = OrderedDict()  # by time
        self._duplicate_window = timedelta(seconds=spec.duplicate_window_seconds)
        self._age_max = timedelta(seconds=spec.max_age_seconds)
        self._nothing_expires_before = created_at

    def store(self, publication: Publication, now: datetime) -> Ack:
        """Append the message, or return the sequence of its duplicate. Raises StalePlan, PermanentError."""
        self._refuse_too_large(publication)
        self._expire(now)
        if publication.expected_last_subject_sequence is not None:
            stale = self._stale(publication, publication.expected_last_subject_sequence, now)
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

    def _stale(self, publication: Publication, expected: int, now: datetime) -> Ack | None:
        """The server checks the fence before the id: a duplicate is recognized only as the subject's last message."""
        message = self.last_on(publication.subject, now)
        last = 0 if message is None else message.sequence
        if last == expected:
            return None
        if message is not None and message.message_id == publication.message_id:
            return Ack(stream=self.spec.name, sequence=last, is_duplicate=True)
        raise StalePlan(
            f"{publication.subject}: sequence {expected} is no longer the last one (wrong last sequence: {last}); "
            "fold the newer facts and decide again",
            last_sequence=last,
        )

    def _refuse_too_large(self, publication: Publication) -> None:
        limit = MESSAGE_BYTES_MAX if self.spec.message_bytes_max >= 0 else SERVER_PAYLOAD_BYTES_MAX
        if len(publication.payload) > limit:
            raise MessageTooLarge(
                f"message {publication.message_id!r} on {publication.subject} has {len(publication.payload)} bytes; at "
                f"most {limit} are allowed; split it"
            )

    def _expire(self, now: datetime) -> None:
        """Drop what is too old by now. Most calls find nothing to do, and return at once."""
        if now < self._nothing_expires_before:
            return
        # What is stored from now on expires later than that.
        self._nothing_expires_before = now + min(self._duplicate_window, self._age_max)
        oldest_id = now - self._duplicate_window
        while self._ids:
            message_id, (_, stored_at) = next(iter(self._ids.items()))
            if stored_at > oldest_id:
                self._expect_expiry(stored_at + self._duplicate_window)
                break
            del self._ids[message_id]
        oldest = now - self._age_max
        while self._stored:
            sequence, stored = next(iter(self._stored.items()))
            if stored.message.stored_at > oldest:
                self._expect_expiry(stored.message.stored_at + self._age_max)
                break
            self._drop(sequence)

    def _expect_expiry(self, at: datetime) -> None:
        self._nothing_expires_before = min(self._nothing_expires_before, at)

    def _drop(self, sequence: int) -> None:
        stored = self._stored.pop(sequence)
        self._bytes -= len(stored.message.payload)
        if self._last_by_subject.get(stored.message.subject) == sequence:
            del self._last_by_subject[stored.message.subject]

    def discard(self, subject: str) -> None:
        """Drop every message of the subject, as when all of them are older than the stream's limit."""
        for sequence in [number for number, stored in self._stored.items() if stored.message.subject == subject]:
            self._drop(sequence)

    def span(self, now: datetime) -> StreamSpan:
        """Return identity and range of this stream."""
        self._expire(now)
        return StreamSpan(
            created_at=self._created_at,
            first_sequence=next(iter(self._stored), self.last_sequence + 1),
            last_sequence=self.last_sequence,
            first_stored_at=next((stored.message.stored_at for stored in self._stored.values()), None),
            bytes_count=self._bytes,
            bytes_max=self.spec.max_bytes,
            age_max=self._age_max,
        )

    def at(self, sequence: int, now: datetime) -> Message | None:
        """Return the message at this sequence, unless it aged out."""
        self._expire(now)
        return self._unexpired(sequence, now)

    def _unexpired(self, sequence: int, now: datetime) -> Message | None:
        stored = self._stored.get(sequence)
        if stored is None or (stored.expires_at is not None and stored.expires_at <= now):
            return None
        return stored.message

    def last_on(self, subject: str, now: datetime) -> Message | None:
        """Return the last message on the subject, unless it aged out."""
        return self.at(self._last_by_subject.get(subject, 0), now)

    def after(self, sequence: int, subjects: Sequence[str], now: datetime) -> Iterator[Message]:
        """Yield the messages after this sequence in order; `subjects` filters them, empty means all."""
        self._expire(now)
        first = next(iter(self._stored), self.last_sequence + 1)
        for number in range(max(sequence + 1, first), self.last_sequence + 1):
            message = self._unexpired(number, now)
            if message is not None and (not subjects or any(covers(s, message.subject) for s in subjects)):
                yield message


class _Pending(msgspec.Struct):
    """A message delivered and not yet acknowledged."""

    delivered_count: int
    due_at: datetime  # of the redelivery


class MemoryConsumer:
    """One durable consumer: its position and its unacknowledged messages."""

    def __init__(
        self,
        spec: ConsumerSpec,
        stream: MemoryStream,
        advise: Callable[[Publication, datetime], None],
        after_sequence: int = 0,
    ) -> None:
        self.spec = spec
        self._stream = stream
        self._advise = advise
        self._read_up_to = after_sequence
        self._pending: dict[int, _Pending] = {}

    def deliver(self, count_max: int, now: datetime) -> list[tuple[Message, int]]:
        """Return messages with delivery counts: due redeliveries first, then new ones within `max_ack_pending`."""
        deliveries: list[tuple[Message, int]] = []
        for sequence in sorted(sequence for sequence, pending in self._pending.items() if pending.due_at <= now):
            if len(deliveries) == count_max:
                return deliveries
            message = self._redeliver(sequence, now)
            if message is not None:
                deliveries.append((message, self._pending[sequence].delivered_count))
        for message in self._stream.after(self._read_up_to, self.spec.subjects, now):
            if len(deliveries) == count_max or len(self._pending) >= self.spec.max_ack_pending:
                break
            self._read_up_to = message.sequence
            self._pending[message.sequence] = _Pending(1, self._due(now))
            deliveries.append((message, 1))
        else:
            self._read_up_to = self._stream.last_sequence  # what other consumers handle is looked at once
        return deliveries

    def _redeliver(self, sequence: int, now: datetime) -> Message | None:
        pending = self._pending[sequence]
        message = self._stream.at(sequence, now)
        if message is None or pending.delivered_count >= self.spec.max_deliver:
            del self._pending[sequence]
            if message is not None:
                self._advise_max_deliveries(sequence, pending.delivered_count, now)
            return None
        pending.delivered_count += 1
        pending.due_at = self._due(now)
        return message

    def _advise_max_deliveries(self, sequence: int, deliveries: int, now: datetime) -> None:
        stream, durable = self.spec.stream, self.spec.durable
        advisory = {"stream": stream, "consumer": durable, "stream_seq": sequence, "deliveries": deliveries}
        self._advise(
            Publication(
                subject=f"{ADVISORY_ROOT}.{stream}.{durable}",
                payload=msgspec.json.encode(advisory),
                message_id=f"{stream}/{sequence}/{durable}",
            ),
            now,
        )

    def _due(self, now: datetime) -> datetime:
        return now + timedelta(seconds=self.spec.ack_wait_seconds)

    def complete(self, sequence: int) -> None:
        """Mark as done; also accepted from an earlier delivery than the last."""
        self._pending.pop(sequence, None)

    def postpone(self, sequence: int, due_at: datetime) -> None:
        """Redeliver at `due_at`."""
        pending = self._pending.get(sequence)
        if pending is not None:
            pending.due_at = due_at

    def progress(self, sequence: int, now: datetime) -> None:
        """Restart the ack wait."""
        self.postpone(sequence, self._due(now))

    def next_due_at(self) -> datetime | None:
        """Return the time of the next redelivery."""
        return min((pending.due_at for pending in self._pending.values()), default=None)

    def acknowledged_sequence(self, now: datetime) -> int:
        """Return the sequence up to which every message is acknowledged; the stream's last if none is waiting."""
        if self._pending:
            return min(self._pending) - 1
        return self._read_up_to if self.pending_count(now) else self._stream.last_sequence

    def pending_count(self, now: datetime) -> int:
        """Messages not yet delivered to any process."""
        return sum(1 for _ in self._stream.after(self._read_up_to, self.spec.subjects, now))


class MemoryBroker:
    """The broker that all buses of one process share."""

    def __init__(self) -> None:
        self.streams: dict[str, MemoryStream] = {}
        self.consumers: dict[tuple[str, str], MemoryConsumer] = {}
        self.buckets: dict[str, BucketSpec] = {}
        self._listeners: dict[Callable[[], None], None] = {}  # an ordered set, for the same order on every run

    def make_stream(self, spec: StreamSpec, now: datetime) -> Mapping[str, Any]:
        """Create it if missing; return the existing configuration."""
        stream = self.streams.setdefault(spec.name, MemoryStream(spec, now))
        return stream.spec.config()

    def make_bucket(self, spec: BucketSpec, now: datetime) -> Mapping[str, Any]:
        """Create it and its stream if missing; return the existing configuration."""
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

    def make_consumer(self, spec: ConsumerSpec, now: datetime) -> Mapping[str, Any]:
        """Create it if missing; update its filter if nothing else differs; return the existing configuration.

        Raises PermanentError without its stream.
        """
        key = (spec.stream, spec.durable)
        existing = self.consumers.get(key)
        if existing is None:
            split = None if spec.split_from is None else self.consumers.get((spec.stream, spec.split_from))
            after_sequence = 0 if split is None else split.acknowledged_sequence(now)
            self.consumers[key] = MemoryConsumer(spec, self.stream(spec.stream), self._advise, after_sequence)
        elif all(found.key == "filter_subjects" for found in spec.differences(existing.spec.config())):
            existing.spec = spec
        return self.consumers[key].spec.config()

    def stream(self, name: str) -> MemoryStream:
        """Return the stream of this name. Raises PermanentError when it does not exist."""
        stream = self.streams.get(name)
        if stream is None:
            raise PermanentError(f"stream {name} does not exist; create it with `ensure`")
        return stream

    def store(self, publication: Publication, now: datetime) -> Ack:
        """Store on the stream of the subject. Raises StalePlan, PermanentError."""
        stream = self._stream_of(publication.subject)
        if stream is None:
            raise PermanentError(
                f"no stream stores messages on {publication.subject}; declare one, or correct the subject"
            )
        ack = stream.store(publication, now)
        self.notify()
        return ack

    def _stream_of(self, subject: str) -> MemoryStream | None:
        for stream in self.streams.values():
            if any(covers(pattern, subject) for pattern in stream.spec.subjects):
                return stream
        return None

    def _advise(self, publication: Publication, now: datetime) -> None:
        """Store an advisory; as on the server it is lost without a stream for advisories."""
        if self._stream_of(publication.subject) is not None:
            self.store(publication, now)

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every change, until `remove_listener`."""
        self._listeners[listener] = None

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Stop calling `listener`."""
        self._listeners.pop(listener, None)

    def notify(self) -> None:
        """Wake waiting readers after a change."""
        for listener in tuple(self._listeners):
            listener()

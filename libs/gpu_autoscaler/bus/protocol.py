"""The interface of a bus. There are exactly two ways to consume:

- a *projection* reads whole streams strictly in order, has no effects, and belongs to one process;
- an *effect* consumer is durable, shared by replicas, and acknowledges after the outputs are stored.

Implemented by `bus/nats/bus.py` and `tests/support/memory_bus.py`; both pass `tests/contract/bus`.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Protocol

import msgspec

from gpu_autoscaler.model.errors import ConfigError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def microseconds_of(at: datetime) -> int:
    """Microseconds since 1970 as an exact integer; a float would lose precision."""
    return (at - _EPOCH) // _MICROSECOND


class Ack(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The stream has stored a message, now or earlier."""

    stream: str
    sequence: int
    is_duplicate: bool  # a message with this id was stored before, at `sequence`


class Message(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A stored message."""

    subject: str
    payload: bytes
    message_id: str | None  # Nats-Msg-Id
    stream: str
    sequence: int
    stored_microseconds: int  # since 1970; an integer, as most readers never need the time
    headers: Mapping[str, str] = {}  # without those of the broker (`Nats-...`)

    @property
    def stored_at(self) -> datetime:
        """When the stream stored it, wall time."""
        return _EPOCH + timedelta(0, 0, self.stored_microseconds)


class Publication(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A message to store."""

    subject: str
    payload: bytes
    message_id: str  # equal ids within the duplicate window are stored once
    headers: Mapping[str, str] = {}
    expected_last_subject_sequence: int | None = None


class StreamSpan(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a stream and the range that it stores."""

    created_at: datetime  # identifies the stream: a recreated one starts at sequence 1 again
    first_sequence: int  # of the oldest stored message; `last_sequence` + 1 when none is stored
    last_sequence: int  # 0: never had a message
    first_stored_at: datetime | None = None  # wall time; None: no message is stored
    bytes_count: int = 0
    bytes_max: int = -1  # -1: unlimited
    age_max: timedelta = timedelta.max  # `timedelta.max`: unlimited

    @property
    def is_half_full(self) -> bool:
        """True when at least half of the allowed bytes are stored: the oldest messages are discarded one day."""
        return self.bytes_max >= 0 and 2 * self.bytes_count >= self.bytes_max

    def is_half_old(self, now: datetime) -> bool:
        """True when the oldest message has used up at least half of the allowed age. `now`: wall time."""
        return self.first_stored_at is not None and now - self.first_stored_at >= self.age_max / 2


def refuse_gap(stream: str, read_up_to: int, first_sequence: int) -> None:
    """Raise ConfigError when messages behind the last read one were discarded before they were read. 0: none was read.

    The next start notices it too, refuses its snapshot and reads what the stream has: everything alive is in it.
    """
    if 0 < read_up_to < first_sequence - 1:
        error = (
            f"stream {stream} has discarded messages {read_up_to + 1} to {first_sequence - 1} before they were read; "
            "restart the process, which rebuilds its state"
        )
        raise ConfigError("broker", [error])


class Delivery(Protocol):
    """A message handed to an effect consumer.

    Exactly one of ack, nak and term ends it; otherwise it is delivered again after `ack_wait`.
    """

    @property
    def message(self) -> Message:
        """The message."""

    @property
    def delivered_count(self) -> int:
        """1 at the first delivery."""

    async def ack(self) -> None:
        """Confirm that the work is done and its outputs are stored. Returns when the server confirmed."""

    async def nak(self, delay_seconds: float) -> None:
        """Request redelivery, not before `delay_seconds` of wall time."""

    async def term(self, reason: str) -> None:
        """Terminate: never deliver again. The caller has stored a dead letter before."""

    async def in_progress(self) -> None:
        """Extend the `ack_wait`: the work continues."""


class EffectConsumer(Protocol):
    """This process's subscription to a durable consumer."""

    async def fetch(self, count_max: int, wait_seconds_max: float) -> Sequence[Delivery]:
        """Return up to `count_max` deliveries; none when the wait ends.

        Raises TransientError when the broker is away or the consumer was recreated, ConfigError when its stream was
        deleted.
        """

    async def pending_count(self) -> int:
        """Messages not yet delivered to any process (the lag)."""

    async def acknowledged_sequence(self) -> int:
        """Return the sequence up to which every message is acknowledged; the stream's last if none is waiting.

        Raises as `fetch` does.
        """

    async def close(self) -> None:
        """Return unfetched messages to the broker. Bounded in time; never raises for a broker that is away."""


class Projection(Protocol):
    """An ordered read of whole streams from a given sequence, without gaps or repeats."""

    def __aiter__(self) -> AsyncIterator[Sequence[Message]]:
        """Batches in stream order. After a restart of the broker the read continues behind the last batch."""

    async def lag_count(self) -> int:
        """Messages that are stored but not yet returned; zero means caught up at the time of the call."""

    async def close(self) -> None:
        """Stop reading."""


class Bus(Protocol):
    """Publishes and reads facts. Adapters inherit the common parts."""

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        message_id: str,
        expected_last_subject_sequence: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Ack:
        """Store a message; return when the stream has it. A time-out is retried with the same id, within a limit.

        Raises StalePlan when the subject's last sequence is not the expected one, TransientError when the broker
        stays away past the limit, PermanentError when it can never store the message (too large, no such stream),
        ConfigError when the declared stream was deleted.
        """
        publication = Publication(
            subject=subject,
            payload=payload,
            message_id=message_id,
            headers=headers or {},
            expected_last_subject_sequence=expected_last_subject_sequence,
        )
        return (await self.publish_many([publication]))[0]

    async def publish_many(self, publications: Sequence[Publication]) -> Sequence[Ack]:
        """Store messages without waiting for each; return when all are stored, with acks in the given order.

        They are stored in that order, except that messages lost with a connection are stored later. Raises as `publish`
        does; messages already stored remain, so the caller repeats the whole call with the same ids.
        """

    async def effect_consumer(self, durable: str) -> EffectConsumer:
        """Bind to a declared durable consumer. Raises ConfigError when it is missing or differs."""

    async def projection(self, stream: str, *, subjects: Sequence[str] = (), after_sequence: int = 0) -> Projection:
        """Read a stream from the message after `after_sequence`; `subjects` narrows it (empty: all of it)."""

    async def span(self, stream: str) -> StreamSpan:
        """Return identity and range of a stream. Raises PermanentError when it does not exist."""

    async def last_sequence(self, stream: str) -> int:
        """Return the last stored sequence of the stream, 0 when it never had one. Raises as `span` does."""
        return (await self.span(stream)).last_sequence

    async def message_at(self, stream: str, sequence: int) -> Message | None:
        """Return the message at this sequence; None when it aged out or never existed."""

    async def last_message(self, stream: str, subject: str) -> Message | None:
        """Return the stream's last message on the subject, None without one. Raises as `span` does."""

    async def ensure(self) -> None:
        """Create what is declared (`bus/streams.py`) and missing. Raises ConfigError with each refused difference."""

    @property
    def is_connected(self) -> bool:
        """True while the broker answers, as far as known."""

    @property
    def failure(self) -> str | None:
        """Why the broker does not work now, connected or not; None while it works, as far as known."""
        return None if self.is_connected else "broker does not answer; reconnecting"

    async def close(self) -> None:
        """Flush pending messages and disconnect. Bounded in time."""

"""What a bus does, for its users. Two ways of consuming, no third:

- a *projection* reads whole streams strictly in order, has no effects, and belongs to one process;
- an *effect* consumer is durable, shared by replicas, and acknowledges after the outputs are stored.

Implemented by `bus/nats.py` and `bus/memory.py`; both pass `tests/contract/bus`.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Protocol

import msgspec

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def microseconds_of(at: datetime) -> int:
    """Since 1970, exactly: a float of this size would be off by some."""
    return (at - _EPOCH) // _MICROSECOND


class Ack(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The stream has stored a message, now or earlier."""

    stream: str
    sequence: int
    is_duplicate: bool  # an earlier message with this id was stored; `sequence` is that one's


class Message(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A stored message as it was sent."""

    subject: str
    payload: bytes
    message_id: str | None  # Nats-Msg-Id
    stream: str
    sequence: int
    stored_microseconds: int  # since 1970; of millions of messages nobody asks when they were stored
    headers: Mapping[str, str] = {}  # the sender's own; the broker's (`Nats-...`) are fields or gone

    @property
    def stored_at(self) -> datetime:
        """When the stream took it, wall time."""
        return _EPOCH + timedelta(0, 0, self.stored_microseconds)


class Publication(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A message that is to be stored."""

    subject: str
    payload: bytes
    message_id: str  # equal ids within the duplicate window are stored once
    headers: Mapping[str, str] = {}
    expected_last_subject_sequence: int | None = None


class StreamSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Which stream this is, and what it still has."""

    created_at: datetime  # a stream that was made anew counts from 1 again: another instant tells it from this one
    first_sequence: int  # what came before is no longer kept; one above the last where nothing is kept
    last_sequence: int  # 0: it never had a message


class Delivery(Protocol):
    """A message handed to an effect consumer.

    Exactly one of ack, nak and term ends it; else it comes again after `ack_wait`.
    """

    @property
    def message(self) -> Message:
        """The message."""
        ...

    @property
    def delivered_count(self) -> int:
        """1 at the first delivery."""
        ...

    async def ack(self) -> None:
        """Confirm: the work is done and its outputs are stored. Returns when the server has it."""
        ...

    async def nak(self, delay_seconds: float) -> None:
        """Ask for another delivery, not before `delay_seconds` of wall time."""
        ...

    async def term(self, reason: str) -> None:
        """Give up: never deliver again. The caller has put the message aside before."""
        ...

    async def in_progress(self) -> None:
        """Ask for another `ack_wait`: the work goes on."""
        ...


class EffectConsumer(Protocol):
    """A durable consumer's hand in this process."""

    async def fetch(self, count_max: int, wait_seconds_max: float) -> Sequence[Delivery]:
        """Return up to `count_max` deliveries, none after waiting.

        Raises TransientError when the broker is away or the consumer had to be made again, ConfigError when its stream
        is gone.
        """
        ...

    async def pending_count(self) -> int:
        """Messages not yet delivered to anybody (the lag)."""
        ...

    async def close(self) -> None:
        """Give back what arrived and was not fetched. Bounded in time; never raises for a broker that is away."""
        ...


class Projection(Protocol):
    """An ordered read of whole streams, from where it was told to start, without gaps or repeats."""

    def __aiter__(self) -> AsyncIterator[Sequence[Message]]:
        """Batches in stream order. Survives the broker's restarts by going on after the last sequence it gave."""
        ...

    async def lag_count(self) -> int:
        """Messages that are stored but not given yet; zero means caught up at the time of asking."""
        ...

    async def close(self) -> None:
        """Stop reading."""
        ...


class Bus(Protocol):
    """The way facts travel. Adapters inherit it, for what is the same in all."""

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        message_id: str,
        expected_last_subject_sequence: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Ack:
        """Store a message; returns when the stream has it. A time-out is retried with the same id, within a limit.

        Raises StalePlan when the subject's last sequence is not the expected one, TransientError when the broker
        stays away past the limit, PermanentError when it never will take the message (too large, no such stream),
        ConfigError when the stream that was declared for it is gone.
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
        """Store messages without waiting for each; returns when the streams have all of them, acks in the order given.

        They are stored in that order, except that those which the broker missed while it went away come later.
        Raises as `publish` does; what was stored by then stays, so the caller repeats the whole with the same ids.
        """
        ...

    async def effect_consumer(self, durable: str) -> EffectConsumer:
        """Bind to a declared durable consumer. Raises ConfigError when it is missing or drifted."""
        ...

    async def projection(self, stream: str, *, subjects: Sequence[str] = (), after_sequence: int = 0) -> Projection:
        """Read a stream from the message after `after_sequence`; `subjects` narrows it (empty: all of it)."""
        ...

    async def span(self, stream: str) -> StreamSpan:
        """Return which stream this is and what it has. Raises PermanentError when there is none of this name."""
        ...

    async def last_sequence(self, stream: str) -> int:
        """Return the last stored sequence of the stream, 0 when it never had one. Raises as `span` does."""
        return (await self.span(stream)).last_sequence

    async def message_at(self, stream: str, sequence: int) -> Message | None:
        """Return the message at this sequence; None when it has aged out or never was."""
        ...

    async def last_message(self, stream: str, subject: str) -> Message | None:
        """Return the stream's last message on the subject, None where it has none. Raises as `span` does."""
        ...

    async def ensure(self) -> None:
        """Make what is declared (`bus/streams.py`) and missing. Raises ConfigError with both values of each drift."""
        ...

    @property
    def is_connected(self) -> bool:
        """True while the broker answers, as far as is known."""
        ...

    @property
    def trouble(self) -> str | None:
        """Why the broker does not do its work now, connected or not; None while it does, as far as is known."""
        return None if self.is_connected else "the broker does not answer; trying again"

    async def close(self) -> None:
        """Flush what is under way and leave. Bounded in time."""
        ...

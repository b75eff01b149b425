"""Dead letters: messages that cannot be handled are set aside, listed and resubmitted. Works on any bus.

A dead letter is the original payload on `dead.<service>`, with headers for its origin and the reason. A mark on
`dead.<service>.resubmitted` records a resubmission. Letters and marks are removed only by age.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from urllib.parse import quote, unquote

import msgspec

from gpu_autoscaler.bus.protocol import Ack, Bus, EffectConsumer, Message, microseconds_of
from gpu_autoscaler.bus.streams import DEAD, MAX_DELIVERIES_CONSUMER
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import derive_id

OUR_PREFIX = "Dead-"
SUBJECT = "Dead-Subject"
STREAM = "Dead-Stream"
SEQUENCE = "Dead-Sequence"
MESSAGE_ID = "Dead-Message-Id"
REASON = "Dead-Reason"
ERROR_KIND = "Dead-Error-Kind"
DELIVERED = "Dead-Delivered"
AT = "Dead-At"
LETTER = "Dead-Letter"  # on a mark: sequence of the letter
# On a resubmitted message: a bare body without an envelope keeps the identity of the original message.
ORIGINAL_ID = "Original-Message-Id"

REASON_CHARACTERS_MAX = 2000
PAGE_COUNT_MAX = 1000
_READABLE = " !#$&'()*+,-./:;<=>?@[]^_`{|}~\""  # all of ASCII but the percent sign itself


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was set aside."""

    sequence: int  # in DEAD; identifies the letter
    service: str  # that set it aside
    subject: str  # of the message
    stream: str
    stream_sequence: int
    message_id: str | None
    reason: str
    error_kind: str
    delivered_count: int
    at: datetime
    payload: bytes
    headers: Mapping[str, str] = {}  # the message's own
    resubmitted_count: int = 0

    @property
    def is_empty(self) -> bool:
        """True when the message aged out before it was set aside; only stream and sequence are known."""
        return not self.payload and self.message_id is None


class Resubmitted(msgspec.Struct, frozen=True, kw_only=True):
    """A resubmitted letter, and the acknowledgment of the stream."""

    letter: DeadLetter
    ack: Ack


class MaxDeliveriesAdvisory(msgspec.Struct, frozen=True):
    """The server's advisory that it no longer delivers a message to a consumer.

    Source: NATS documentation, "JetStream / Monitoring / Advisories" (read 2026-11-21).
    """

    stream: str
    consumer: str
    stream_seq: int
    deliveries: int


class DeadLetters:
    """The dead letters of one broker."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._consumer: EffectConsumer | None = None

    async def set_aside(
        self, message: Message, *, service: str, reason: str, error_kind: str, delivered_count: int, at: datetime
    ) -> Ack:
        """Store the message with its reason; a repetition for the same service stores nothing.

        Terminate the delivery only after this has returned. Raises TransientError as `Bus.publish` does.
        """
        headers = {
            SUBJECT: _escape(message.subject),
            STREAM: message.stream,
            SEQUENCE: str(message.sequence),
            REASON: _escape(reason[:REASON_CHARACTERS_MAX]),
            ERROR_KIND: _escape(error_kind),
            DELIVERED: str(delivered_count),
            AT: at.isoformat(),
        }
        if message.message_id is not None:
            headers[MESSAGE_ID] = _escape(message.message_id)
        return await self._bus.publish(
            f"dead.{service}",
            message.payload,
            message_id=f"dead/{message.stream}/{message.sequence}/{service}",
            headers={**_sender_headers(message.headers), **headers},
        )

    async def page(self, *, after_sequence: int = 0, count_max: int = 100) -> Sequence[DeadLetter]:
        """Return letters in the order they were set aside; the last sequence is the start of the next page."""
        count_max = min(count_max, PAGE_COUNT_MAX)
        letters: dict[int, DeadLetter] = {}
        async for message in self._read(after_sequence):
            letter = message.headers.get(LETTER)
            if letter is None:
                if len(letters) < count_max:
                    letters[message.sequence] = _letter(message)
            elif int(letter) in letters:
                marked = letters[int(letter)]
                letters[int(letter)] = msgspec.structs.replace(marked, resubmitted_count=marked.resubmitted_count + 1)
        return list(letters.values())

    async def positions(self, service: str) -> frozenset[tuple[str, int]]:
        """Return stream and sequence of every message that this service set aside."""
        positions: set[tuple[str, int]] = set()
        async for message in self._read(0):
            if message.subject == f"dead.{service}":
                positions.add((message.headers.get(STREAM, ""), int(message.headers.get(SEQUENCE, "0"))))
        return frozenset(positions)

    async def resubmit(self, sequence: int, *, at: datetime) -> Resubmitted:
        """Publish one letter's message again on its subject. Raises PermanentError when there is no such letter.

        Its id is derived from the letter and the number of resubmissions: it is no duplicate of the original message,
        while a retry after a crash is a duplicate of the first attempt.
        """
        page = await self.page(after_sequence=sequence - 1, count_max=1)
        if not page or page[0].sequence != sequence:
            raise PermanentError(f"dead letter {sequence} not found; list them with: gpu-autoscaler dead-letters list")
        if page[0].is_empty:
            raise PermanentError(f"dead letter {sequence} has no message to resubmit: {page[0].reason}")
        return await self._resubmit(page[0], at)

    async def resubmit_all(self, *, at: datetime, service: str | None = None) -> Sequence[Resubmitted]:
        """Resubmit every letter not resubmitted before (of one service, or of all), except those stored meanwhile."""
        last_sequence = await self._bus.last_sequence(DEAD)
        after_sequence = 0
        resubmitted: list[Resubmitted] = []
        while page := await self.page(after_sequence=after_sequence, count_max=PAGE_COUNT_MAX):
            for letter in page:
                if letter.sequence > last_sequence:
                    return resubmitted
                if not letter.resubmitted_count and not letter.is_empty and service in (None, letter.service):
                    resubmitted.append(await self._resubmit(letter, at))
            after_sequence = page[-1].sequence
        return resubmitted

    async def collect_max_deliveries(
        self, *, at: datetime, wait_seconds_max: float = 1.0
    ) -> Sequence[MaxDeliveriesAdvisory]:
        """Store dead letters for messages that the server stopped delivering; return their advisories.

        Needs the consumer `MAX_DELIVERIES_CONSUMER` among the declared ones. A message that aged out meanwhile leaves a
        letter with an empty payload, so that the loss is recorded. An invalid advisory is set aside too.
        """
        if self._consumer is None:
            self._consumer = await self._bus.effect_consumer(MAX_DELIVERIES_CONSUMER.durable)
        deliveries = await self._consumer.fetch(PAGE_COUNT_MAX // 10, wait_seconds_max)
        advisories = []
        for delivery in deliveries:
            try:
                advisory = msgspec.json.decode(delivery.message.payload, type=MaxDeliveriesAdvisory)
                message = await self._bus.message_at(advisory.stream, advisory.stream_seq)
            except (msgspec.MsgspecError, PermanentError) as exc:  # not sent by the server, or of a deleted stream
                await self.set_aside(
                    delivery.message,
                    service=MAX_DELIVERIES_CONSUMER.durable.partition("-")[0],
                    reason=f"invalid MAX_DELIVERIES advisory: {exc}",
                    error_kind=type(exc).__name__,
                    delivered_count=delivery.delivered_count,
                    at=at,
                )
                await delivery.ack()
                continue
            reason = f"delivered {advisory.deliveries} times to consumer {advisory.consumer} without success"
            if message is None:
                reason += "; the message has aged out of its stream"
            await self.set_aside(
                message or _aged_out(advisory, delivery.message.stored_at),
                service=advisory.consumer.partition("-")[0],
                reason=reason,
                error_kind="MaxDeliveries",
                delivered_count=advisory.deliveries,
                at=at,
            )
            await delivery.ack()
            advisories.append(advisory)
        return advisories

    async def _resubmit(self, letter: DeadLetter, at: datetime) -> Resubmitted:
        number = letter.resubmitted_count + 1
        headers = dict(letter.headers)
        if letter.message_id is not None:
            headers.setdefault(ORIGINAL_ID, letter.message_id)
        ack = await self._bus.publish(
            letter.subject,
            letter.payload,
            message_id=derive_id("dead letter", letter.stream, letter.stream_sequence, letter.service, number),
            headers=headers,
        )
        await self._bus.publish(
            f"dead.{letter.service}.resubmitted",
            b"",
            message_id=f"dead/{letter.sequence}/resubmitted/{number}",
            headers={LETTER: str(letter.sequence), AT: at.isoformat(), STREAM: ack.stream, SEQUENCE: str(ack.sequence)},
        )
        return Resubmitted(letter=letter, ack=ack)

    async def _read(self, after_sequence: int) -> AsyncIterator[Message]:
        """Yield the messages of DEAD after this sequence that are stored now."""
        if after_sequence >= await self._bus.last_sequence(DEAD):
            return
        projection = await self._bus.projection(DEAD, after_sequence=after_sequence)
        try:
            if not await projection.lag_count():
                return
            async for batch in projection:
                for message in batch:
                    yield message
                if not await projection.lag_count():
                    return
        finally:
            await projection.close()


def _aged_out(advisory: MaxDeliveriesAdvisory, at: datetime) -> Message:
    return Message(
        subject=f"{advisory.stream.lower()}.aged_out",
        payload=b"",
        message_id=None,
        stream=advisory.stream,
        sequence=advisory.stream_seq,
        stored_microseconds=microseconds_of(at),
    )


def _letter(message: Message) -> DeadLetter:
    headers = message.headers
    message_id = headers.get(MESSAGE_ID)
    return DeadLetter(
        sequence=message.sequence,
        service=message.subject.partition(".")[2],
        subject=unquote(headers.get(SUBJECT, "")),
        stream=headers.get(STREAM, ""),
        stream_sequence=int(headers.get(SEQUENCE, "0")),
        message_id=None if message_id is None else unquote(message_id),
        reason=unquote(headers.get(REASON, "")),
        error_kind=unquote(headers.get(ERROR_KIND, "")),
        delivered_count=int(headers.get(DELIVERED, "0")),
        at=datetime.fromisoformat(headers[AT]) if AT in headers else message.stored_at,
        payload=message.payload,
        headers=_sender_headers(headers),
    )


def _sender_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers without those with our prefix: a sender's could make a letter look like a mark."""
    return {key: value for key, value in headers.items() if not key.startswith(OUR_PREFIX)}


def _escape(value: str) -> str:
    """Return one readable line of ASCII that `unquote` decodes without loss."""
    return quote(value, safe=_READABLE)

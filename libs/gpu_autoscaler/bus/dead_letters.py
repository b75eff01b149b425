"""Messages that cannot be handled: set aside with the reason, listed, sent again. Works on any bus.

A dead letter is the original payload on `dead.<service>` with headers that say where it came from and why it is here.
A mark on `dead.<service>.resubmitted` says that it was sent again. Nothing is ever removed but by age.
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
# On a message that was sent again: an event without an envelope takes its identity from the first id.
ORIGINAL_ID = "Original-Message-Id"

REASON_CHARACTERS_MAX = 2000
PAGE_COUNT_MAX = 1000
_READABLE = " !#$&'()*+,-./:;<=>?@[]^_`{|}~\""  # all of ASCII but the percent sign itself


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was set aside."""

    sequence: int  # in DEAD; names the letter
    service: str  # who set it aside
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
        """True when the message had aged out before it could be set aside; only its place is known."""
        return not self.payload and self.message_id is None


class Resubmitted(msgspec.Struct, frozen=True, kw_only=True):
    """A letter that was sent again, and where the stream put it."""

    letter: DeadLetter
    ack: Ack


class MaxDeliveriesAdvisory(msgspec.Struct, frozen=True):
    """The server's word that it no longer delivers a message to a consumer.

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
        self._given_up: EffectConsumer | None = None

    async def set_aside(
        self, message: Message, *, service: str, reason: str, error_kind: str, delivered_count: int, at: datetime
    ) -> Ack:
        """Store the message with its reason; a repeat for the same service stores nothing new.

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
            headers={**_senders_own(message.headers), **headers},
        )

    async def page(self, *, after_sequence: int = 0, count_max: int = 100) -> Sequence[DeadLetter]:
        """Letters in the order they were set aside; the last one's sequence is where the next page goes on."""
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

    async def places(self, service: str) -> frozenset[tuple[str, int]]:
        """Stream and sequence of every message that was set aside in this name."""
        found: set[tuple[str, int]] = set()
        async for message in self._read(0):
            if message.subject == f"dead.{service}":
                found.add((message.headers.get(STREAM, ""), int(message.headers.get(SEQUENCE, "0"))))
        return frozenset(found)

    async def resubmit(self, sequence: int, *, at: datetime) -> Resubmitted:
        """Send one letter's message again on its own subject. Raises PermanentError when there is no such letter.

        Its id is derived from the letter and how often it was sent, so it is not taken for a repeat of the original,
        while a second try after a crash is taken for a repeat of the first.
        """
        page = await self.page(after_sequence=sequence - 1, count_max=1)
        if not page or page[0].sequence != sequence:
            raise PermanentError(f"there is no dead letter {sequence}; list them to see which there are")
        if page[0].is_empty:
            raise PermanentError(f"dead letter {sequence} has no message left to send: {page[0].reason}")
        return await self._send_again(page[0], at)

    async def resubmit_all(self, *, at: datetime, service: str | None = None) -> Sequence[Resubmitted]:
        """Send every letter again that was not yet (of one service, or of all); those that arrive meanwhile stay."""
        last_sequence = await self._bus.last_sequence(DEAD)
        after_sequence = 0
        sent: list[Resubmitted] = []
        while page := await self.page(after_sequence=after_sequence, count_max=PAGE_COUNT_MAX):
            for letter in page:
                if letter.sequence > last_sequence:
                    return sent
                if not letter.resubmitted_count and not letter.is_empty and service in (None, letter.service):
                    sent.append(await self._send_again(letter, at))
            after_sequence = page[-1].sequence
        return sent

    async def collect_max_deliveries(self, *, at: datetime, wait_seconds_max: float = 1.0) -> Sequence[MaxDeliveriesAdvisory]:
        """Make dead letters of messages that the server stopped delivering; returns which those were.

        Needs the consumer `MAX_DELIVERIES_CONSUMER` among the declared ones. A message that has aged out meanwhile still leaves a
        letter, with an empty payload: that something was lost is said. A word that names no message is set aside too.
        """
        if self._given_up is None:
            self._given_up = await self._bus.effect_consumer(MAX_DELIVERIES_CONSUMER.durable)
        deliveries = await self._given_up.fetch(PAGE_COUNT_MAX // 10, wait_seconds_max)
        given_up = []
        for delivery in deliveries:
            try:
                advice = msgspec.json.decode(delivery.message.payload, type=MaxDeliveriesAdvisory)
                message = await self._bus.message_at(advice.stream, advice.stream_seq)
            except (msgspec.MsgspecError, PermanentError) as exc:  # not of the server, or of a stream that is gone
                await self.set_aside(
                    delivery.message,
                    service=MAX_DELIVERIES_CONSUMER.durable.partition("-")[0],
                    reason=f"names no message that was given up: {exc}",
                    error_kind=type(exc).__name__,
                    delivered_count=delivery.delivered_count,
                    at=at,
                )
                await delivery.ack()
                continue
            reason = f"consumer {advice.consumer} was given it {advice.deliveries} times without an end"
            if message is None:
                reason += "; the message itself has aged out of its stream"
            await self.set_aside(
                message or _aged_out(advice, delivery.message.stored_at),
                service=advice.consumer.partition("-")[0],
                reason=reason,
                error_kind="MaxDeliveries",
                delivered_count=advice.deliveries,
                at=at,
            )
            await delivery.ack()
            given_up.append(advice)
        return given_up

    async def _send_again(self, letter: DeadLetter, at: datetime) -> Resubmitted:
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
        """Everything of DEAD after this sequence that is stored now."""
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


def _aged_out(advice: MaxDeliveriesAdvisory, at: datetime) -> Message:
    return Message(
        subject=f"{advice.stream.lower()}.aged_out",
        payload=b"",
        message_id=None,
        stream=advice.stream,
        sequence=advice.stream_seq,
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
        headers=_senders_own(headers),
    )


def _senders_own(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers without those that are ours: a sender's under such a name would make its letter look like a mark."""
    return {key: value for key, value in headers.items() if not key.startswith(OUR_PREFIX)}


def _escape(value: str) -> str:
    """One line of ASCII, read by people as it is, by `unquote` without loss."""
    return quote(value, safe=_READABLE)

"""Decodes messages of the server: deliveries with their stream sequence, and single stored messages."""

import base64
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType

import msgspec

from gpu_autoscaler.bus.nats.link import ApiError, NatsLink
from gpu_autoscaler.bus.nats.wire import Frame, parse_headers
from gpu_autoscaler.bus.protocol import Message, microseconds_of
from gpu_autoscaler.model.errors import PermanentError

NO_MESSAGE = 10037
NO_STREAM = 10059
MESSAGE_ID = "Nats-Msg-Id"
LAST_SENT = "Nats-Last-Consumer"
BROKER_PREFIX = "Nats-"
_ID_FIRST = f"NATS/1.0\r\n{MESSAGE_ID}:".encode()
_NOTHING: Mapping[str, str] = MappingProxyType({})
_WORDS_COUNT = 9  # of an acknowledgment subject without a domain


class DeliveryMetadata(msgspec.Struct, frozen=True, gc=False):
    """The metadata of a delivery, from its acknowledgment subject."""

    stream: str
    delivered_count: int
    sequence: int  # in the stream
    consumer_sequence: int  # 1, 2, 3 ... of this consumer's deliveries
    stored_microseconds: int


def parse_ack_subject(reply: bytes) -> DeliveryMetadata:
    """Read `$JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<number>.<time>.<pending>`.

    With a domain, `<domain>.<account>` come before the stream and a token at the end.
    Source: NATS ADR-15, "JetStream Subscribe Workflow" (read 2026-11-21).
    """
    words = reply.split(b".")
    if len(words) > _WORDS_COUNT:
        words = words[2:11]
    _, _, stream, _, delivered_count, sequence, number, stored_nanoseconds, _ = words
    # Whole microseconds, rounded as msgspec rounds them in JSON.
    microseconds = (int(stored_nanoseconds) + 500) // 1000
    return DeliveryMetadata(stream.decode(), int(delivered_count), int(sequence), int(number), microseconds)


def read_delivery(received: Frame, stream: str) -> tuple[int, Message]:
    """Return consumer sequence and message of a delivery. The fast path for long reads, equal to `parse_ack_subject`
    and `message`."""
    words = received.reply.split(b".")
    if len(words) != _WORDS_COUNT:
        at = parse_ack_subject(received.reply)
        return at.consumer_sequence, message(received, at)
    return int(words[6]), _message(received, stream, int(words[5]), (int(words[7]) + 500) // 1000)


def message(received: Frame, at: DeliveryMetadata) -> Message:
    """Return the delivery as a stored message."""
    return _message(received, at.stream, at.sequence, at.stored_microseconds)


def _message(received: Frame, stream: str, sequence: int, stored_microseconds: int) -> Message:
    headers = received.headers
    if headers.startswith(_ID_FIRST) and headers.find(b"\r\n", len(_ID_FIRST)) == len(headers) - 4:
        # Only the id, as in nearly all messages.
        message_id: str | None = headers[len(_ID_FIRST) : -4].strip().decode("utf-8", "replace")
        own: Mapping[str, str] = _NOTHING
    else:
        parsed = parse_headers(headers)
        message_id, own = parsed.get(MESSAGE_ID), _sender_headers(parsed)
    return Message(
        subject=received.subject.decode(),
        payload=received.payload,
        message_id=message_id,
        stream=stream,
        sequence=sequence,
        stored_microseconds=stored_microseconds,
        headers=own,
    )


def sent_count(heartbeat: Frame) -> int:
    """Return the consumer's count of sent messages. Source: nats-server 2.15, as seen on the wire (2026-11-21)."""
    return int(parse_headers(heartbeat.headers).get(LAST_SENT, 0))


def _sender_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in headers.items() if not key.startswith(BROKER_PREFIX)}


class _Raw(msgspec.Struct):
    subject: str
    seq: int
    time: datetime
    data: bytes = b""  # base64 in JSON, which msgspec reads as bytes
    hdrs: str = ""


async def stored_message(
    link: NatsLink, stream: str, *, sequence: int | None = None, last_on: str | None = None
) -> Message | None:
    """Return the message at `sequence`, or the last one on the subject `last_on`; None without one.

    Read from the stream's leader, as a replica may lag: None means that it never existed or aged out.
    """
    body = {"seq": sequence} if last_on is None else {"last_by_subj": last_on}
    try:
        answer = await link.call(f"STREAM.MSG.GET.{stream}", body)
    except ApiError as exc:
        if exc.error_code == NO_MESSAGE:
            return None
        if exc.error_code == NO_STREAM:
            raise PermanentError(f"stream {stream} does not exist; create it with `ensure`") from exc
        raise PermanentError(f"reading stream {stream} refused by the broker: {exc}") from exc
    raw = msgspec.convert(answer["message"], _Raw)
    headers = parse_headers(base64.b64decode(raw.hdrs))
    return Message(
        subject=raw.subject,
        payload=raw.data,
        message_id=headers.get(MESSAGE_ID),
        stream=stream,
        sequence=raw.seq,
        stored_microseconds=microseconds_of(raw.time),
        headers=_sender_headers(headers),
    )

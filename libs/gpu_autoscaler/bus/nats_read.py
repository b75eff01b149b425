"""From what the server sends to `Message`: deliveries with their place in the stream, and single stored messages."""

import base64
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType

import msgspec

from gpu_autoscaler.bus.nats_link import ApiError, NatsLink
from gpu_autoscaler.bus.nats_wire import Frame
from gpu_autoscaler.bus.protocol import Message, microseconds_of
from gpu_autoscaler.model.errors import PermanentError

NO_MESSAGE = 10037
NO_STREAM = 10059
MESSAGE_ID = "Nats-Msg-Id"
LAST_SENT = "Nats-Last-Consumer"
BROKER_PREFIX = "Nats-"
_ID_FIRST = f"NATS/1.0\r\n{MESSAGE_ID}:".encode()
_NOTHING: Mapping[str, str] = MappingProxyType({})
_WORDS_COUNT = 9  # of an acknowledgement subject without a domain


class Place(msgspec.Struct, frozen=True, gc=False):
    """What the acknowledgement subject of a delivery says about it."""

    stream: str
    delivered_count: int
    sequence: int  # in the stream
    consumer_sequence: int  # 1, 2, 3 ... of what this consumer was sent
    stored_microseconds: int


def place(reply: bytes) -> Place:
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
    return Place(stream.decode(), int(delivered_count), int(sequence), int(number), microseconds)


def delivered(received: Frame, stream: str) -> tuple[int, Message]:
    """The consumer's own count, and the message, of a delivery of this stream. As `place` and `message`, in one go:
    it is done for each of the millions of messages of a long read."""
    words = received.reply.split(b".")
    if len(words) != _WORDS_COUNT:
        at = place(received.reply)
        return at.consumer_sequence, message(received, at)
    return int(words[6]), _message(received, stream, int(words[5]), (int(words[7]) + 500) // 1000)


def message(received: Frame, at: Place) -> Message:
    """The delivery as the message that was stored."""
    return _message(received, at.stream, at.sequence, at.stored_microseconds)


def _message(received: Frame, stream: str, sequence: int, stored_microseconds: int) -> Message:
    headers = received.headers
    if headers.startswith(_ID_FIRST) and headers.find(b"\r\n", len(_ID_FIRST)) == len(headers) - 4:
        # Nothing but the id, as nearly all messages are.
        message_id: str | None = headers[len(_ID_FIRST) : -4].strip().decode("utf-8", "replace")
        own: Mapping[str, str] = _NOTHING
    else:
        parsed = _parse_headers(headers)
        message_id, own = parsed.get(MESSAGE_ID), _senders_own(parsed)
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
    """How many messages the consumer has sent so far. Source: nats-server 2.15, as seen on the wire (2026-11-21)."""
    return int(_parse_headers(heartbeat.headers).get(LAST_SENT, 0))


def _senders_own(headers: Mapping[str, str]) -> dict[str, str]:
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
    """The message at `sequence`, or the last one on the subject `last_on`; None where there is none.

    Asked of the stream's leader: a replica may not have it yet, and None means that it never was or has aged out.
    """
    body = {"seq": sequence} if last_on is None else {"last_by_subj": last_on}
    try:
        answer = await link.call(f"STREAM.MSG.GET.{stream}", body)
    except ApiError as exc:
        if exc.error_code == NO_MESSAGE:
            return None
        if exc.error_code == NO_STREAM:
            raise PermanentError(f"there is no stream {stream}; make it with `ensure`") from exc
        raise PermanentError(f"the broker refuses to read stream {stream}: {exc}") from exc
    raw = msgspec.convert(answer["message"], _Raw)
    headers = _parse_headers(base64.b64decode(raw.hdrs))
    return Message(
        subject=raw.subject,
        payload=raw.data,
        message_id=headers.get(MESSAGE_ID),
        stream=stream,
        sequence=raw.seq,
        stored_microseconds=microseconds_of(raw.time),
        headers=_senders_own(headers),
    )


def _parse_headers(block: bytes) -> dict[str, str]:
    """Read `NATS/1.0`, then a `Key: value` a line. Source: NATS ADR-4, "Message Headers" (read 2026-11-21)."""
    headers = {}
    for line in block.split(b"\r\n")[1:]:
        name, separator, value = line.partition(b":")
        if separator:
            headers[name.strip().decode("ascii", "replace")] = value.strip().decode("utf-8", "replace")
    return headers

"""From what the server sends to `Message`: deliveries with their place in the stream, and single stored messages."""

import base64
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache

import msgspec

from gpu_autoscaler.bus.nats_link import ApiError, NatsLink
from gpu_autoscaler.bus.nats_wire import Frame
from gpu_autoscaler.bus.protocol import Message
from gpu_autoscaler.model.errors import PermanentError

NO_MESSAGE = 10037
NO_STREAM = 10059
MESSAGE_ID = "Nats-Msg-Id"
LAST_SENT = "Nats-Last-Consumer"
BROKER_PREFIX = "Nats-"
_ID_FIRST = f"NATS/1.0\r\n{MESSAGE_ID}:".encode()
_DOTS_COUNT = 8  # in an acknowledgement subject without a domain
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Place(msgspec.Struct, frozen=True, gc=False):
    """What the acknowledgement subject of a delivery says about it."""

    stream: str
    consumer: str
    delivered_count: int
    sequence: int  # in the stream
    consumer_sequence: int  # 1, 2, 3 ... of what this consumer was sent
    stored_at: datetime
    pending_count: int  # messages behind this one that the consumer may have


def place(reply: bytes) -> Place:
    """Read `$JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<number>.<time>.<pending>`.

    With a domain, `<domain>.<account>` come before the stream and a token at the end.
    Source: NATS ADR-15, "JetStream Subscribe Workflow" (read 2026-11-21).
    """
    if reply.count(b".") == _DOTS_COUNT:
        consumer, sequence, number, stored, pending = reply.rsplit(b".", 4)
    else:
        consumer, sequence, number, stored, pending, _ = reply.rsplit(b".", 5)
    stream, name, delivered_count = _consumer(consumer)
    # Whole microseconds, rounded as msgspec rounds them in JSON; a float of this size would be off by some.
    stored_at = _EPOCH + timedelta(0, 0, (int(stored) + 500) // 1000)  # by place: by name takes twice as long
    return Place(stream, name, delivered_count, int(sequence), int(number), stored_at, int(pending))


@lru_cache(maxsize=256)  # the same for all that one consumer is given for the first time
def _consumer(front: bytes) -> tuple[str, str, int]:
    stream, consumer, delivered = front.decode().rsplit(".", 3)[1:]
    return stream, consumer, int(delivered)


def message(received: Frame, at: Place) -> Message:
    """The delivery as the message that was stored."""
    headers = received.headers
    if headers.startswith(_ID_FIRST) and headers.find(b"\r\n", len(_ID_FIRST)) == len(headers) - 4:
        # Nothing but the id, as nearly all messages are.
        message_id: str | None = headers[len(_ID_FIRST) : -4].strip().decode("utf-8", "replace")
        own: dict[str, str] = {}
    else:
        parsed = _parse_headers(headers)
        message_id, own = parsed.get(MESSAGE_ID), _senders_own(parsed)
    return Message(
        subject=received.subject.decode(),
        payload=received.payload,
        message_id=message_id,
        stream=at.stream,
        sequence=at.sequence,
        stored_at=at.stored_at,
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
        stored_at=raw.time,
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

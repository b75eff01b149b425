"""From what the server sends to `Message`: deliveries with their place in the stream, and single stored messages."""

import base64
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec
from nats.aio.msg import Msg

from gpu_autoscaler.bus.nats_link import ApiError, NatsLink
from gpu_autoscaler.bus.protocol import Message
from gpu_autoscaler.model.errors import PermanentError

NO_MESSAGE = 10037
NO_STREAM = 10059
MESSAGE_ID = "Nats-Msg-Id"
BROKER_PREFIX = "Nats-"


class Place(msgspec.Struct, frozen=True):
    """What the acknowledgement subject of a delivery says about it."""

    stream: str
    consumer: str
    delivered_count: int
    sequence: int  # in the stream
    consumer_sequence: int  # 1, 2, 3 ... of what this consumer was sent
    stored_at: datetime
    pending_count: int  # messages behind this one that the consumer may have


def place(reply: str) -> Place:
    """Read `$JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<number>.<time>.<pending>`.

    With a domain, `<domain>.<account>` come before the stream and a token at the end.
    Source: NATS ADR-15, "JetStream Subscribe Workflow" (read 2026-11-21).
    """
    tokens = reply.split(".")
    start = 2 if len(tokens) == 9 else 4
    stream, consumer, delivered, sequence, number, stored, pending = tokens[start : start + 7]
    return Place(
        stream, consumer, int(delivered), int(sequence), int(number), _instant(int(stored)), int(pending)
    )  # fmt: skip


def _instant(nanoseconds: int) -> datetime:
    # Whole microseconds, rounded as msgspec rounds them in JSON; a float of this size would be off by some.
    seconds, rest = divmod((nanoseconds + 500) // 1000, 1_000_000)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest)


def message(received: Msg, at: Place) -> Message:
    """The delivery as the message that was stored."""
    headers = received.headers
    return Message(
        subject=received.subject,
        payload=received.data,
        message_id=headers.get(MESSAGE_ID) if headers else None,
        stream=at.stream,
        sequence=at.sequence,
        stored_at=at.stored_at,
        headers=_senders_own(headers) if headers else {},
    )


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

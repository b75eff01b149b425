"""CloudEvents 1.0 envelopes of facts in structured JSON, decoded in two steps: the head, then the fact.

Two steps distinguish an unknown type (a newer publisher) from an invalid fact.
Source: CloudEvents specification 1.0.2, "JSON Event Format".
"""

from datetime import datetime, timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.errors import InvalidFact
from gpu_autoscaler.model.ids import FactId
from gpu_autoscaler.model.observed import Instant

SPEC_VERSION = "1.0"
# A publisher's clock may be this far ahead of the broker's: more than clocks kept by NTP differ. Source: our own.
AHEAD_MAX = timedelta(seconds=60)
OWN_SOURCES = "/gpu-autoscaler/"  # begins the source of every fact that our services publish
# The id goes into headers, log lines and every following fact; our own are below a quarter of this.
EVENT_ID_LENGTH_MAX = 512
# What decoding foreign JSON raises; RecursionError for nesting that is too deep.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Envelope(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A fact with its context: source, time and cause."""

    id: FactId
    source: str  # service and instance, e.g. /gpu-autoscaler/scaler
    time: Instant
    fact: Fact
    correlation_id: str | None = None  # id of the first fact of the story
    causation_id: FactId | None = None  # id of the fact that this one follows from
    unknown_fields: tuple[str, ...] = ()  # the errors of a foreign job request; admission refuses it for them

    @property
    def type(self) -> str:
        """CloudEvents type of the fact."""
        return self.fact.type_name()


class Recorded(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An envelope with its stream and sequence."""

    envelope: Envelope
    stream: str
    sequence: int
    stored_at: Instant | None = None  # cluster time; None: unknown, as in tests
    ahead_seconds: float = 0.0  # how far ahead of the broker the publisher's clock was; 0: within AHEAD_MAX

    @property
    def fact(self) -> Fact:
        return self.envelope.fact


def recorded(envelope: Envelope, stream: str, sequence: int, stored_at: datetime) -> Recorded:
    """Return the stored fact; what its publisher dated more than AHEAD_MAX after `stored_at` is dated there.

    The state measures ages against the newest fact of a stream: one clock that is hours ahead would make every true
    notice look old. A late fact keeps its time. The correction depends on the message alone, so that every reader and
    every recomputation makes the same one.
    """
    limit = stored_at + AHEAD_MAX
    if envelope.time <= limit or envelope.fact.IS_PUBLIC:
        return Recorded(envelope=envelope, stream=stream, sequence=sequence, stored_at=stored_at)
    fact = envelope.fact
    later = {name: limit for name in fact.CLOCK_FIELDS if (getattr(fact, name) or limit) > limit}
    corrected = replace(envelope, time=limit, fact=replace(fact, **later) if later else fact)
    ahead_seconds = (envelope.time - stored_at).total_seconds()
    return Recorded(
        envelope=corrected, stream=stream, sequence=sequence, stored_at=stored_at, ahead_seconds=ahead_seconds
    )


class Head(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The attributes of any CloudEvent, also of an unknown type."""

    id: str
    type: str
    source: str = ""
    time: Instant | None = None
    specversion: str = SPEC_VERSION
    datacontenttype: str = "application/json"
    correlationid: str | None = None
    causationid: str | None = None
    data: msgspec.Raw = msgspec.Raw(b"{}")


_head_decoder = msgspec.json.Decoder(Head)
_encoder = msgspec.json.Encoder()


def read_head(message: bytes) -> Head:
    """Return the head of an event, its data still encoded. Raises InvalidFact naming what is wrong."""
    try:
        head = _head_decoder.decode(message)
    except UNREADABLE as exc:
        raise InvalidFact(f"not a CloudEvent in structured JSON: {exc}") from exc
    if head.specversion != SPEC_VERSION:
        raise InvalidFact(f"specversion {head.specversion!r} of event {head.id!r}; only {SPEC_VERSION!r} is supported")
    if not head.id:
        raise InvalidFact("CloudEvent without an id; set `id`, which identifies repeats")
    if len(head.id) > EVENT_ID_LENGTH_MAX:
        raise InvalidFact(f"`id` of a CloudEvent has {len(head.id)} characters; the maximum is {EVENT_ID_LENGTH_MAX}")
    return head


def encode(envelope: Envelope) -> bytes:
    """Return the event as structured CloudEvents JSON, without empty attributes."""
    event: dict[str, Any] = {
        "specversion": SPEC_VERSION,
        "id": envelope.id,
        "source": envelope.source,
        "type": envelope.type,
        "time": envelope.time,
        "datacontenttype": "application/json",
    }
    if envelope.correlation_id is not None:
        event["correlationid"] = envelope.correlation_id
    if envelope.causation_id is not None:
        event["causationid"] = envelope.causation_id
    event["data"] = envelope.fact
    return _encoder.encode(event)

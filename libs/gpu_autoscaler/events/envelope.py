"""CloudEvents 1.0 in structured JSON around a fact, and the two steps of reading one: head first, then the fact.

Two steps keep an unknown type (a newer publisher) apart from an invalid fact (a broken one).
Source: CloudEvents specification 1.0.2, "JSON Event Format".
"""

from typing import Any

import msgspec

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.errors import InvalidFact
from gpu_autoscaler.model.ids import FactId
from gpu_autoscaler.model.observed import Instant

SPEC_VERSION = "1.0"
# It goes into headers, log lines and every fact that follows; our own are shorter than a quarter of this.
EVENT_ID_LENGTH_MAX = 512
# What decoding foreign JSON raises. Nesting that is deeper than the interpreter goes is the sender's mistake as well.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Envelope(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A fact with its context: who says so, when, and because of which other fact."""

    id: FactId
    source: str  # service and instance, e.g. /gpu-autoscaler/scaler
    time: Instant
    fact: Fact
    correlation_id: str | None = None  # id of the first fact of the story
    causation_id: FactId | None = None  # id of the fact that this one follows from

    @property
    def type(self) -> str:
        """CloudEvents type of the fact."""
        return self.fact.type_name()


class Recorded(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An envelope with its place in the record: stream and sequence."""

    envelope: Envelope
    stream: str
    sequence: int

    @property
    def fact(self) -> Fact:
        """The fact itself."""
        return self.envelope.fact


class Head(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What can be read of any CloudEvent, also one of a type that we do not know."""

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
    """Return the event's head, with the data still encoded. Raises InvalidFact naming what is wrong."""
    try:
        head = _head_decoder.decode(message)
    except UNREADABLE as exc:
        raise InvalidFact(f"not a CloudEvent in structured JSON: {exc}") from exc
    if head.specversion != SPEC_VERSION:
        raise InvalidFact(f"specversion {head.specversion!r} of event {head.id!r}; only {SPEC_VERSION!r} is understood")
    if not head.id:
        raise InvalidFact("a CloudEvent without an id cannot be told from its repeats; set `id`")
    if len(head.id) > EVENT_ID_LENGTH_MAX:
        raise InvalidFact(
            f"the `id` of a CloudEvent has {len(head.id)} characters; at most {EVENT_ID_LENGTH_MAX} can be"
        )
    return head


def encode(envelope: Envelope) -> bytes:
    """Return the event as structured CloudEvents JSON; attributes without a value are left out."""
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

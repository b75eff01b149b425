"""Decodes a stored message: a CloudEvent, or, on a public subject, a bare body whose envelope is derived.

Every reader of the streams (effects, projections, replays) decodes here, so that all see the same fact.
"""

from collections.abc import Callable
from datetime import datetime
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice

import msgspec

from gpu_autoscaler.events.catalog import FACT_CATALOG, FactCatalog
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.envelope import EVENT_ID_LENGTH_MAX, OWN_SOURCES, UNREADABLE, Envelope
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested, JobRequested
from gpu_autoscaler.model.document_errors import ERRORS_COUNT_MAX, all_errors, first_errors, unknown_keys
from gpu_autoscaler.model.errors import InvalidFact, UnknownType
from gpu_autoscaler.model.ids import FactId, derive_id

# Facts that programs may publish without a CloudEvent envelope: the subject gives the type.
PUBLIC: tuple[type[Fact], ...] = (JobRequested, DemandReported)
PUBLIC_SOURCE = "/public"
# Facts that clients may publish.
REQUESTS: tuple[type[Fact], ...] = (JobRequested, JobCancelRequested, DemandReported)
_REQUEST_ROOTS = frozenset(fact.subject_root() for fact in REQUESTS)

_BARE = {fact.subject_root(): fact for fact in PUBLIC}
_BARE_DECODERS = {subject: msgspec.json.Decoder(fact) for subject, fact in _BARE.items()}


class _EnvelopeFields(msgspec.Struct, frozen=True, gc=False):
    """The fields that distinguish an event from a bare body: no public fact has them."""

    specversion: msgspec.Raw = msgspec.Raw()
    data: msgspec.Raw = msgspec.Raw()


_envelope_fields_decoder = msgspec.json.Decoder(_EnvelopeFields)


def read(
    subject: str,
    payload: bytes,
    *,
    message_id: str | None,
    arrived_at: Callable[[], datetime],
    catalog: FactCatalog = FACT_CATALOG,
    keeps_refused: bool = False,
) -> Envelope:
    """Return the fact of a message with its envelope. `arrived_at` (cluster time) dates a message without a time.

    Raises UnknownType for an unknown type or subject; InvalidFact, naming the field, for an invalid fact, for one that
    was published on another fact's subject, and for a program's demand report with unknown fields; `keeps_refused`:
    such a report is returned, with these fields.
    """
    plain = catalog.plain.get(subject)
    if plain is not None and subject not in _BARE:  # nearly all messages
        envelope = catalog.decode_on(subject, payload, arrived_at=arrived_at)
        if type(envelope.fact) is plain:
            return envelope
    root = _root(subject)
    if root not in catalog.subject_roots:
        raise UnknownType(_unknown_subject(subject, catalog))
    if subject in _BARE and _is_bare(payload):
        return _with_unknown_fields(
            _derived_envelope(subject, payload, message_id, arrived_at()), payload, keeps_refused=keeps_refused
        )
    envelope = catalog.decode_on(root, payload, arrived_at=arrived_at)
    if envelope.fact.subject() != subject:
        raise InvalidFact(
            f"event {envelope.id!r} of type {envelope.type!r} was published on {subject!r}; "
            f"its subject is {envelope.fact.subject()!r}"
        )
    return _with_unknown_fields(envelope, payload, keeps_refused=keeps_refused)


def _with_unknown_fields(envelope: Envelope, payload: bytes, *, keeps_refused: bool) -> Envelope:
    """Name the unknown fields of a request that a program published: a misspelled one would be lost.

    A job request stays readable, for the queue's admission. Demand reports have no admission: what is read counts, so
    that reading refuses them. A gateway checks requests itself, and a newer one may know more fields.
    """
    fact = envelope.fact
    if not isinstance(fact, PUBLIC) or envelope.source.startswith(OWN_SOURCES):
        return envelope
    errors = tuple(islice(unknown_keys(_body(payload), type(fact)), ERRORS_COUNT_MAX))
    if errors and isinstance(fact, DemandReported) and not keeps_refused:
        raise InvalidFact(f"demand report {envelope.id!r} of {fact.source!r} refused: {'; '.join(errors)}")
    return msgspec.structs.replace(envelope, unknown_fields=errors) if errors else envelope


@lru_cache(maxsize=4096)  # few subjects carry nearly all messages
def _root(subject: str) -> str:
    domain, _, rest = subject.partition(".")
    return f"{domain}.{rest.partition('.')[0]}"


def field_errors(fact: type[Fact], payload: bytes) -> list[str]:
    """Return the first errors in the fields of a request, unknown ones too: in an event's data, or in a bare body.

    Readers of the stream ignore unknown fields, which a newer publisher may send. Empty: none, or no JSON.
    """
    try:
        return first_errors(_body(payload), fact)
    except UNREADABLE:
        return []


def _body(payload: bytes) -> object:
    """Return the data of an event, or a bare body. Raises UNREADABLE."""
    document = msgspec.json.decode(payload)
    is_event = isinstance(document, dict) and not document.keys().isdisjoint({"specversion", "data"})
    return document.get("data", {}) if is_event else document


def is_request(subject: str) -> bool:
    """Return whether messages on this subject are requests of clients."""
    return _root(subject) in _REQUEST_ROOTS


def _unknown_subject(subject: str, catalog: FactCatalog) -> str:
    nearest = get_close_matches(subject, sorted(catalog.subject_roots), n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown subject {subject!r}{hint}"


def _is_bare(payload: bytes) -> bool:
    try:
        fields = _envelope_fields_decoder.decode(payload)
    except UNREADABLE as exc:
        raise InvalidFact(f"neither a CloudEvent nor a bare body: {exc}") from exc
    return not bytes(fields.specversion) and not bytes(fields.data)


def _derived_envelope(subject: str, payload: bytes, message_id: str | None, arrived_at: datetime) -> Envelope:
    """Return the envelope of a bare body. Its id is the Nats-Msg-Id, otherwise a hash of the content."""
    try:
        fact = _BARE_DECODERS[subject].decode(payload)
    except UNREADABLE as exc:
        reasons = all_errors(payload, _BARE[subject], exc)
        raise InvalidFact(f"invalid body on {subject}: {reasons}") from exc
    if message_id is not None and len(message_id) > EVENT_ID_LENGTH_MAX:
        raise InvalidFact(f"Nats-Msg-Id has {len(message_id)} characters; at most {EVENT_ID_LENGTH_MAX} are allowed")
    return Envelope(
        id=FactId(message_id or derive_id(subject, payload.hex())), source=PUBLIC_SOURCE, time=arrived_at, fact=fact
    )

"""How a stored message is read: as a CloudEvent, or, on the public door, as a bare body with its envelope derived.

Every reader of the record (effects, projections, replays) reads through here, so that all see the same fact.
"""

from collections.abc import Callable
from datetime import datetime
from difflib import get_close_matches
from functools import lru_cache

import msgspec

from gpu_autoscaler.events.catalogue import CATALOGUE, Catalogue
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.envelope import EVENT_ID_LENGTH_MAX, UNREADABLE, Envelope
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model.errors import InvalidFact, UnknownType
from gpu_autoscaler.model.ids import FactId, derive_id

# Facts that programs which know nothing of CloudEvents may publish: the subject says the type.
PUBLIC: tuple[type[Fact], ...] = (JobRequested, DemandReported)
PUBLIC_SOURCE = "/public"

_BARE = {fact.subject_root(): fact for fact in PUBLIC}
_BARE_DECODERS = {subject: msgspec.json.Decoder(fact) for subject, fact in _BARE.items()}


class _Marks(msgspec.Struct, frozen=True, gc=False):
    """What tells an event from a bare body: no public fact has a field of these names."""

    specversion: msgspec.Raw = msgspec.Raw()
    data: msgspec.Raw = msgspec.Raw()


_marks_decoder = msgspec.json.Decoder(_Marks)


def read(
    subject: str,
    payload: bytes,
    *,
    message_id: str | None,
    arrived_at: Callable[[], datetime],
    catalogue: Catalogue = CATALOGUE,
) -> Envelope:
    """Return the fact of a message with its context. `arrived_at` (cluster time) is asked where it carries no time.

    Raises UnknownType for a type or a subject that this version does not know; InvalidFact naming the field for a
    broken one, and for a fact that was published on a subject of another.
    """
    plain = catalogue.plain.get(subject)
    if plain is not None and subject not in _BARE:  # as nearly all are
        envelope = catalogue.decode_on(subject, payload, arrived_at=arrived_at)
        if type(envelope.fact) is plain:
            return envelope
    root = _root(subject)
    if root not in catalogue.subject_roots:
        raise UnknownType(_unknown_subject(subject, catalogue))
    if subject in _BARE and _is_bare(payload):
        return _lifted(subject, payload, message_id, arrived_at())
    envelope = catalogue.decode_on(root, payload, arrived_at=arrived_at)
    if envelope.fact.subject() != subject:
        raise InvalidFact(
            f"event {envelope.id!r} of type {envelope.type!r} was published on {subject!r}; "
            f"its subject is {envelope.fact.subject()!r}"
        )
    return envelope


@lru_cache(maxsize=4096)  # few subjects carry nearly all messages
def _root(subject: str) -> str:
    domain, _, rest = subject.partition(".")
    return f"{domain}.{rest.partition('.')[0]}"


def _unknown_subject(subject: str, catalogue: Catalogue) -> str:
    nearest = get_close_matches(subject, sorted(catalogue.subject_roots), n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"no fact that this version knows is published on {subject!r}{hint}"


def _is_bare(payload: bytes) -> bool:
    try:
        marks = _marks_decoder.decode(payload)
    except UNREADABLE as exc:
        raise InvalidFact(f"neither a CloudEvent nor a bare body: {exc}") from exc
    return not bytes(marks.specversion) and not bytes(marks.data)


def _lifted(subject: str, payload: bytes, message_id: str | None, arrived_at: datetime) -> Envelope:
    """The envelope of a bare body: named by its Nats-Msg-Id, else by its content, so that repeats are one fact."""
    try:
        fact = _BARE_DECODERS[subject].decode(payload)
    except UNREADABLE as exc:
        raise InvalidFact(f"no valid body of {subject}: {exc}") from exc
    if message_id is not None and len(message_id) > EVENT_ID_LENGTH_MAX:
        raise InvalidFact(f"Nats-Msg-Id has {len(message_id)} characters; at most {EVENT_ID_LENGTH_MAX} can be")
    return Envelope(
        id=FactId(message_id or derive_id(subject, payload.hex())),
        source=PUBLIC_SOURCE,
        time=arrived_at,
        fact=fact,
    )

"""Wraps facts in envelopes with derived ids and publishes them on the bus. Services publish in no other way.

Equal cause, equal id: publishing again after a crash adds nothing to the stream.
"""

from collections.abc import Sequence
from datetime import datetime

import msgspec
import structlog

from gpu_autoscaler.bus.protocol import Ack, Bus, Publication, StreamSpan
from gpu_autoscaler.events.envelope import OWN_SOURCES, Envelope, encode
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.errors import StalePlan
from gpu_autoscaler.model.ids import FactId, derive_id
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.service import Outcome, Outputs

log = structlog.get_logger()


def output_id(fact: Fact, *, service: str, cause: Envelope | None, number: int) -> FactId:
    """Return the id of a published fact: its condition, otherwise derived from cause, service and number.

    Without condition and cause (a new fact of a tick) it is derived from the content.
    """
    condition = fact.condition()
    if condition is not None:
        return FactId(condition)
    if cause is not None:
        return FactId(derive_id(cause.id, service, number))
    return FactId(derive_id(service, fact.type_name(), msgspec.json.encode(fact).hex()))


class PreparedFact(msgspec.Struct, frozen=True, kw_only=True):
    """A fact ready to be published; retries use the same bytes and id."""

    fact: Fact
    message_id: str
    payload: bytes


class Publisher:
    """Publishes the facts of one service."""

    def __init__(
        self, bus: Bus, clock: Clock, metrics: Metrics, *, service: str, instance: str, publishes: Sequence[type[Fact]]
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._metrics = metrics
        self._service = service
        self._source = f"{OWN_SOURCES}{service}/{instance}"
        self._publishes = frozenset(publishes)

    def prepare(
        self, facts: Sequence[Fact], cause: Envelope | None = None, *, at: datetime | None = None
    ) -> tuple[PreparedFact, ...]:
        """Return the facts with ids, cause and time (`at`, or now). An undeclared fact is a bug."""
        prepared = []
        at = self._clock.now() if at is None else at
        envelopes = wrap_in_envelopes(facts, cause, service=self._service, source=self._source, at=at)
        for envelope in envelopes:
            fact = envelope.fact
            assert type(fact) in self._publishes, (  # noqa: S101 - a bug
                f"{self._service} does not declare that it publishes {fact.type_name()}"
            )
            prepared.append(PreparedFact(fact=fact, message_id=envelope.id, payload=encode(envelope)))
        return tuple(prepared)

    async def send(
        self, prepared: Sequence[PreparedFact], *, expected_last_sequence: int | None = None
    ) -> tuple[Ack, ...]:
        """Store the facts; return when the stream has all of them. Raises what `Bus.publish_many` raises."""
        assert expected_last_sequence is None or len(prepared) == 1, "a fence takes exactly one fact"  # noqa: S101 - a bug
        acks = await self._bus.publish_many(
            [
                Publication(
                    subject=item.fact.subject(),
                    payload=item.payload,
                    message_id=item.message_id,
                    expected_last_subject_sequence=expected_last_sequence,
                )
                for item in prepared
            ]
        )
        for item, ack in zip(prepared, acks, strict=True):
            if not ack.is_duplicate:
                self._metrics.facts_published.labels(item.fact.domain()).inc()
        return tuple(acks)

    async def publish(self, outputs: Outputs, cause: Envelope | None = None) -> tuple[Ack, ...]:
        """Prepare and store the facts of a handler's result.

        Where the stream has discarded the parent of a fenced fact, the fence is that the subject is still empty.
        """
        outcome = as_outcome(outputs)
        prepared = self.prepare(outcome.facts, cause)
        try:
            return await self.send(prepared, expected_last_sequence=outcome.expected_last_sequence)
        except StalePlan as stale:
            if stale.last_sequence != 0:
                raise
            if not is_parent_discarded(outcome, stale, await self._bus.span(outcome.facts[0].stream())):
                raise
        log.warning("parent plan discarded by the stream, chain continued", parent=outcome.expected_last_sequence)
        return await self.send(prepared, expected_last_sequence=0)

    async def publish_again(self, facts: Sequence[tuple[Fact, datetime]]) -> tuple[Ack, ...]:
        """Store facts that were published before, each with the time of its event."""
        return await self.send([self.prepare((fact,), at=time)[0] for fact, time in facts])


def is_parent_discarded(outcome: Outcome, stale: StalePlan, span: StreamSpan) -> bool:
    """Return whether a fence failed only because the stream no longer stores the parent; then 0 is the fence.

    The subject is empty, and nothing is stored that the outcome does not take into account, so no later plan was
    missed. Of two leaders with the same discarded parent the stream still refuses one: the other one's plan is the last
    of the subject by then.
    """
    is_all_known = span.first_sequence > span.last_sequence or span.last_sequence <= outcome.folded_sequence
    return stale.last_sequence == 0 and bool(outcome.expected_last_sequence) and is_all_known


def wrap_in_envelopes(
    facts: Sequence[Fact], cause: Envelope | None, *, service: str, source: str, at: datetime
) -> tuple[Envelope, ...]:
    """Wrap each fact with its id, its cause and the time of its publication."""
    return tuple(
        Envelope(
            id=output_id(fact, service=service, cause=cause, number=number),
            source=source,
            time=at,
            fact=fact,
            correlation_id=None if cause is None else cause.correlation_id or cause.id,
            causation_id=None if cause is None else cause.id,
        )
        for number, fact in enumerate(facts)
    )


def as_outcome(outputs: Outputs) -> Outcome:
    """Return a handler's result as an Outcome."""
    return outputs if isinstance(outputs, Outcome) else Outcome(facts=tuple(outputs))

"""Wraps facts in envelopes with derived ids and stores them on the bus. The only way for a service to say something."""

from collections.abc import Sequence
from datetime import datetime

import msgspec

from gpu_autoscaler.bus.protocol import Ack, Bus, Publication
from gpu_autoscaler.events.envelope import Envelope, encode
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.ids import output_id
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.service import Outcome, Outputs


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """A fact ready to be sent; sent again with the same bytes and id until the stream has it."""

    fact: Fact
    message_id: str
    payload: bytes


class Publisher:
    """Speaks for one service."""

    def __init__(
        self, bus: Bus, clock: Clock, metrics: Metrics, *, service: str, instance: str, publishes: Sequence[type[Fact]]
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._metrics = metrics
        self._service = service
        self._source = f"/gpu-autoscaler/{service}/{instance}"
        self._publishes = frozenset(publishes)

    def seal(self, facts: Sequence[Fact], cause: Envelope | None = None) -> tuple[Sealed, ...]:
        """Return the facts with ids, cause and time of now. A fact that the service never declared is our bug."""
        sealed = []
        envelopes = wrap_in_envelopes(facts, cause, service=self._service, source=self._source, at=self._clock.now())
        for envelope in envelopes:
            fact = envelope.fact
            assert type(fact) in self._publishes, (  # noqa: S101 - a bug of ours, loud
                f"{self._service} does not declare that it publishes {fact.type_name()}"
            )
            sealed.append(Sealed(fact=fact, message_id=envelope.id, payload=encode(envelope)))
        return tuple(sealed)

    async def send(self, sealed: Sequence[Sealed], *, expected_last_sequence: int | None = None) -> tuple[Ack, ...]:
        """Store the facts; returns when the stream has all. Raises what `Bus.publish_many` raises."""
        assert expected_last_sequence is None or len(sealed) == 1, "a fence guards one fact"  # noqa: S101 - our bug
        acks = await self._bus.publish_many(
            [
                Publication(
                    subject=item.fact.subject(),
                    payload=item.payload,
                    message_id=item.message_id,
                    expected_last_subject_sequence=expected_last_sequence,
                )
                for item in sealed
            ]
        )
        for item, ack in zip(sealed, acks, strict=True):
            if not ack.is_duplicate:
                self._metrics.facts_published.labels(item.fact.domain()).inc()
        return tuple(acks)

    async def publish(self, outputs: Outputs, cause: Envelope | None = None) -> tuple[Ack, ...]:
        """Seal and store what a door returned."""
        outcome = as_outcome(outputs)
        return await self.send(self.seal(outcome.facts, cause), expected_last_sequence=outcome.expected_last_sequence)


def wrap_in_envelopes(
    facts: Sequence[Fact], cause: Envelope | None, *, service: str, source: str, at: datetime
) -> tuple[Envelope, ...]:
    """Return what a service says, each fact with its id, its cause and the instant at which it is said."""
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
    """Return what a door said as an Outcome."""
    return outputs if isinstance(outputs, Outcome) else Outcome(facts=tuple(outputs))

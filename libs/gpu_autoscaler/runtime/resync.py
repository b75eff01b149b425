"""Publishes the current value of everything alive again before its stream discards it (docs/designs/005-resync.md).

Streams are logs with an end: whatever is alive must be readable from them at any time, although a fact that does not
change is published once. Facts in the older half of a stream that fills up, by age or by size, are published again.
"""

from collections.abc import Iterable
from datetime import datetime

import msgspec

from gpu_autoscaler.bus.protocol import StreamSpan
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.runtime.service import ResyncInput

FACTS_COUNT_MAX = 1000  # of one stream in one pass: a start beside full streams must not flood them
_Key = tuple[type[Fact], str | None]  # of one object, and where facts of it differ of one of its facts


class Position(msgspec.Struct, frozen=True, gc=False):
    """Where a living object was last published, by this process."""

    sequence: int
    stored_at: datetime  # cluster time, as the ages of the stream
    time: datetime  # of the event, kept by every repeat


class Resync:
    """Remembers where living objects were published; tells which are due again."""

    def __init__(self, service: ResyncInput) -> None:
        self._service = service
        self._types = frozenset(service.resyncs)
        self.streams = tuple(sorted({fact.stream() for fact in service.resyncs}))
        self._positions: dict[_Key, Position] = {}

    def published(self, fact: Fact, sequence: int, *, stored_at: datetime, time: datetime) -> None:
        """Note that the stream has the fact at this sequence."""
        if type(fact) in self._types:
            self._positions[_key(fact)] = Position(sequence, stored_at, time)

    def due(self, span: StreamSpan, stream: str, now: datetime) -> list[tuple[Fact, datetime]]:
        """Return living facts of the stream to publish again, each with its event time; the oldest first.

        A fact of unknown position (published by another process) is due as soon as anything in the stream is.
        """
        if not (span.is_half_full or span.is_half_old(now)):
            return []
        living = {_key(fact): fact for fact in self._service.living() if fact.stream() == stream}
        self._forget(stream, living)
        middle = (span.first_sequence + span.last_sequence) / 2
        unknown = Position(0, datetime.min.replace(tzinfo=now.tzinfo), now)
        due = []
        for key, fact in living.items():
            position = self._positions.get(key, unknown)
            is_old = position is unknown or now - position.stored_at > span.age_max / 2
            if is_old or (span.is_half_full and position.sequence < middle):
                due.append((position.sequence, fact, position.time))
        due.sort(key=lambda entry: entry[0])
        return [(fact, time) for _, fact, time in due[:FACTS_COUNT_MAX]]

    def _forget(self, stream: str, living: Iterable[_Key]) -> None:
        kept = frozenset(living)
        self._positions = {
            key: position for key, position in self._positions.items() if key in kept or key[0].stream() != stream
        }


def _key(fact: Fact) -> _Key:
    return type(fact), fact.condition() or fact.entity()

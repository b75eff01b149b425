"""What was seen on the bus, in order: the half of a report that is held against what is true outside."""

from collections.abc import Iterator
from datetime import datetime
from typing import TypeVar

import msgspec

from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact

FactT = TypeVar("FactT", bound=Fact)


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded fact and the wall time at which the broker stored it."""

    recorded: Recorded
    stored_at: datetime

    @property
    def fact(self) -> Fact:
        """The fact itself."""
        return self.recorded.fact


class Record:
    """Everything that was seen, in the order of arrival."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def add(self, seen: Seen) -> None:
        """Keep a fact."""
        self.seen.append(seen)

    def of(self, kind: type[FactT]) -> Iterator[tuple[FactT, Seen]]:
        """Facts of one kind, in order."""
        for seen in self.seen:
            if isinstance(seen.fact, kind):
                yield seen.fact, seen

    def count(self, kind: type[Fact]) -> int:
        """How many facts of one kind there are."""
        return sum(1 for _ in self.of(kind))

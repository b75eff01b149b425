"""Facts observed on the bus, in order; the report compares them with the ground truth."""

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
        return self.recorded.fact


class Record:
    """All observed facts, in order of arrival."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def add(self, seen: Seen) -> None:
        self.seen.append(seen)

    def of(self, kind: type[FactT]) -> Iterator[tuple[FactT, Seen]]:
        """Yield facts of one type, in order."""
        for seen in self.seen:
            if isinstance(seen.fact, kind):
                yield seen.fact, seen

    def count(self, kind: type[Fact]) -> int:
        return sum(1 for _ in self.of(kind))

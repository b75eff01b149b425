"""What was seen on the bus, and what is true outside: the two halves that a report holds against each other."""

from collections.abc import Iterator, Mapping, Sequence
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


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulated world knows of itself and no service can read."""

    launches_by_token: Mapping[str, int]  # instances made under each action id
    instances_left: Sequence[str]  # provider ids of instances of ours that still run
    bill_micro_usd: Mapping[str, int]  # provider id -> what the provider charges for it


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

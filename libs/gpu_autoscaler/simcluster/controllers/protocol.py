"""The interface of a controller, and the agenda of its scheduled work."""

import heapq
import itertools
from collections.abc import Iterator
from datetime import datetime
from typing import Generic, Protocol, TypeVar

from gpu_autoscaler.simcluster.store import Change

Item = TypeVar("Item")


class Controller(Protocol):
    """A control loop: records changes, works in steps, never waits."""

    def on_change(self, change: Change) -> None:
        """Record the change. Must not write to the store."""

    def step(self, now: datetime) -> None:
        """Do what is due at `now`, in cluster time; at most a bounded amount of it."""


class Agenda(Generic[Item]):
    """Items scheduled for a time, earliest first; equal times in the order they were added."""

    def __init__(self) -> None:
        self._entries: list[tuple[datetime, int, Item]] = []
        self._order = itertools.count()

    def add(self, due: datetime, item: Item) -> None:
        """Schedule `item` for `due`."""
        heapq.heappush(self._entries, (due, next(self._order), item))

    def take_due(self, now: datetime) -> Iterator[Item]:
        """Yield and remove due items, including those that are added meanwhile."""
        while self._entries and self._entries[0][0] <= now:
            yield heapq.heappop(self._entries)[2]

"""What a controller is, and the agenda that each keeps for later."""

import heapq
import itertools
from collections.abc import Iterator
from datetime import datetime
from typing import Generic, Protocol, TypeVar

from gpu_autoscaler.simcluster.store import Change

Item = TypeVar("Item")


class Controller(Protocol):
    """A loop body: notes changes, works in steps, never waits."""

    def hear(self, change: Change) -> None:
        """Note what has changed. Must not write to the store."""

    def step(self, now: datetime) -> None:
        """Do what is due at `now`, in cluster time; at most a bounded amount of it."""


class Agenda(Generic[Item]):
    """Things to do at a time, earliest first; equal times in the order they were added."""

    def __init__(self) -> None:
        self._entries: list[tuple[datetime, int, Item]] = []
        self._order = itertools.count()

    def add(self, due: datetime, item: Item) -> None:
        """Do `item` once `due` has come."""
        heapq.heappush(self._entries, (due, next(self._order), item))

    def take_due(self, now: datetime) -> Iterator[Item]:
        """Yield and forget what is due. What is added meanwhile and already due is yielded too."""
        while self._entries and self._entries[0][0] <= now:
            yield heapq.heappop(self._entries)[2]

"""Tombstones, by the hour in which their entity went.

Used by `core/folding/batch.py` and `core/folding/pruning.py`, and by who reads what is gone.

Six hours of a busy day leave hundreds of thousands of them. A batch of facts copies the hours that it touches, mostly
one, and what has outlived its use is forgotten by whole hours, without a look at each.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Generic, TypeVar

from gpu_autoscaler.core.hours import hour
from gpu_autoscaler.core.state import Tombstone

K = TypeVar("K")


def tombstone_of(graves: Mapping[int, Mapping[K, Tombstone]], key: K) -> Tombstone | None:
    """Return the tombstone of an entity; None: it is not known to be gone."""
    for stones in graves.values():
        if (stone := stones.get(key)) is not None:
            return stone
    return None


def all_tombstones(graves: Mapping[int, Mapping[K, Tombstone]]) -> Iterator[Tombstone]:
    """Return every tombstone, in no order."""
    for stones in graves.values():
        yield from stones.values()


class TombstoneBuckets(Generic[K]):
    """The tombstones of the state while a batch of facts is folded in. An entity has one at most, in one hour."""

    __slots__ = ("_own", "now")

    def __init__(self, origin: Mapping[int, Mapping[K, Tombstone]]) -> None:
        self.now = origin
        self._own: dict[int, dict[K, Tombstone]] = {}  # hours that were copied

    def _owned(self, at_hour: int) -> dict[K, Tombstone]:
        own = self._own.get(at_hour)
        if own is None:
            own = self._own[at_hour] = dict(self.now.get(at_hour, ()))
            self.now = {**self.now, at_hour: own}
        return own

    def get(self, key: K) -> Tombstone | None:
        """The tombstone as it is now."""
        for stones in self.now.values():
            if key in stones:
                return stones[key]
        return None

    def set(self, key: K, stone: Tombstone) -> None:
        """Put a tombstone in place; of an entity that has another one, `remove` that first."""
        self._owned(hour(stone.gone_at))[key] = stone

    def remove(self, key: K) -> None:
        """Take a tombstone away; no hour is left without any, so that equal states look alike."""
        for at_hour, stones in self.now.items():
            if key in stones:
                own = self._owned(at_hour)
                del own[key]
                if not own:
                    self._forget({at_hour})
                return

    def forget(self, before_hour: int) -> None:
        """Leave out every hour before this one."""
        if old := {at_hour for at_hour in self.now if at_hour < before_hour}:
            self._forget(old)

    def _forget(self, hours: Collection[int]) -> None:
        self.now = {at_hour: stones for at_hour, stones in self.now.items() if at_hour not in hours}
        for at_hour in hours:
            self._own.pop(at_hour, None)

"""The one placement engine: scale-up, scale-down and scheduling ask it what fits where.

Pods of equal shape fit equally, so bins are ranked once for each shape and re-ranked only where they changed.
"""

import enum
import heapq
from collections.abc import Iterable, Mapping

import msgspec

from gpu_autoscaler.core.matching import accepts_labels, tolerates
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import NO_DEMANDS, NodeDemands, Taint


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What one member of a gang needs of its node."""

    resources: Resources  # with pod_count=1
    gpu_model: str | None = None
    gpu_memory_bytes_min: int | None = None  # of one GPU
    demands: NodeDemands = NO_DEMANDS
    is_spot_allowed: bool = True


class Standing(enum.IntEnum):
    """How real a bin is; what is more real is filled first."""

    READY = 0
    COMING = 1  # ordered, launched or registered: room until its deadline
    BOUGHT = 2  # by the plan in the making


class Bin(msgspec.Struct, frozen=True, kw_only=True):
    """A node as placement sees it: free room and marks."""

    key: str  # node/<uid> where it is registered and ready, else action/<action id>
    name: str  # as people know it: node name, or action id before it has one
    free: Resources
    has_gpus: bool
    standing: Standing
    labels: Mapping[str, str] = {}
    taints: tuple[Taint, ...] = ()
    gpu_model: str | None = None
    gpu_memory_bytes: int | None = None
    capacity_type: CapacityType | None = None
    expected_at: Instant | None = None  # when a coming node should be usable


def accepts(shape: Shape, target: Bin) -> bool:
    """True when everything but the amount of free room is right.

    Unknown is not enough: a node of unknown capacity type may be spot, one of unknown GPU memory may have too little.
    """
    if shape.resources.gpu_count:
        if shape.gpu_model is not None and target.gpu_model != shape.gpu_model:
            return False
        if shape.gpu_memory_bytes_min is not None and (target.gpu_memory_bytes or 0) < shape.gpu_memory_bytes_min:
            return False
    if not shape.is_spot_allowed and target.capacity_type in (CapacityType.SPOT, None):
        return False
    return tolerates(shape.demands.tolerations, target.taints) and accepts_labels(shape.demands, target.labels)


def fits(shape: Shape, target: Bin) -> bool:
    """True when one member of this shape has its place in the bin."""
    return shape.resources.fits_in(target.free) and accepts(shape, target)


def members_that_fit(shape: Shape, target: Bin) -> int:
    """How many members of this shape the bin takes together."""
    if not fits(shape, target):
        return 0
    need, free = shape.resources, target.free
    pairs = (
        (need.gpu_count, free.gpu_count),
        (need.cpu_milli, free.cpu_milli),
        (need.memory_bytes, free.memory_bytes),
        (need.ephemeral_storage_bytes, free.ephemeral_storage_bytes),
        (need.pod_count, free.pod_count),
    )
    return min((have // wanted for wanted, have in pairs if wanted > 0), default=1)


# standing, GPUs that would be blocked for nothing, GPUs left, CPU left, memory left, key: the smallest is the best fit.
_Score = tuple[int, bool, int, int, int, str]


def _score(shape: Shape, target: Bin) -> _Score:
    need, free = shape.resources, target.free
    return (
        target.standing,
        target.has_gpus and need.gpu_count == 0,
        free.gpu_count - need.gpu_count,
        free.cpu_milli - need.cpu_milli,
        free.memory_bytes - need.memory_bytes,
        target.key,
    )


class _Ranking:
    """Bins that take one shape, best first. Entries of bins that changed since are skipped when met."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.heap: list[tuple[_Score, int]] = []
        self.changes_seen = 0


class Room:
    """Free room during one calculation: a scratch pad that is filled, and emptied again to where it was marked.

    Equal bins in any order give equal answers: equal scores fall to the smallest key.
    """

    def __init__(self, bins: Iterable[Bin]) -> None:
        self._bins: dict[str, Bin] = {}
        self._stamps: dict[str, int] = {}  # counts a bin's changes, so that rankings know old entries
        self._changed: list[str] = []  # keys in the order in which they changed; rankings read on from where they were
        self._undo: list[tuple[str, Bin | None]] = []
        self._rankings: dict[Shape, _Ranking] = {}
        for entry in bins:
            self._set(entry.key, entry)

    def __getitem__(self, key: str) -> Bin:
        return self._bins[key]

    def __contains__(self, key: str) -> bool:
        return key in self._bins

    def put(self, entry: Bin) -> None:
        """Add a bin, or replace the one of its key."""
        self._set(entry.key, entry)

    def remove(self, key: str) -> None:
        """Take a bin away; what was placed on it is the caller's to place again."""
        self._set(key, None)

    def mark(self) -> int:
        """A point to come back to with `rollback`."""
        return len(self._undo)

    def rollback(self, mark: int) -> None:
        """Everything since the mark has not happened."""
        while len(self._undo) > mark:
            key, before = self._undo.pop()
            self._write(key, before)

    def place_gang(self, shape: Shape, count: int, prefers: tuple[str, ...] = ()) -> tuple[str, ...] | None:
        """Place all members and return their bins' keys in order, or return None and change nothing."""
        mark = self.mark()
        placed = self.place_most(shape, count, prefers)
        if len(placed) == count:
            return placed
        self.rollback(mark)
        return None

    def place_most(self, shape: Shape, count: int, prefers: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Place as many members as fit, at most `count`, and return their bins' keys in order.

        Bins in `prefers` are filled first, in their order.
        """
        placed: list[str] = []
        for key in prefers:
            while len(placed) < count and (target := self._bins.get(key)) is not None and fits(shape, target):
                self._fill(target, shape)
                placed.append(key)
        while len(placed) < count and (best := self._best(shape)) is not None:
            self._fill(best, shape)
            placed.append(best.key)
        return tuple(placed)

    def count_places(self, shape: Shape, count: int) -> int:
        """How many members have room, at most `count`; nothing is placed."""
        mark = self.mark()
        placed_count = len(self.place_most(shape, count))
        self.rollback(mark)
        return placed_count

    def _fill(self, target: Bin, shape: Shape) -> None:
        self._set(target.key, msgspec.structs.replace(target, free=target.free - shape.resources))

    def _best(self, shape: Shape) -> Bin | None:
        ranking = self._rankings.get(shape)
        if ranking is None:
            ranking = self._rankings[shape] = _Ranking(shape)
        for key in dict.fromkeys(self._changed[ranking.changes_seen :]):
            entry = self._bins.get(key)
            if entry is not None and fits(shape, entry):
                heapq.heappush(ranking.heap, (_score(shape, entry), self._stamps[key]))
        ranking.changes_seen = len(self._changed)
        while ranking.heap:
            score, stamp = ranking.heap[0]
            key = score[-1]
            if self._stamps[key] == stamp and key in self._bins:
                return self._bins[key]
            heapq.heappop(ranking.heap)
        return None

    def _set(self, key: str, entry: Bin | None) -> None:
        self._undo.append((key, self._bins.get(key)))
        self._write(key, entry)

    def _write(self, key: str, entry: Bin | None) -> None:
        if entry is None:
            self._bins.pop(key, None)
        else:
            self._bins[key] = entry
        self._stamps[key] = self._stamps.get(key, 0) + 1
        self._changed.append(key)

"""The one placement engine: scale-up, scale-down and scheduling ask it what fits where.

Pods of equal shape fit equally, so each question is about one shape and a count, never about single pods.
"""

import enum
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from gpu_autoscaler.core.amounts import COLUMNS_COUNT, CPU, GPU, MEMORY, Bools, Ints, resources, row, rows
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


class _Marks(NamedTuple):
    """Everything about a shape but its amounts: shapes that share it are accepted by the same bins."""

    has_gpus: bool
    gpu_model: str | None
    gpu_memory_bytes_min: int | None
    demands: NodeDemands
    is_spot_allowed: bool

    @classmethod
    def of(cls, shape: Shape) -> "_Marks":
        has_gpus = shape.resources.gpu_count > 0
        model, memory = (shape.gpu_model, shape.gpu_memory_bytes_min) if has_gpus else (None, None)
        return cls(has_gpus, model, memory, shape.demands, shape.is_spot_allowed)


class Room:
    """Free room during one calculation: a scratch pad that is filled, and emptied again to where it was marked.

    Bins are rows of arrays, so a shape is asked for in all of them at once. Equal bins in any order give equal answers:
    equal scores fall to the smallest key.
    """

    def __init__(self, bins: Iterable[Bin]) -> None:
        self._bins: list[Bin] = []  # as they were put, by place
        self._places: dict[str, int] = {}
        self._free = np.empty((0, COLUMNS_COUNT), dtype=np.int64)
        self._standing = np.empty(0, dtype=np.int64)
        self._has_gpus = np.empty(0, dtype=np.bool_)
        self._is_there = np.empty(0, dtype=np.bool_)
        self._ranks: Ints | None = None  # of the keys; None: a bin came since
        self._accepted: dict[_Marks, Bools] = {}
        self._undo: list[Callable[[], None]] = []
        self.put_all(bins)

    def __getitem__(self, key: str) -> Bin:
        place = self._places[key]
        if not self._is_there[place]:
            raise KeyError(key)
        return msgspec.structs.replace(self._bins[place], free=resources(self._free[place]))

    def __contains__(self, key: str) -> bool:
        place = self._places.get(key)
        return place is not None and bool(self._is_there[place])

    def put(self, entry: Bin) -> None:
        """Add a bin whose key was never in this room."""
        self.put_all((entry,))

    def put_all(self, entries: Iterable[Bin]) -> None:
        """Add bins, as `put` does one."""
        added = list(entries)
        first = len(self._bins)
        for place, entry in enumerate(added, first):
            if self._places.setdefault(entry.key, place) != place:
                raise ValueError(f"bin {entry.key} is put into the room twice")
        self._bins += added
        self._free = np.concatenate((self._free, rows(entry.free for entry in added)))
        self._standing = np.append(self._standing, [int(entry.standing) for entry in added]).astype(np.int64)
        self._has_gpus = np.append(self._has_gpus, [entry.has_gpus for entry in added]).astype(np.bool_)
        self._is_there = np.append(self._is_there, np.ones(len(added), dtype=np.bool_))
        self._ranks = None
        self._undo.append(partial(self._forget, first))

    def remove(self, key: str) -> None:
        """Take a bin away; what was placed on it is the caller's to place again."""
        place = self._places[key]
        self._is_there[place] = False
        self._undo.append(partial(self._come_back, place))

    def mark(self) -> int:
        """A point to come back to with `rollback`."""
        return len(self._undo)

    def rollback(self, mark: int) -> None:
        """Everything since the mark has not happened."""
        while len(self._undo) > mark:
            self._undo.pop()()

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
        if count <= 0 or not self._bins:
            return ()
        need = np.array(row(shape.resources), dtype=np.int64)
        members = self._members_that_fit(shape, need)
        wanted = [self._places[key] for key in prefers if key in self]
        for place in (*wanted, *self._best_first(need, members)):
            taken = min(int(members[place]), count - len(placed))
            if taken > 0:
                members[place] -= taken
                self._fill(place, need * taken)
                placed += [self._bins[place].key] * taken
            if len(placed) == count:
                break
        return tuple(placed)

    def count_places(self, shape: Shape, count: int) -> int:
        """How many members have room, at most `count`; nothing is placed."""
        need = np.array(row(shape.resources), dtype=np.int64)
        return min(int(self._members_that_fit(shape, need).sum()), count)

    def _members_that_fit(self, shape: Shape, need: Ints) -> Ints:
        """How many members each bin takes; none where it is not there or not accepted."""
        asked = np.flatnonzero(need)
        accepted = self._accepted_by(shape)
        if not asked.size:
            return accepted.astype(np.int64)
        members: Ints = (self._free[:, asked] // need[asked]).min(axis=1)
        return np.where(accepted & (self._free >= 0).all(axis=1), np.maximum(members, 0), 0)

    def _accepted_by(self, shape: Shape) -> Bools:
        marks = _Marks.of(shape)
        known = self._accepted.get(marks)
        known_count = 0 if known is None else known.size
        if known is None or known_count < len(self._bins):
            more = [accepts(shape, entry) for entry in self._bins[known_count:]]
            known = np.append(known if known is not None else [], more).astype(np.bool_)
            self._accepted[marks] = known
        return known[: len(self._bins)] & self._is_there

    def _best_first(self, need: Ints, members: Ints) -> list[int]:
        """Places that take a member, the best fit first: what is real before what is coming, then what is left least.

        A bin that takes one only becomes a better fit, so each is filled before the next one is begun.
        """
        fitting = np.flatnonzero(members)
        if self._ranks is None:
            order = sorted(range(len(self._bins)), key=lambda place: self._bins[place].key)
            self._ranks = np.empty(len(order), dtype=np.int64)
            self._ranks[order] = np.arange(len(order))
        free = self._free[fitting]
        is_blocked = self._has_gpus[fitting] & (need[GPU] == 0)  # GPUs that would wait for nothing
        ranked = np.lexsort(
            (self._ranks[fitting], free[:, MEMORY], free[:, CPU], free[:, GPU], is_blocked, self._standing[fitting])
        )
        return [int(place) for place in fitting[ranked]]

    def _fill(self, place: int, amounts: Ints) -> None:
        self._free[place] -= amounts
        self._undo.append(partial(self._empty, place, amounts))

    def _empty(self, place: int, amounts: Ints) -> None:
        self._free[place] += amounts

    def _come_back(self, place: int) -> None:
        self._is_there[place] = True

    def _forget(self, first: int) -> None:
        """Leave out all bins from this place on."""
        for entry in self._bins[first:]:
            del self._places[entry.key]
        del self._bins[first:]
        self._free, self._standing = self._free[:first].copy(), self._standing[:first].copy()
        self._has_gpus, self._is_there = self._has_gpus[:first].copy(), self._is_there[:first].copy()
        self._accepted = {marks: known[:first].copy() for marks, known in self._accepted.items()}
        self._ranks = None

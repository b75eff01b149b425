"""The one placement engine: scale-up, scale-down and scheduling ask it what fits where.

Pods of equal shape fit equally, so each question is about one shape and a count, never about single pods.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.placement.constraints import NodeMatcher, members_that_fit
from gpu_autoscaler.core.placement.pod_affinity import Tally
from gpu_autoscaler.core.placement.preference_scores import bin_keys, has_no_preference
from gpu_autoscaler.core.placement.ranking import DEFAULT_PLACEMENT, Ranking
from gpu_autoscaler.core.placement.resources import FIRST_SLICE, Bools, Ints, Kinds, kinds_of, resources, row, rows
from gpu_autoscaler.core.placement.shapes import Bin, Shape
from gpu_autoscaler.core.placement.topology import PodTopology
from gpu_autoscaler.model.offers import CapacityType


class _Columns(NamedTuple):
    """What some bins have, and take, as arrays that nobody writes to."""

    kinds: Kinds  # of slices among what is free
    free: Ints
    readiness: Ints
    has_gpus: Bools
    is_on_demand: Bools
    matcher: NodeMatcher

    @classmethod
    def of(cls, bins: tuple[Bin, ...]) -> "_Columns":
        kinds = kinds_of(entry.free for entry in bins)
        return cls(
            kinds=kinds,
            free=rows((entry.free for entry in bins), kinds),
            readiness=np.array([int(entry.readiness) for entry in bins], dtype=np.int64),
            has_gpus=np.array([entry.has_gpus for entry in bins], dtype=np.bool_),
            is_on_demand=np.array([entry.capacity_type is CapacityType.ON_DEMAND for entry in bins], dtype=np.bool_),
            matcher=NodeMatcher(bins),
        )


# Of the bins that a plan begins with, which the next plan begins with too where nothing was said of a node since.
_columns = cached_by_identity(2)(_Columns.of)


class _Fixed:
    """Places in a given order, whatever fits there."""

    def __init__(self, places: Sequence[int]) -> None:
        self._places = places

    def __call__(self, _: Ints) -> Sequence[int]:
        """The places."""
        return self._places


class FreeCapacity:
    """Free room during one calculation: a scratch pad that is filled, and emptied again to where it was marked.

    Bins are rows of arrays, so a shape is asked for in all of them at once. Equal bins in any order give equal answers:
    equal scores fall to the smallest key.
    """

    def __init__(self, bins: Iterable[Bin], placement: str = DEFAULT_PLACEMENT, waiting: Iterable[Shape] = ()) -> None:
        """`placement` names the policy by which nodes are filled, `waiting` are the shapes that will want room."""
        self._bins: list[Bin] = []  # as they were put, by place
        self._places: dict[str, int] = {}
        self._kinds: Kinds = ()  # of slices, in order of their columns
        self._free = np.empty((0, FIRST_SLICE), dtype=np.int64)
        self._readiness = np.empty(0, dtype=np.int64)
        self._has_gpus = np.empty(0, dtype=np.bool_)
        self._is_on_demand = np.empty(0, dtype=np.bool_)
        self._is_there = np.empty(0, dtype=np.bool_)
        self._ranks: Ints | None = None  # of the keys; None: a bin came since
        self._matchers: list[NodeMatcher] = []  # of bins as they were put together
        self._topology = PodTopology()
        self._elsewhere: Callable[[Shape, str], Collection[str]] = _nowhere
        self._undo: list[Callable[[], None]] = []
        there = tuple(bins)
        self._ranking = Ranking(placement, there, waiting)
        self._put(there, _columns(there))

    def __getitem__(self, key: str) -> Bin:
        place = self._places[key]
        if not self._is_there[place]:
            raise KeyError(key)
        return msgspec.structs.replace(self._bins[place], free=resources(self._free[place], self._kinds))

    def original_bin(self, key: str) -> Bin:
        """The bin as it was put: its free room is that of then."""
        return self._bins[self._places[key]]

    def __contains__(self, key: str) -> bool:
        place = self._places.get(key)
        return place is not None and bool(self._is_there[place])

    def put(self, entry: Bin) -> None:
        """Add a bin whose key was never in this room."""
        self.put_all((entry,))

    def put_all(self, entries: Iterable[Bin]) -> None:
        """Add bins, as `put` does one."""
        added = tuple(entries)
        self._put(added, _Columns.of(added))

    def _put(self, added: tuple[Bin, ...], columns: "_Columns") -> None:
        first = len(self._bins)
        for place, entry in enumerate(added, first):
            if self._places.setdefault(entry.key, place) != place:
                raise ValueError(f"bin {entry.key} is put into the room twice")
        self._bins += added
        free = self._in_own_columns(columns)
        self._free = np.concatenate((self._free, free))
        self._readiness = np.concatenate((self._readiness, columns.readiness))
        self._has_gpus = np.concatenate((self._has_gpus, columns.has_gpus))
        self._is_on_demand = np.concatenate((self._is_on_demand, columns.is_on_demand))
        self._is_there = np.append(self._is_there, np.ones(len(added), dtype=np.bool_))
        self._matchers.append(columns.matcher)
        self._topology.set_bins(self._bins)
        self._ranks = None
        self._undo.append(partial(self._forget, first))

    def _in_own_columns(self, added: "_Columns") -> Ints:
        """What is added, in the room's order of columns; a kind that comes for the first time has its column now."""
        new = tuple(kind for kind in added.kinds if kind not in self._kinds)
        if new:
            self._kinds += new
            self._free = np.pad(self._free, ((0, 0), (0, len(new))))
        if added.kinds == self._kinds:
            return added.free
        free = np.zeros((added.free.shape[0], FIRST_SLICE + len(self._kinds)), dtype=np.int64)
        free[:, :FIRST_SLICE] = added.free[:, :FIRST_SLICE]
        for number, kind in enumerate(added.kinds, FIRST_SLICE):
            free[:, FIRST_SLICE + self._kinds.index(kind)] = added.free[:, number]
        return free

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
        if count <= 0 or not self._bins:
            return ()
        wanted = [self._places[key] for key in prefers if key in self]
        return self._place(shape, count, lambda members: (*wanted, *self._best_first(shape, members)))

    def place_on(self, keys: Iterable[str], shape: Shape, count: int) -> tuple[str, ...]:
        """Place as many as fit on these bins alone, in their order; keys that are not in the room are passed over."""
        places = [self._places[key] for key in keys if key in self]
        return self._place(shape, count, _Fixed(places)) if places else ()

    def place_counts(self, counts: Mapping[str, int], shape: Shape) -> tuple[str, ...]:
        """Place so many on each of these bins, as far as they fit, and return the bins' keys in their order.

        Who else stands near is not looked at, as those may be placed later: `misplaced` does, when all have come.
        """
        keys = [key for key in counts if key in self]
        if not keys:
            return ()
        places = [self._places[key] for key in keys]
        accepted = self._accepted(shape)[places]
        members = members_that_fit(shape, self._free[places], accepted, self._kinds)
        placed: list[str] = []
        for key, place, fitting in zip(keys, places, members.tolist(), strict=True):
            taken = min(counts[key], fitting)
            if taken:
                self._fill(place, shape, taken)
                placed += [key] * taken
        return tuple(placed)

    def misplaced(self, keys: Iterable[str], shape: Shape, open_counts: Mapping[Tally, int]) -> tuple[str, ...]:
        """Return the bins of these on which a member stands that may not, by the pods near it.

        `open_counts` are pods of a tally that have no place yet: they may stand where they make it even.
        """
        stays = self._topology.bins_kept(
            shape.pod_constraints,
            self._accepted(shape),
            self._is_there,
            lambda key: self._elsewhere(shape, key),
            open_counts,
        )
        return tuple(key for key in keys if not stays[self._places[key]])

    def remove_members(self, keys: Iterable[str], shape: Shape) -> None:
        """Members that were placed on these bins, one for each key, are there no more."""
        for key in keys:
            self._fill(self._places[key], shape, -1)

    def _place(self, shape: Shape, count: int, in_order: Callable[[Ints], Iterable[int]]) -> tuple[str, ...]:
        """Place as many as fit, at most `count`, on the places that `in_order` names for the members that fit."""
        # Each pod may close bins to the next one, and open others; or make its bin the worse for the next.
        is_at_once = shape.pod_constraints.is_any and (self._ranking.fills_up or isinstance(in_order, _Fixed))
        is_at_once = is_at_once and not shape.preferences.depends_on_pods
        at_once_max = count if is_at_once else 1
        placed: list[str] = []
        is_going_on = count > 0
        while is_going_on:
            before, members = len(placed), self._members_that_fit(shape)
            if not members.any():
                break
            for place in in_order(members):
                taken = min(int(members[place]), count - len(placed), at_once_max)
                if taken > 0:
                    members[place] -= taken
                    self._fill(place, shape, taken)
                    placed += [self._bins[place].key] * taken
                if len(placed) == count or len(placed) - before == at_once_max:
                    break
            self._ranking.taken(len(placed) - before)
            is_going_on = not is_at_once and before < len(placed) < count
        return tuple(placed)

    def note(self, key: str, shape: Shape) -> None:
        """A member stands in this bin whose amounts it has given already: its neighbours are to know."""
        if shape.pod_constraints.tallies:
            place = self._places[key]
            self._topology.add(place, shape.pod_constraints, 1)
            self._undo.append(partial(self._topology.add, place, shape.pod_constraints, -1))

    def count_places(self, shape: Shape, count: int) -> int:
        """How many members have room, at most `count`; nothing is placed."""
        if shape.pod_constraints.is_any:
            return min(int(self._members_that_fit(shape).sum()), count)
        mark = self.mark()
        found = len(self.place_most(shape, count))
        self.rollback(mark)
        return found

    def add_new_domains(self, elsewhere: Callable[[Shape, str], Collection[str]]) -> None:
        """Spread members also over domains in which there is no bin yet: `elsewhere` says those open to a shape."""
        self._elsewhere = elsewhere

    def open_zones(self, shape: Shape, zones: Sequence[str | None]) -> Bools:
        """Return for nodes that are not there yet, by their zones, whether the rules let a member on one of them."""
        return self._topology.open_new_nodes(
            shape.pod_constraints, self._accepted(shape), self._is_there, lambda key: self._elsewhere(shape, key), zones
        )

    def domains_of(self, shape: Shape, key: str) -> frozenset[str]:
        """The values of a label that bins have which are right for the shape in everything but room and neighbours."""
        values = (self._bins[place].labels.get(key) for place in np.flatnonzero(self._accepted(shape)))
        return frozenset(value for value in values if value is not None)

    def counts_by_domain(self, key: str, tally: Tally) -> dict[str, int]:
        """How many pods of the tally stand in each domain that has a bin; a domain is a value of the label `key`."""
        return self._topology.counts_by_domain(key, tally, self._is_there)

    def _members_that_fit(self, shape: Shape) -> Ints:
        accepted = self._accepted(shape)
        members = members_that_fit(shape, self._free, accepted, self._kinds)
        if shape.pod_constraints.is_any:
            return members
        is_open = self._topology.open_bins(
            shape.pod_constraints, accepted, self._is_there, lambda key: self._elsewhere(shape, key)
        )
        return np.where(is_open, members, 0)

    def _accepted(self, shape: Shape) -> Bools:
        return np.concatenate([part.by(shape) for part in self._matchers]) & self._is_there

    def _best_first(self, shape: Shape, members: Ints) -> list[int]:
        """Places that take a member, as the policy has it: what is real before what is coming, nodes whose GPUs nobody
        asks for last, and what the shape likes before what it does not.

        Of what it likes as much, work that may be on spot leaves on-demand nodes for last: they are dearer, and one
        that new work always comes to never empties.
        """
        fitting = np.flatnonzero(members)
        if self._ranks is None:
            order = sorted(range(len(self._bins)), key=lambda place: self._bins[place].key)
            self._ranks = np.empty(len(order), dtype=np.int64)
            self._ranks[order] = np.arange(len(order))
        is_blocked = self._has_gpus[fitting] & (not shape.resources.has_gpus)  # GPUs that would wait for nothing
        is_dear = self._is_on_demand[fitting] & shape.is_spot_allowed
        keys = self._ranking.keys(
            shape,
            self._free[fitting],
            lambda: np.array([self._bins[place].gpus_count for place in fitting], dtype=np.int64),
            lambda: [self._bins[place].key for place in fitting],
        )
        liked = self._liked(shape, fitting)
        ranked = np.lexsort((self._ranks[fitting], *keys, is_dear, *liked, is_blocked, self._readiness[fitting]))
        return [int(place) for place in fitting[ranked]]

    def _liked(self, shape: Shape, places: Ints) -> tuple[Ints, ...]:
        """Sort keys, of which the first counts least."""
        if has_no_preference(shape, self._matchers):
            return ()
        liked = bin_keys(shape, self._matchers, self._topology, self._is_there)
        return tuple(each[places] for each in liked)

    def _fill(self, place: int, shape: Shape, count: int) -> None:
        self._add(place, shape, count)
        self._undo.append(partial(self._add, place, shape, -count))

    def _add(self, place: int, shape: Shape, count: int) -> None:
        """Add members to the bin; fewer than none takes them away again."""
        self._free[place] -= np.array(row(shape.resources, self._kinds), dtype=np.int64) * count
        if shape.pod_constraints.tallies:
            self._topology.add(place, shape.pod_constraints, count)

    def _come_back(self, place: int) -> None:
        self._is_there[place] = True

    def _forget(self, first: int) -> None:
        """Leave out the bins that were put last, which begin at this place."""
        for entry in self._bins[first:]:
            del self._places[entry.key]
        del self._bins[first:]
        self._free, self._readiness = self._free[:first].copy(), self._readiness[:first].copy()
        self._has_gpus, self._is_there = self._has_gpus[:first].copy(), self._is_there[:first].copy()
        self._is_on_demand = self._is_on_demand[:first].copy()
        self._matchers.pop()
        self._topology.set_bins(self._bins)
        self._ranks = None


def _nowhere(_shape: Shape, _key: str) -> Collection[str]:
    return ()

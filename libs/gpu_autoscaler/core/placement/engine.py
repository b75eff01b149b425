"""The one placement engine: scale-up, scale-down and the job queue query it for what fits where.

Pods of equal shape fit equally, so each query is about one shape and a count, never about single pods.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np

from gpu_autoscaler.core.placement.bin_columns import Bins, Columns
from gpu_autoscaler.core.placement.constraints import members_that_fit
from gpu_autoscaler.core.placement.measured_use import UNKNOWN_USE, MeasuredUse
from gpu_autoscaler.core.placement.pod_affinity import SpreadConstraint, Tally
from gpu_autoscaler.core.placement.preference_scores import bin_keys, has_no_preference
from gpu_autoscaler.core.placement.ranking import DEFAULT_PLACEMENT, Ranking
from gpu_autoscaler.core.placement.resources import FIRST_SLICE, GPU, Bools, Ints, resources, row
from gpu_autoscaler.core.placement.shapes import Bin, BinReadiness, Shape, tolerating_all
from gpu_autoscaler.core.placement.topology import PodTopology, SpreadBins
from gpu_autoscaler.model import labels

# Fewer bins than this part of all are sorted alone.
_RANKED_ALONE_RATIO = 8


class _Fixed:
    """Bins in a given order, whatever fits there."""

    def __init__(self, places: Sequence[int]) -> None:
        self._places = places

    def __call__(self, _: Ints) -> Sequence[int]:
        """Return the bins."""
        return self._places


class FreeCapacity:
    """Free capacity during one calculation: a scratch pad with rollback to a mark.

    Bins are rows of arrays, so a shape is evaluated in all of them at once. Equal bins in any order give equal answers:
    ties are broken by the smallest key.
    """

    def __init__(
        self,
        bins: Iterable[Bin],
        placement: str = DEFAULT_PLACEMENT,
        waiting: Iterable[Shape] = (),
        used: Mapping[str, MeasuredUse] = UNKNOWN_USE,
    ) -> None:
        """Start with these bins. `placement` names the packing policy, `waiting` are shapes that will need capacity,
        `used` is the measured use of bins."""
        there = bins if isinstance(bins, Bins) else Bins(bins)
        columns = there.columns
        self._bins: list[Bin] = list(there)  # as they were added, by position
        self._places = dict(there.places)
        _require_new(there, ())
        self._kinds = columns.kinds  # of slices, in column order
        self._free = columns.free.copy()
        self._readiness, self._has_gpus, self._is_on_demand = columns.readiness, columns.has_gpus, columns.is_on_demand
        self._is_there = np.ones(len(there), dtype=np.bool_)
        self._is_open: Bools = self._readiness != BinReadiness.CLOSED  # takes more members
        self._ranks: Ints | None = None  # of the keys; None: a bin was added since
        self._matchers = [columns.matcher]  # one for each batch of bins added
        self._topology = PodTopology(self._bins)
        self._elsewhere: Callable[[Shape, str], Collection[str]] = _no_domains
        self._undo: list[tuple[int, Callable[[], None]]] = []  # with the version before
        self._version = 0  # of bins and free amounts: after a rollback that of the mark
        self._versions_count = 0
        self._fitting: dict[Shape, tuple[int, Ints]] = {}  # of shapes without pod constraints, at this version
        self._ranking = Ranking(placement, there, waiting, used)

    def __getitem__(self, key: str) -> Bin:
        place = self._places[key]
        if not (self._is_there[place] and self._is_open[place]):
            raise KeyError(key)
        return msgspec.structs.replace(self._bins[place], free=resources(self._free[place], self._kinds))

    def original_bin(self, key: str) -> Bin:
        """Return the bin as it was added, with the free amounts of then."""
        return self._bins[self._places[key]]

    def with_free_gpus(self) -> Iterator[tuple[Bin, int]]:
        """Yield the bins that take members and have whole GPUs free, and how many."""
        counts = np.where(self._is_there & self._is_open, self._free[:, GPU], 0)
        for place in np.flatnonzero(counts > 0).tolist():
            yield self._bins[place], int(counts[place])

    def __contains__(self, key: str) -> bool:
        place = self._places.get(key)
        return place is not None and bool(self._is_there[place] and self._is_open[place])

    def put(self, entry: Bin) -> None:
        """Add a bin whose key was never here before."""
        self.put_all((entry,))

    def put_all(self, entries: Iterable[Bin]) -> None:
        """Add several bins, like `put`."""
        added = Bins(entries)
        columns, first, is_new = added.columns, len(self._bins), np.ones(len(added), dtype=np.bool_)
        _require_new(added, self._places.keys())
        self._places |= {key: place + first for key, place in added.places.items()}
        self._bins += added
        free = self._in_own_columns(columns)  # may add columns to `_free`
        self._free = np.concatenate((self._free, free))
        self._readiness = np.concatenate((self._readiness, columns.readiness))
        self._has_gpus = np.concatenate((self._has_gpus, columns.has_gpus))
        self._is_on_demand = np.concatenate((self._is_on_demand, columns.is_on_demand))
        self._is_there = np.concatenate((self._is_there, is_new))
        self._is_open = np.concatenate((self._is_open, columns.readiness != BinReadiness.CLOSED))
        self._matchers.append(columns.matcher)
        self._topology.follow(first)
        self._ranks = None
        self._changed(partial(self._forget, first))

    def _in_own_columns(self, added: Columns) -> Ints:
        """Return the added amounts in this object's column order; a new kind of slice gets its column now."""
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

    def close(self, key: str) -> None:
        """Place nothing more on a bin. Pod constraints still count the pods on it."""
        place = self._places[key]
        self._is_open[place] = False
        self._changed(partial(self._reopen, place))

    def remove(self, key: str) -> None:
        """Remove a bin, if it is there, also a closed one; the caller places again what was placed on it."""
        place = self._places.get(key)
        if place is not None and self._is_there[place]:
            self._is_there[place] = False
            self._changed(partial(self._restore, place))

    def mark(self) -> int:
        """Return a point to come back to with `rollback`."""
        return len(self._undo)

    def rollback(self, mark: int) -> None:
        """Undo everything since the mark."""
        while len(self._undo) > mark:
            self._version, undo = self._undo.pop()
            undo()

    def _changed(self, undo: Callable[[], None]) -> None:
        self._undo.append((self._version, undo))
        self._versions_count += 1
        self._version = self._versions_count

    def place_gang(
        self, shape: Shape, count: int, prefers: tuple[str, ...] = (), avoided: Collection[str] = ()
    ) -> tuple[str, ...] | None:
        """Place all members and return their bin keys in order, or return None and change nothing."""
        mark = self.mark()
        placed = self.place_most(shape, count, prefers, avoided)
        if len(placed) == count:
            return placed
        self.rollback(mark)
        return None

    def place_most(
        self, shape: Shape, count: int, prefers: tuple[str, ...] = (), avoided: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Place as many members as fit, at most `count`, and return their bin keys in order.

        Bins in `prefers` are filled first, in their order; bins in `avoided` take none.
        """
        if count <= 0 or not self._bins:
            return ()
        wanted = [self._places[key] for key in prefers if key in self and key not in avoided]
        closed = [self._places[key] for key in avoided if key in self._places]
        return self._place(shape, count, lambda members: (*wanted, *self._best_first(shape, members)), closed)

    def place_on(self, keys: Iterable[str], shape: Shape, count: int) -> tuple[str, ...]:
        """Place as many as fit on these bins alone, in their order; unknown keys are skipped."""
        places = [self._places[key] for key in keys if key in self]
        return self._place(shape, count, _Fixed(places)) if places else ()

    def fitting(self, keys: Iterable[str], shape: Shape) -> tuple[str, ...]:
        """Return those of these bins that take a member of the shape now, in their order; unknown keys are skipped."""
        members = self._members_that_fit(shape)
        return tuple(key for key in keys if key in self and members[self._places[key]])

    def place_counts(self, counts: Mapping[str, int], shape: Shape) -> tuple[str, ...]:
        """Place this many on each of these bins, as far as they fit, and return the bin keys in order.

        Pod constraints are not evaluated, as other pods may be placed later: `misplaced` evaluates them when all are
        placed.
        """
        keys = [key for key in counts if key in self]
        if not keys:
            return ()
        places = [self._places[key] for key in keys]
        accepted = self._accepted(shape)[places]
        members = members_that_fit(shape, self._free[places], accepted, self._kinds)
        taken = np.minimum(np.array([counts[key] for key in keys], dtype=np.int64), members)
        self._add_all(places, shape, taken)
        self._changed(partial(self._add_all, places, shape, -taken))
        return tuple(key for key, count in zip(keys, taken.tolist(), strict=True) for _ in range(count))

    def misplaced(self, keys: Iterable[str], shape: Shape, open_counts: Mapping[Tally, int]) -> tuple[str, ...]:
        """Return those of the bins on which a member violates its pod constraints.

        `open_counts` are pods of a tally without a place yet: they may restore an even spread.
        """
        stays = self._topology.bins_kept(
            shape.pod_constraints,
            self._spread_bins(shape),
            self._is_there,
            lambda key: self._elsewhere(shape, key),
            open_counts,
        )
        return tuple(key for key in keys if not stays[self._places[key]])

    def remove_members(self, keys: Iterable[str], shape: Shape) -> None:
        """Remove members that were placed on these bins, one for each key."""
        for key in keys:
            self._fill(self._places[key], shape, -1)

    def _place(
        self, shape: Shape, count: int, in_order: Callable[[Ints], Iterable[int]], closed: Sequence[int] = ()
    ) -> tuple[str, ...]:
        """Place as many as fit, at most `count`, in the order that `in_order` gives for the bins' member counts; bins
        at the places `closed` take none."""
        # A placed pod may close bins to the next one, open others, or make its bin worse for the next.
        is_at_once = shape.pod_constraints.is_any and (self._ranking.fills_up or isinstance(in_order, _Fixed))
        is_at_once = is_at_once and not shape.preferences.depends_on_pods
        at_once_max = count if is_at_once else 1
        placed: list[str] = []
        is_going_on = count > 0
        while is_going_on:
            before, members = len(placed), self._members_that_fit(shape)
            if closed:
                members[closed] = 0
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
        """Record a member on a bin that was added with its amounts subtracted; pod constraints count it."""
        if shape.pod_constraints.tallies:
            place = self._places[key]
            self._topology.add(place, shape.pod_constraints, 1)
            self._changed(partial(self._topology.add, place, shape.pod_constraints, -1))

    def count_places(self, shape: Shape, count: int, avoided: Collection[str] = ()) -> int:
        """Return how many members fit on bins that are not in `avoided`, at most `count`; nothing is placed."""
        if shape.pod_constraints.is_any and not avoided:
            return min(int(self._members_that_fit(shape).sum()), count)
        mark = self.mark()
        placed_count = len(self.place_most(shape, count, avoided=avoided))
        self.rollback(mark)
        return placed_count

    def add_new_domains(self, elsewhere: Callable[[Shape, str], Collection[str]]) -> None:
        """Spread members also over domains without a bin: `elsewhere` returns those open to a shape."""
        self._elsewhere = elsewhere

    def open_zones(self, shape: Shape, zones: Sequence[str | None]) -> Bools:
        """Return for nodes that do not exist yet, by zone, whether pod constraints allow a member there."""
        return self._topology.open_new_nodes(
            shape.pod_constraints,
            self._spread_bins(shape),
            self._is_there,
            lambda key: self._elsewhere(shape, key),
            zones,
        )

    def domains_of(self, shape: Shape, key: str) -> frozenset[str]:
        """Return the values of a label on bins that satisfy the shape except for amounts and pod constraints."""
        suitable = self._suitable(shape)
        if key != labels.HOSTNAME:
            return self._topology.domains(key).of(suitable)
        hosts = (self._bins[place].labels.get(key) for place in np.flatnonzero(suitable))  # known by their bins there
        return frozenset(host for host in hosts if host is not None)

    def spread_domains(self, shape: Shape, spread: SpreadConstraint) -> frozenset[str]:
        """Return the domains of bins over which the constraint spreads the shape."""
        return self._topology.domains(spread.topology_key).of(self._spread_bins(shape)(spread))

    def counts_by_domain(self, key: str, tally: Tally) -> dict[str, int]:
        """Return how many pods of the tally each domain with a bin has; a domain is a value of the label `key`."""
        return self._topology.counts_by_domain(key, tally, self._is_there)

    def _members_that_fit(self, shape: Shape) -> Ints:
        """Return how many members each bin takes. Many items have the same shape, and find no free capacity."""
        is_any = shape.pod_constraints.is_any
        version, fitting = self._fitting.get(shape, (-1, None)) if is_any else (-1, None)
        if fitting is not None and version == self._version:
            return fitting.copy()
        accepted = self._accepted(shape)
        members = members_that_fit(shape, self._free, accepted, self._kinds)
        if is_any:
            self._fitting[shape] = (self._version, members.copy())
            return members
        is_open = self._topology.open_bins(
            shape.pod_constraints, self._spread_bins(shape), self._is_there, lambda key: self._elsewhere(shape, key)
        )
        return np.where(is_open, members, 0)

    def _suitable(self, shape: Shape) -> Bools:
        return np.concatenate([part.by(shape) for part in self._matchers]) & self._is_there

    def _spread_bins(self, shape: Shape) -> SpreadBins:
        return lambda spread: self._suitable(tolerating_all(shape) if spread.is_over_tainted_nodes else shape)

    def _accepted(self, shape: Shape) -> Bools:
        return self._suitable(shape) & self._is_open

    def _best_first(self, shape: Shape, members: Ints) -> list[int]:
        """Return the bins that take a member, the best first.

        Order: existing before coming nodes, nodes with GPUs that the shape does not need last, then preferences, then
        on-demand nodes last for work that may run on spot (they cost more, and new work would keep them from becoming
        empty), then the packing policy.
        """
        fitting = np.flatnonzero(members)
        ranks = self._ranks_of(fitting)
        is_blocked = self._has_gpus[fitting] & (not shape.resources.has_gpus)  # its GPUs would stay idle
        is_expensive = self._is_on_demand[fitting] & shape.is_spot_allowed
        keys = self._ranking.keys(
            shape,
            self._free[fitting],
            lambda: np.array([self._bins[place].gpus_count for place in fitting], dtype=np.int64),
            lambda: [self._bins[place].key for place in fitting],
        )
        preferred = self._preference_keys(shape, fitting)
        ranked = np.lexsort((ranks, *keys, is_expensive, *preferred, is_blocked, self._readiness[fitting]))
        return [int(place) for place in fitting[ranked]]

    def _ranks_of(self, places: Ints) -> Ints:
        """Return sort keys of these bins by their keys; those of all bins are kept while none is added."""
        if self._ranks is None and places.size > len(self._bins) // _RANKED_ALONE_RATIO:
            self._ranks = self._ranked(range(len(self._bins)))
        return self._ranked(places) if self._ranks is None else self._ranks[places]

    def _ranked(self, places: Sequence[int] | Ints) -> Ints:
        keys = [self._bins[place].key for place in places]
        ranks = np.empty(len(keys), dtype=np.int64)
        ranks[sorted(range(len(keys)), key=keys.__getitem__)] = np.arange(len(keys))
        return ranks

    def _preference_keys(self, shape: Shape, places: Ints) -> tuple[Ints, ...]:
        """Return sort keys of the shape's preferences, the least significant first."""
        if has_no_preference(shape, self._matchers):
            return ()
        return tuple(key[places] for key in bin_keys(shape, self._matchers, self._topology, self._is_there))

    def _fill(self, place: int, shape: Shape, count: int) -> None:
        self._add(place, shape, count)
        self._changed(partial(self._add, place, shape, -count))

    def _add(self, place: int, shape: Shape, count: int) -> None:
        """Add members to the bin; a negative count removes them."""
        self._free[place] -= np.array(row(shape.resources, self._kinds), dtype=np.int64) * count
        if shape.pod_constraints.tallies:
            self._topology.add(place, shape.pod_constraints, count)

    def _add_all(self, places: Sequence[int], shape: Shape, counts: Ints) -> None:
        """Add this number of members to each of these bins, all different; negative counts remove them."""
        self._free[places] -= np.outer(counts, np.array(row(shape.resources, self._kinds), dtype=np.int64))
        for place, count in zip(places, counts.tolist(), strict=True) if shape.pod_constraints.tallies else ():
            if count:
                self._topology.add(place, shape.pod_constraints, count)

    def _restore(self, place: int) -> None:
        self._is_there[place] = True

    def _reopen(self, place: int) -> None:
        self._is_open[place] = True

    def _forget(self, first: int) -> None:
        """Remove the bins from this position on, which were added last."""
        for entry in self._bins[first:]:
            del self._places[entry.key]
        del self._bins[first:]
        self._free, self._readiness = self._free[:first].copy(), self._readiness[:first].copy()
        self._has_gpus, self._is_there = self._has_gpus[:first].copy(), self._is_there[:first].copy()
        self._is_open = self._is_open[:first].copy()
        self._is_on_demand = self._is_on_demand[:first].copy()
        self._matchers.pop()
        self._topology.follow(first)
        self._ranks = None


def _require_new(added: Bins, known: Collection[str]) -> None:
    if len(added.places) < len(added) or not added.places.keys().isdisjoint(known):
        raise ValueError(f"bin added twice: one of {', '.join(entry.key for entry in added)}")


def _no_domains(_shape: Shape, _key: str) -> Collection[str]:
    return ()

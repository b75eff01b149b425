"""Lots of demand: what is served together, in the order of service, and what became of each."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec

from gpu_autoscaler.core.demand.elastic import OrderedBins
from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.nodes.views import NodeView
from gpu_autoscaler.core.placement.engine import FreeCapacity
from gpu_autoscaler.core.placement.pod_affinity import Tally
from gpu_autoscaler.core.placement.shapes import Shape
from gpu_autoscaler.core.provisioning.topology_domains import restricted_to
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reasons.defer import DeferReason


class Lot(msgspec.Struct, frozen=True, kw_only=True):
    """Items served together: members of one gang, or single pods of equal shape that may share nodes."""

    items: tuple[DemandItem, ...]

    @property
    def first(self) -> DemandItem:
        """The item that is served first."""
        return self.items[0]

    @property
    def oldest(self) -> DemandItem:
        """The item that waits longest: the lot waits no longer than it may. It need not be the first: a deadline or a
        fair share may come before the time of waiting."""
        return min(self.items, key=lambda item: item.since)

    @property
    def key(self) -> str:
        """The key of the first item."""
        return self.first.key

    @property
    def shape(self) -> Shape:
        """The shape of each member."""
        return self.first.shape

    @property
    def members_count(self) -> int:
        """Members of all items."""
        return sum(item.member_count for item in self.items)

    @property
    def sinces(self) -> tuple[Instant, ...]:
        """Since when each member waits, in the order of service."""
        return tuple(item.since for item in self.items for _ in range(item.member_count))

    def restricted_to(self, key: str, value: str) -> "Lot":
        """Return the lot restricted to nodes whose label `key` has this value."""
        items = tuple(msgspec.structs.replace(item, shape=restricted_to(item.shape, key, value)) for item in self.items)
        return Lot(items=items)


class LotOutcome(msgspec.Struct, kw_only=True):
    """Where the members of one lot are placed so far, and why the others are not."""

    lot: Lot
    kept: tuple[str, ...] = ()  # of `placed`, the places that were bought for the lot by earlier plans
    placed: tuple[str, ...] = ()  # bin keys, one for each member
    reason: DeferReason | None = None  # why members are missing
    is_closed: bool = False  # nothing is bought for the lot now, whatever is available

    @property
    def missing_count(self) -> int:
        """Members without a place."""
        return self.lot.members_count - len(self.placed)


class KeptPlaces:
    """Places that earlier plans bought for lots that still wait. Taken by other lots, they would be bought again."""

    def __init__(self, lots: Sequence[Lot], views: tuple[NodeView, ...], free_capacity: FreeCapacity) -> None:
        """Place the members of all lots on what was bought for them. What is blocked keeps nothing: others may use it.

        Each pod first keeps its own place, as its plan assigned it. Placed one lot after the other, some would take
        what was bought for the next, or block each other by their spread constraints.
        """
        self._free_capacity = free_capacity
        self._ordered: OrderedBins = OrderedBins(views)
        self._keys: dict[str, tuple[str, ...]] = {}  # by the key of a lot
        waiting = [lot for lot in lots if lot.first.is_bought_for and lot.first.blocked is None]
        waiting = waiting if self._ordered.any else []
        own = {lot.key: Counter(key for item in lot.items if (key := self._ordered.own(item))) for lot in waiting}
        self._keys = {lot.key: free_capacity.place_counts(own[lot.key], lot.shape) for lot in waiting}
        self._take_back_misplaced(waiting)
        for lot in waiting:
            kept = self._keys[lot.key]
            keys = dict.fromkeys(key for item in lot.items for key in self._ordered.of(item))
            if keys and len(kept) < lot.members_count:
                self._keys[lot.key] = kept + free_capacity.place_on(keys, lot.shape, lot.members_count - len(kept))

    def _take_back_misplaced(self, waiting: Sequence[Lot]) -> None:
        open_counts: Counter[Tally] = Counter()
        for lot in waiting:
            missing_count = lot.members_count - len(self._keys[lot.key])
            open_counts.update(dict.fromkeys(lot.shape.pod_constraints.tallies if missing_count else (), missing_count))
        for lot in waiting:
            kept = self._keys[lot.key]
            if kept and not lot.shape.pod_constraints.is_any:
                misplaced = self._free_capacity.misplaced(kept, lot.shape, open_counts)
                self._free_capacity.remove_members(misplaced, lot.shape)
                self._keys[lot.key] = tuple(key for key in kept if key not in misplaced)

    def of(self, lot: Lot) -> tuple[str, ...]:
        """Return the bin keys of the lot's kept places."""
        return self._keys.get(lot.key, ())

    def release(self, lot: Lot) -> tuple[str, ...]:
        """Give up the lot's kept places and return their bin keys."""
        keys = self._keys.pop(lot.key, ())
        self._free_capacity.remove_members(keys, lot.shape)
        return keys

    def by_item(self, outcome: LotOutcome) -> Iterator[tuple[DemandItem, tuple[str, ...]]]:
        """Yield each item of the lot with its places; the last items have none where members are missing.

        A pod has the place that was bought for it, if that is among them.
        """
        lot, others = outcome.lot, outcome.placed
        own: dict[str, str] = {}
        if self.of(lot):
            left = Counter(outcome.placed)
            for item in lot.items:
                key = self._ordered.own(item)
                if key is not None and left[key]:
                    own[item.key] = key
                    left[key] -= 1
            others = tuple(left.elements())
        position = 0
        for item in lot.items:
            if item.key in own:
                yield item, (own[item.key],)
                continue
            yield item, others[position : position + item.member_count]
            position += item.member_count


def lots_of(demand: tuple[DemandItem, ...]) -> Iterator[Lot]:
    """Group the demand, which comes in the order of service, without putting lower priority before higher, or a job of
    a strict queue before one ahead of it that differs."""
    for _, equals in groupby(demand, key=lambda item: (item.is_bought_for, item.priority)):
        alike: dict[object, list[DemandItem]] = {}
        runs: dict[str, tuple[object, int]] = {}  # by strict queue: the key of its last items, and which run they are
        for item in equals:
            of_job = item.job_id if item.source is DemandSource.ELASTIC_MEMBER else None  # it waits for its own gang
            key: object = (
                item.key
                if item.member_count > 1
                else (
                    item.gang,
                    item.source,
                    of_job,
                    item.shape,
                    item.leaves,
                    item.prefers,
                    item.project,
                    item.strict_queue,
                    item.blocked,
                )
            )
            if item.strict_queue is not None:
                before, number = runs.get(item.strict_queue, (None, 0))
                key = runs[item.strict_queue] = (key, number + (key != before))
            alike.setdefault(key, []).append(item)
        for items in alike.values():
            yield Lot(items=tuple(items))


def launch_groups(lots: Sequence[Lot]) -> Iterator[tuple[Lot, ...]]:
    """Group consecutive lots that one purchase serves: the lots of a gang, or single pods of one priority.

    A lot with rules about pods unlike its own is served alone, so is one of a queue in which none passes another, and
    elastic members are served after everything else.
    """

    def group_of(lot: Lot) -> tuple[bool, int, bool, str | None]:
        first = lot.first
        is_alone = first.strict_queue is not None or not first.shape.pod_constraints.concerns_own_kind
        alone = first.gang or (first.key if is_alone else None)
        return first.is_bought_for, first.priority, first.source is DemandSource.ELASTIC_MEMBER, alone

    for _, group in groupby(lots, key=group_of):
        yield tuple(group)

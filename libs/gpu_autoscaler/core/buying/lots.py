"""Demand in lots: what is served together, in the order of service. Used by `core/scale_up.py`."""

from collections import Counter
from collections.abc import Iterator
from itertools import groupby

import msgspec

from gpu_autoscaler.core.buying.domains import bound
from gpu_autoscaler.core.demand_items import DemandItem, DemandSource
from gpu_autoscaler.core.further import Ordered
from gpu_autoscaler.core.placing.shapes import Shape
from gpu_autoscaler.model.observed import Instant


class Lot(msgspec.Struct, frozen=True, kw_only=True):
    """Items served together: one gang, or single pods that are alike and may share what is bought."""

    items: tuple[DemandItem, ...]

    @property
    def first(self) -> DemandItem:
        """The one that is served first."""
        return self.items[0]

    @property
    def shape(self) -> Shape:
        """Of each member."""
        return self.first.shape

    def bound_to(self, key: str, value: str) -> "Lot":
        """The same for one domain alone."""
        items = tuple(msgspec.structs.replace(item, shape=bound(item.shape, key, value)) for item in self.items)
        return Lot(items=items)

    @property
    def members_count(self) -> int:
        """Of all items."""
        return sum(item.member_count for item in self.items)

    @property
    def sinces(self) -> tuple[Instant, ...]:
        """Since when each member waits, in the order of service."""
        return tuple(item.since for item in self.items for _ in range(item.member_count))


def lots_of(demand: tuple[DemandItem, ...]) -> Iterator[Lot]:
    """Group the demand, which comes in the order of service, without putting lower priority before higher."""
    for _, equals in groupby(demand, key=lambda item: (item.is_bought_for, item.priority)):
        alike: dict[object, list[DemandItem]] = {}
        for item in equals:
            of_job = item.job_id if item.source is DemandSource.ELASTIC_MEMBER else None  # it waits for its own gang
            key = (
                item.key
                if item.member_count > 1
                else (item.gang, item.source, of_job, item.shape, item.leaves, item.prefers, item.project, item.blocked)
            )
            alike.setdefault(key, []).append(item)
        for items in alike.values():
            yield Lot(items=tuple(items))


def served_together(lots: tuple[Lot, ...]) -> Iterator[tuple[Lot, ...]]:
    """Single pods of one priority that follow each other are bought for at once; a gang, or what minds others than
    its like, for itself; members beyond a gang after all that are not."""

    def alike(lot: Lot) -> tuple[bool, int, bool, str | None]:
        first = lot.first
        alone = first.gang or (None if first.shape.company.is_plain else first.key)
        return first.is_bought_for, first.priority, first.source is DemandSource.ELASTIC_MEMBER, alone

    for _, run in groupby(lots, key=alike):
        yield tuple(run)


def shared_out(lot: Lot, placed: tuple[str, ...], kept: Ordered | None) -> Iterator[tuple[DemandItem, tuple[str, ...]]]:
    """Yield each item of the lot with its places; the last ones have none where they are too few.

    A pod has the place that was ordered for it, where that is among them; None: none was ordered for any.
    """
    own: dict[str, str] = {}
    others = placed
    if kept is not None:
        left = Counter(placed)
        for item in lot.items:
            key = kept.own(item)
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

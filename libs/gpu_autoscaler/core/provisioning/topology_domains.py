"""Topology domains of what is bought: a zone for each pod with a spread constraint, and one domain for a whole gang.

A node that does not exist yet is in a domain only if its offer or pool says so: the zone is known, the clique is not.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec
import numpy as np

from gpu_autoscaler.core.demand.items import DemandItem
from gpu_autoscaler.core.placement.engine import FreeCapacity
from gpu_autoscaler.core.placement.pod_affinity import PodConstraints, Tally
from gpu_autoscaler.core.placement.shapes import Shape
from gpu_autoscaler.core.provisioning.fleet.problem import NO_GROUP
from gpu_autoscaler.core.provisioning.offers import OfferCatalog
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.observed import Instant

# Domains that are tried for one gang in one plan; each try is a purchase that is rolled back if it fails.
_TRIES_COUNT_MAX = 16


class MissingMembers(msgspec.Struct, frozen=True, kw_only=True):
    """Members of one shape that have no place."""

    item: DemandItem  # the first of the items of equal shape
    sinces: tuple[Instant, ...]  # since when each of them waits, the oldest first

    @property
    def count(self) -> int:
        """Number of members."""
        return len(self.sinces)


def restricted_to(shape: Shape, key: str, value: str) -> Shape:
    """Return the shape restricted to nodes whose label `key` has this value."""
    selector = dict(shape.demands.node_selector) | {key: value}
    demands = msgspec.structs.replace(shape.demands, node_selector=tuple(sorted(selector.items())))
    return msgspec.structs.replace(shape, demands=demands)


# ---- zones of pods with spread constraints


def with_zones(
    wants: Sequence[MissingMembers], catalog: OfferCatalog, free_capacity: FreeCapacity
) -> list[tuple[int, MissingMembers]]:
    """Split the members by the zone that their spread constraints assign; return the parts with the number of the want.

    Zones are assigned before anything is bought: each pod, the oldest first, gets the cheapest zone that its
    constraints allow, so that they hold wherever a limit stops the purchase. Pods without an allowed zone are omitted.
    """
    shapes = {number: want.item.shape for number, want in enumerate(wants) if want.item.shape.pod_constraints.spreads}
    parts = [(number, want) for number, want in enumerate(wants) if number not in shapes]
    if not shapes:
        return parts
    zones = _ZoneAssigner(free_capacity, shapes, catalog)
    zoned: dict[tuple[int, str], list[Instant]] = {}
    waiting = sorted((since, number) for number in shapes for since in wants[number].sinces)
    for since, number in waiting:
        zone = zones.next(number)
        if zone is not None:
            zoned.setdefault((number, zone), []).append(since)
    for (number, zone), sinces in sorted(zoned.items()):
        item = wants[number].item
        item = msgspec.structs.replace(item, shape=restricted_to(item.shape, labels.ZONE, zone))
        parts.append((number, MissingMembers(item=item, sinces=tuple(sinces))))
    return sorted(parts, key=lambda part: part[0])


class _ZoneAssigner:
    """Assigns zones so that every spread constraint holds after each pod."""

    def __init__(self, free_capacity: FreeCapacity, shapes: Mapping[int, Shape], catalog: OfferCatalog) -> None:
        tallies = {spread.tally for shape in shapes.values() for spread in shape.pod_constraints.spreads}
        self._counts: dict[Tally, Counter[str]] = {
            tally: Counter(free_capacity.counts_by_domain(labels.ZONE, tally)) for tally in tallies
        }
        self._constraints = {number: shape.pod_constraints for number, shape in shapes.items()}
        self._prices = {number: _cheapest_by_zone(catalog, shape) for number, shape in shapes.items()}
        # Zones with suitable nodes count for the constraint although nothing may be bought there.
        self._eligible: dict[int, AbstractSet[str]] = {
            number: free_capacity.domains_of(shape, labels.ZONE) | self._prices[number].keys()
            for number, shape in shapes.items()
        }

    def next(self, number: int) -> str | None:
        """Return the cheapest allowed zone for one more pod of this want; None: none is allowed."""
        constraints, prices = self._constraints[number], self._prices[number]

        def rank(zone: str) -> tuple[int, int, str]:
            return prices[zone], max(self._counts[spread.tally][zone] for spread in constraints.spreads), zone

        chosen = min((zone for zone in prices if self._is_allowed(number, zone)), key=rank, default=None)
        if chosen is not None:
            for tally in constraints.tallies:
                if tally in self._counts:
                    self._counts[tally][chosen] += 1
        return chosen

    def _is_allowed(self, number: int, zone: str) -> bool:
        for spread in self._constraints[number].spreads:
            counts = self._counts[spread.tally]
            if counts[zone] + 1 - min(counts[other] for other in self._eligible[number]) > spread.skew_count_max:
                return False
        return True


def _cheapest_by_zone(catalog: OfferCatalog, shape: Shape) -> dict[str, int]:
    """Return the least price, in micro-dollars an hour, of each zone in which a node may be bought for the shape."""
    takes, micro_usd = catalog.members(shape) > 0, catalog.prices_micro_usd_per_hour
    prices = {zone: micro_usd[takes & is_there] for zone, is_there in catalog.is_in_zone.items()}
    return {zone: int(of_zone.min()) for zone, of_zone in prices.items() if of_zone.size}


def anti_affinity_groups(all_constraints: Sequence[PodConstraints]) -> list[int]:
    """Return a group for each, of which a node takes one pod; NO_GROUP without anti-affinity.

    Pods that keep apart from any of the same pods are in one group.
    """
    group_of: dict[Tally, int] = {}
    for number, constraints in enumerate(all_constraints):
        tallies = [term.tally for term in constraints.apart]
        joined = {group_of[tally] for tally in tallies if tally in group_of}
        own = min(joined, default=number)
        if len(joined) > 1:
            group_of.update({tally: own for tally, group in group_of.items() if group in joined})
        group_of.update(dict.fromkeys(tallies, own))
    return [
        group_of[all_constraint.apart[0].tally] if all_constraint.apart else NO_GROUP
        for all_constraint in all_constraints
    ]


# ---- one domain for a gang


def domains_for(
    key: str,
    wanted: Sequence[tuple[Shape, int]],
    free_capacity: FreeCapacity,
    catalog: OfferCatalog | None,
    coming: frozenset[str],
) -> tuple[str, ...]:
    """Return the domains that may have a place for all members of these shapes, in the order of trial.

    Domains of nodes that are on their way for them (`coming`, bin keys) come first, then those with free capacity for
    all, then the cheapest. Without a catalog nothing is bought.
    """
    by_shape = [free_capacity.domains_of(shape, key) for shape, _ in wanted]
    if catalog is not None:
        by_shape = [there | catalog.domains(shape, key) for there, (shape, _) in zip(by_shape, wanted, strict=True)]
    values = frozenset.intersection(*by_shape) - {""}
    own = {free_capacity[bin_key].labels.get(key) for bin_key in coming if bin_key in free_capacity}

    def order(value: str) -> tuple[bool, bool, int, str]:
        restricted = [(restricted_to(shape, key, value), count) for shape, count in wanted]
        has_capacity = all(free_capacity.count_places(shape, count) >= count for shape, count in restricted)
        return value not in own, not has_capacity, _price(restricted, catalog), value

    return tuple(sorted(values, key=order)[:_TRIES_COUNT_MAX])


def place_in_one_domain(key: str, shape: Shape, count: int, free_capacity: FreeCapacity) -> tuple[str, ...]:
    """Place all members in the first domain with capacity for them, and return their bin keys; empty: no domain has."""
    for value in domains_for(key, ((shape, count),), free_capacity, None, frozenset()):
        keys = free_capacity.place_gang(restricted_to(shape, key, value), count)
        if keys is not None:
            return keys
    return ()


def _price(wanted: Sequence[tuple[Shape, int]], catalog: OfferCatalog | None) -> int:
    """Return the sum of the least prices of nodes that take a member of each; a shape without an offer adds nothing."""
    if catalog is None:
        return 0
    prices = (catalog.prices_micro_usd_per_hour[np.flatnonzero(catalog.members(shape))] for shape, _ in wanted)
    return sum(int(of_shape.min()) for of_shape in prices if of_shape.size)

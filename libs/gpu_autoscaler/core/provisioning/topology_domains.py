"""Topology domains of what is bought: a zone for each pod with a spread constraint, and one domain for a whole gang.

A node that does not exist yet is in a domain only if its offer or pool says so: the zone is known, the clique is not.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec
import numpy as np

from gpu_autoscaler.core.demand.items import DemandItem
from gpu_autoscaler.core.placement.engine import FreeCapacity
from gpu_autoscaler.core.placement.pod_affinity import PodConstraints, SpreadConstraint, Tally
from gpu_autoscaler.core.placement.shapes import Shape
from gpu_autoscaler.core.provisioning.fleet.problem import NO_GROUP
from gpu_autoscaler.core.provisioning.offers import OfferCatalog
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.observed import Instant

# Domains that are tried for one gang in one plan; each try is a purchase that is rolled back if it fails.
_TRIES_COUNT_MAX = 16
# Bound on evening out zones. Each move between zones of one group makes it more even; two groups may undo each other's.
_MOVES_PER_POD_MAX = 4
# A zone may be closed until others have theirs: members without a zone are tried once more.
_ROUNDS_COUNT_MAX = 2


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


class SpreadZones:
    """The zones that the spread constraints of one planning run assign to the members that are bought for.

    Zones are assigned before anything is bought, to all members at once, whatever their priority: pods of one group
    may differ in all else, and those served later must not make the zones of the earlier ones uneven. Pods that only
    the constraints of others count get a zone as well.
    """

    def __init__(self, shapes: Iterable[Shape], catalog: OfferCatalog, free_capacity: FreeCapacity) -> None:
        """`shapes` are those of all members that nodes may be bought for."""
        self._catalog = catalog
        self._free_capacity = free_capacity
        self._tallies = {spread.tally for shape in shapes for spread in _zone_spreads(shape)}
        self._zones: dict[str, list[str]] = {}  # of the members of each item that is first in its lot, in their order

    def concern(self, shape: Shape) -> bool:
        """True if a zone spread constraint, their own or one that counts them, concerns pods of this shape."""
        tallies = (*shape.pod_constraints.tallies, *(spread.tally for spread in _zone_spreads(shape)))
        return any(tally in self._tallies for tally in tallies) if self._tallies else False

    def forget(self) -> None:
        """Assign zones anew: members that were counted on have no place after all."""
        self._zones.clear()

    def parts(
        self, wants: Sequence[MissingMembers], later: Iterable[MissingMembers] = ()
    ) -> list[tuple[int, MissingMembers]]:
        """Split the members by their zone; return the parts with the number of the want. Each zone is given once.

        `later` are members that are served afterwards. Members without an allowed zone are omitted.
        """
        zoned = [want for want in wants if self.concern(want.item.shape)]
        if any(len(self._zones.get(want.item.key, ())) != want.count for want in zoned):
            self._assign(zoned, [want for want in later if self.concern(want.item.shape)])
        parts: list[tuple[int, MissingMembers]] = []
        for number, want in enumerate(wants):
            if not self.concern(want.item.shape):
                parts.append((number, want))
                continue
            by_zone: dict[str, list[Instant]] = {}
            for zone, since in zip(self._zones.pop(want.item.key, ()), want.sinces, strict=False):
                by_zone.setdefault(zone, []).append(since)
            for zone, sinces in sorted(by_zone.items()):
                shape = restricted_to(want.item.shape, labels.ZONE, zone)
                item = msgspec.structs.replace(want.item, shape=shape)
                parts.append((number, MissingMembers(item=item, sinces=tuple(sinces))))
        return parts

    def _assign(self, wants: Sequence[MissingMembers], later: Sequence[MissingMembers]) -> None:
        everything = (*wants, *later)
        shapes = {number: want.item.shape for number, want in enumerate(everything)}
        assigner = _ZoneAssigner(self._free_capacity, shapes, self._catalog)
        waiting = sorted(
            (number >= len(wants), since, number) for number, want in enumerate(everything) for since in want.sinces
        )
        assigner.assign([number for _, _, number in waiting])
        self._zones = {want.item.key: assigner.zones[number] for number, want in enumerate(everything)}


def _zone_spreads(shape: Shape) -> list[SpreadConstraint]:
    return [spread for spread in shape.pod_constraints.spreads if spread.topology_key == labels.ZONE]


class _ZoneAssigner:
    """Assigns zones so that every spread constraint holds for each pod when all have their zones.

    Each pod, in the given order, gets the cheapest zone that its constraints allow then. Pods that differ in the zones
    open to them make such zones uneven afterwards: those that may go elsewhere are moved to where the fewest are.
    """

    def __init__(self, free_capacity: FreeCapacity, shapes: Mapping[int, Shape], catalog: OfferCatalog) -> None:
        self.zones: dict[int, list[str]] = {number: [] for number in shapes}  # of the pods of each want, in their order
        self._spreads = {number: _zone_spreads(shape) for number, shape in shapes.items()}
        tallies = {spread.tally for spreads in self._spreads.values() for spread in spreads}
        self._counts: dict[Tally, Counter[str]] = {
            tally: Counter(free_capacity.counts_by_domain(labels.ZONE, tally)) for tally in tallies
        }
        self._counted = {
            number: [tally for tally in shape.pod_constraints.tallies if tally in tallies]
            for number, shape in shapes.items()
        }
        self._prices = {number: _cheapest_by_zone(catalog, shape) for number, shape in shapes.items()}
        # Zones with suitable nodes count for the constraint although nothing may be bought there.
        self._eligible: dict[tuple[int, SpreadConstraint], AbstractSet[str]] = {
            (number, spread): free_capacity.spread_domains(shape, spread) | self._prices[number].keys()
            for number, shape in shapes.items()
            for spread in self._spreads[number]
        }

    def assign(self, numbers: Sequence[int]) -> None:
        """Assign a zone to one pod of each of these wants; one without an allowed zone gets none."""
        waiting = list(numbers)
        for _ in range(_ROUNDS_COUNT_MAX):
            for number in waiting:
                zone = self._cheapest(number)
                if zone is not None:
                    self.zones[number].append(zone)
                    self._add(number, zone, 1)
            self._even_out(moves_count_max=_MOVES_PER_POD_MAX * len(numbers))
            missing = Counter(numbers) - Counter({number: len(zones) for number, zones in self.zones.items()})
            if not missing:
                break
            waiting = [number for number in self.zones for _ in range(missing[number])]

    def _cheapest(self, number: int) -> str | None:
        spreads, prices = self._spreads[number], self._prices[number]

        def rank(zone: str) -> tuple[int, int, str]:
            return prices[zone], max((self._counts[spread.tally][zone] for spread in spreads), default=0), zone

        allowed = (zone for zone in prices if self._skew_excess(number, zone, more_count=1) <= 0)
        return min(allowed, key=rank, default=None)

    def _even_out(self, moves_count_max: int) -> None:
        """Move pods until each has a zone that its constraints would allow to the last pod.

        A pod that is in the way and has no other zone loses its zone, as does each one after the last allowed move.
        """
        numbers = [number for number, spreads in self._spreads.items() if spreads]
        moved_count, is_even = 0, False
        while not is_even:
            is_even = True
            for number in numbers:
                for zone in sorted(set(self.zones[number])):
                    while zone in self.zones[number] and self._skew_excess(number, zone) > 0:
                        is_even = False
                        moved_count += 1
                        self._move(number, zone, is_last=moved_count > moves_count_max)

    def _move(self, number: int, zone: str, *, is_last: bool) -> None:
        """Move the youngest of these pods to the zone with the fewest that allows it; without one it has no zone."""
        zones = self.zones[number]
        place = len(zones) - 1 - zones[::-1].index(zone)
        self._add(number, zone, -1)
        others = [other for other in self._prices[number] if self._skew_excess(number, other, more_count=1) <= 0]
        fewest = min(others, key=lambda other: (*self._fullness(number, other), other), default=zone)
        if fewest == zone or is_last:
            del zones[place]
            return
        zones[place] = fewest
        self._add(number, fewest, 1)

    def _fullness(self, number: int, zone: str) -> tuple[int, int]:
        counts = max(self._counts[spread.tally][zone] for spread in self._spreads[number])
        return counts, self._prices[number][zone]

    def _skew_excess(self, number: int, zone: str, more_count: int = 0) -> int:
        """Return by how much the zone exceeds a skew of the pods of this want, with more of them there."""
        excess = 0
        for spread in self._spreads[number]:
            counts = self._counts[spread.tally]
            own_count = more_count if spread.tally in self._counted[number] else 0
            eligible = self._eligible[number, spread]
            least = min(counts[other] for other in eligible) if len(eligible) >= spread.domains_count_min else 0
            excess = max(excess, counts[zone] + own_count - least - spread.skew_count_max)
        return excess

    def _add(self, number: int, zone: str, pods_count: int) -> None:
        for tally in self._counted[number]:
            self._counts[tally][zone] += pods_count


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


def place_in_one_domain(
    key: str, shape: Shape, count: int, free_capacity: FreeCapacity, avoided: Collection[str] = ()
) -> tuple[str, ...]:
    """Place all members in the first domain with capacity for them, on no bin in `avoided`, and return their bin keys;
    empty: no domain has."""
    for value in domains_for(key, ((shape, count),), free_capacity, None, frozenset()):
        keys = free_capacity.place_gang(restricted_to(shape, key, value), count, avoided=avoided)
        if keys is not None:
            return keys
    return ()


def _price(wanted: Sequence[tuple[Shape, int]], catalog: OfferCatalog | None) -> int:
    """Return the sum of the least prices of nodes that take a member of each; a shape without an offer adds nothing."""
    if catalog is None:
        return 0
    prices = (catalog.prices_micro_usd_per_hour[np.flatnonzero(catalog.members(shape))] for shape, _ in wanted)
    return sum(int(of_shape.min()) for of_shape in prices if of_shape.size)

"""Preferences among offerings of equal cost, and the report of those that are not satisfied.

A node is exchanged only for one of equal expected cost, no higher price, the same capacity type and number of GPUs.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from gpu_autoscaler.core.placement.engine import FreeCapacity
from gpu_autoscaler.core.placement.label_matching import avoided
from gpu_autoscaler.core.placement.pod_affinity import AffinityTerm
from gpu_autoscaler.core.placement.preference_scores import Keys, PlannedPods, offering_keys
from gpu_autoscaler.core.placement.preferences import NO_PREFERENCES
from gpu_autoscaler.core.placement.resources import Bools, Ints, rows
from gpu_autoscaler.core.placement.shapes import Shape
from gpu_autoscaler.core.provisioning.fleet.problem import FleetNode
from gpu_autoscaler.core.provisioning.offers import OfferCatalog
from gpu_autoscaler.core.provisioning.selection import OfferSelector
from gpu_autoscaler.core.provisioning.topology_domains import MissingMembers
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.reasons.buy import DroppedPreference
from gpu_autoscaler.model.scheduling import LabelRequirement

_PREFERENCES_COUNT_MAX = 4  # reported for one purchase


class PreferenceExchange:
    """Preferences of shapes among the offerings of one catalog."""

    def __init__(self, catalog: OfferCatalog, selector: OfferSelector, free_capacity: FreeCapacity) -> None:
        self._catalog = catalog
        self._selector = selector
        self._free_capacity = free_capacity
        self._static: dict[Shape, Keys] = {}

    def has_preferences(self, shape: Shape) -> bool:
        """False if the shape prefers no offering to another."""
        return shape.preferences != NO_PREFERENCES or self._catalog.nodes.has_taints_to_avoid

    def keys(self, shape: Shape, planned_pods: PlannedPods | None = None) -> Keys:
        """Return sort keys of the offerings, the least significant first; none without preferences."""
        if not self.has_preferences(shape):
            return ()
        if shape.preferences.depends_on_pods:
            return offering_keys(shape, self._catalog.nodes, planned_pods or PlannedPods(self._free_capacity))
        if shape not in self._static:
            self._static[shape] = offering_keys(shape, self._catalog.nodes, PlannedPods(self._free_capacity))
        return self._static[shape]

    def exchanged(
        self, fleet: Sequence[FleetNode], wants: Sequence[MissingMembers], accepts: Bools, *, is_at_home: bool = False
    ) -> Sequence[FleetNode]:
        """Return the fleet with each node exchanged for the one its pods prefer; `is_at_home`: in its pool and zone."""
        shapes = [want.item.shape for want in wants]
        if not any(map(self.has_preferences, shapes)):
            return fleet
        planned_pods, nodes = PlannedPods(self._free_capacity), []
        spot = self._selector.spot_shares(self._catalog.offerings[node.offer].offer for node in fleet)
        for node in fleet:
            liking = [number for number in node.pods if self.has_preferences(shapes[number])]
            place = node.offer
            if liking:
                equal = self._equals(node, [wants[number] for number in node.pods], accepts, is_at_home=is_at_home)
                keys = [self.keys(shapes[number], planned_pods) for number in liking]
                sums = [sum((key[kind] for key in keys), start=np.zeros_like(keys[0][0])) for kind in range(6)]
                for other in self._best_first(sums, equal, place):
                    if other == place or spot.moves(place, other):
                        place = other
                        break
            for number in node.pods:
                planned_pods.add(shapes[number], self._catalog.offerings[place].node.labels)
            nodes.append(FleetNode(offer=place, pods=node.pods))
        return nodes

    def _best_first(self, keys: Sequence[Ints], equal: Bools, place: int) -> Iterable[int]:
        """Yield the offerings preferred to the one at this place, the best first, then that one itself."""
        places = np.flatnonzero(equal)
        is_other = (places != place).astype(np.int64)  # no exchange between equals
        for preferred in places[np.lexsort((places, is_other, *(key[places] for key in keys)))].tolist():
            yield preferred
            if preferred == place:
                return

    def _equals(self, node: FleetNode, wants: Sequence[MissingMembers], accepts: Bools, *, is_at_home: bool) -> Bools:
        """Return the offerings that would do as well as the node's at no more cost, including its own."""
        catalog, place = self._catalog, node.offer
        load = rows((want.item.shape.resources for want in wants), catalog.kinds).sum(axis=0)
        costs, prices = self._selector.costs(wants[0].item.priority), catalog.prices_micro_usd_per_hour
        equal: Bools = np.logical_and.reduce(accepts[sorted(set(node.pods))], axis=0)
        equal &= (costs == costs[place]) & (prices <= prices[place]) & (catalog.capacity >= load).all(axis=1)
        sold = catalog.offerings[place]
        for position in np.flatnonzero(equal).tolist():
            other = catalog.offerings[position]
            is_home = other.pool.name == sold.pool.name and other.offer.zone == sold.offer.zone
            equal[position] = (
                other.offer.capacity_type is sold.offer.capacity_type
                and other.offer.resources.gpu_count == sold.offer.resources.gpu_count
                and (is_home or not is_at_home)
            )
        return equal

    # ---- what was dropped

    def dropped(self, place: int, shapes: Iterable[Shape], planned_pods: PlannedPods) -> tuple[DroppedPreference, ...]:
        """Return the preferences that a node of this offering does not satisfy, the most significant kind first.

        Each comes with the cheapest offering that would have satisfied it.
        """
        dropped: dict[str, DroppedPreference] = {}
        for shape in dict.fromkeys(shapes):
            for preference in self._dropped(place, shape, planned_pods) if self.has_preferences(shape) else ():
                dropped.setdefault(preference.preference, preference)
        return tuple(dropped.values())[:_PREFERENCES_COUNT_MAX]

    def _dropped(self, place: int, shape: Shape, planned_pods: PlannedPods) -> Iterable[DroppedPreference]:
        catalog, preferences = self._catalog, shape.preferences
        takes = catalog.members(shape) > 0
        together, apart, nodes, models, _, taints = self.keys(shape, planned_pods)
        if taints[place]:
            marks = avoided(shape.demands.tolerations, catalog.offerings[place].node.taints)
            names = ", ".join(taint.key for taint in marks)
            yield self._dropped_preference(f"no PreferNoSchedule taint ({names})", takes & (taints < taints[place]))
        domains = catalog.offerings[place].node.labels
        for spread in preferences.spreads:
            counts = catalog.nodes.count_by_label(
                spread.topology_key, planned_pods.counts(AffinityTerm(spread.topology_key, spread.tally))
            )
            open_counts = counts[takes & (counts >= 0)]
            if spread.topology_key in domains and open_counts.size and spread.topology_key != labels.HOSTNAME:
                least = int(open_counts.min())
                if int(counts[place]) + 1 - least > spread.skew_count_max:
                    better = takes & (counts >= 0) & (counts < counts[place])
                    yield self._dropped_preference(
                        f"spread over {spread.topology_key} with skew of at most {spread.skew_count_max}", better
                    )
        if models[place]:
            yield self._dropped_preference(
                f"GPU model {preferences.gpu_models[0]} first", takes & (models < models[place])
            )
        for preferred in preferences.nodes:
            meets = catalog.nodes.meets(preferred.term)
            if not meets[place]:
                better = takes & meets & (nodes < nodes[place])
                if better.any() or (not (takes & meets).any() and preferred.weight > -int(nodes[place])):
                    yield self._dropped_preference(" and ".join(map(_described, preferred.term.requirements)), better)
        if (takes & (apart < apart[place])).any():
            yield self._dropped_preference(
                "apart from the pods of its preferred anti-affinity", takes & (apart < apart[place])
            )
        if (takes & (together < together[place])).any():
            yield self._dropped_preference(
                "near the pods of its preferred affinity", takes & (together < together[place])
            )

    def _dropped_preference(self, preference: str, keeping: Bools) -> DroppedPreference:
        """Return the preference, and the cheapest of the offerings that would have satisfied it."""
        places, prices = np.flatnonzero(keeping), self._catalog.prices_micro_usd_per_hour
        if not places.size:
            return DroppedPreference(preference=preference)
        cheapest = int(places[prices[places].argmin()])
        return DroppedPreference(
            preference=preference,
            kept_by=self._catalog.offerings[cheapest].offer.key,
            price_micro_usd_per_hour=int(prices[cheapest]),
        )


def _described(condition: LabelRequirement) -> str:
    values = ", ".join(condition.values)
    match condition.operator:
        case "In":
            return f"{condition.key} {values}" if len(condition.values) == 1 else f"{condition.key} in {values}"
        case "NotIn":
            return f"{condition.key} not in {values}"
        case "Exists":
            return f"with {condition.key}"
        case "DoesNotExist":
            return f"without {condition.key}"
        case "Gt":
            return f"{condition.key} above {values}"
        case "Lt":
            return f"{condition.key} below {values}"

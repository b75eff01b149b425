"""What can be bought: every offer in every pool that allows it, and why an offer cannot be had now.

What the cloud refused lately is not asked for (`core/buying/refusals.py`).

An offer is a promise; the latest usable node that came of it is what the next one is taken to be. So a node that comes
smaller than promised, or without a label, is not bought again and again for work that it cannot take.
"""

from collections.abc import Mapping
from datetime import datetime

import msgspec
import numpy as np

from gpu_autoscaler.core.bins import PodsByNode, node_free_of_work, offered_bin
from gpu_autoscaler.core.buying.paid_periods import PaidPeriods
from gpu_autoscaler.core.buying.price_ages import are_fresh, oldest_seconds
from gpu_autoscaler.core.buying.refusals import reaches, standing
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.interruptions import ends_by_place, place_of, rate_of
from gpu_autoscaler.core.nodes.life import NodeView
from gpu_autoscaler.core.placing.acceptance import Acceptance, members_by_amounts, members_that_fit
from gpu_autoscaler.core.placing.amounts import Bools, Floats, Ints, gpu_parts, kinds_of, rows
from gpu_autoscaler.core.placing.shapes import Bin, Shape
from gpu_autoscaler.core.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.pools import pool_allows
from gpu_autoscaler.core.remembered import remembered
from gpu_autoscaler.core.shortfalls import ObservedAllocatable, shortfall
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.reasons import DeferReason, NoOfferFits, OffersUnavailable, PriceUnknown, WatchStale
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import NodeSelectorTerm

_UNKNOWN_PRICE = -1
_ANY_NEW_HOST = ""  # no node is called that
_WORDS_OF_PLACES = ("topology", "clique", "rack", "ultraserver", "placement-group")
_AMOUNTS_COUNT_MAX = 1024  # kept while one plan is made
_OF_ONE_NODE = frozenset({labels.HOSTNAME, labels.PROJECT_ID})  # labels that the next node of an offer has otherwise


class Sale(msgspec.Struct, frozen=True, kw_only=True):
    """One offer in one pool: a purchase that is possible in principle, whatever stands against it now."""

    pool: NodePool
    offer: Offer
    node: Bin  # as a new node would be, but for its name

    @property
    def price_micro_usd_per_hour(self) -> int:
        """Of a sale that is bought, or was nearly: what has no price is neither, and no price is not none to pay."""
        price = self.offer.price_micro_usd_per_hour
        assert price is not None, f"{self.offer.key} has no price, and is told of as if it had one"  # noqa: S101 - as it says
        return price


class _Shelf:
    """Every offer in every pool that allows it, in order of offer and pool, as promised."""

    def __init__(self, offers: tuple[Offer, ...], pools: tuple[NodePool, ...]) -> None:
        self.sales = tuple(
            Sale(pool=pool, offer=offer, node=offered_bin(pool, offer, ActionId("offered")))
            for offer in sorted(offers, key=lambda offer: offer.key)
            for pool in sorted(pools, key=lambda pool: pool.name)
            if pool_allows(pool, offer)
        )
        self.places = {(sale.pool.name, sale.offer.key): place for place, sale in enumerate(self.sales)}
        self.acceptance = Acceptance([sale.node for sale in self.sales])
        self.kinds = kinds_of(sale.node.free for sale in self.sales)
        self.capacity = rows((sale.node.free for sale in self.sales), self.kinds)
        self.prices_micro_usd_per_hour = np.array([_known_price(sale.offer) for sale in self.sales], dtype=np.int64)
        self.pool_priorities = np.array([sale.pool.priority for sale in self.sales], dtype=np.int64)
        self.gpu_counts = np.array([sale.offer.resources.gpu_count for sale in self.sales], dtype=np.int64)
        self.boot_seconds = np.array([sale.offer.boot_seconds for sale in self.sales], dtype=np.float64)
        self.is_spot = self._is_of(CapacityType.SPOT)
        self.is_on_demand = self._is_of(CapacityType.ON_DEMAND)
        self.is_reserved = self._is_of(CapacityType.RESERVED)
        self.rates_unless_known = np.array([rate_of(sale.offer, {}) for sale in self.sales], dtype=np.float64)
        self.paid_periods = PaidPeriods(sale.offer for sale in self.sales)
        zones = [sale.offer.zone for sale in self.sales]
        self.is_in_zone = {zone: np.array([each == zone for each in zones], np.bool_) for zone in sorted({*zones})}
        self.spot_at: dict[str, list[int]] = {}  # by type and zone
        for place in np.flatnonzero(self.is_spot).tolist():
            offer = self.sales[place].offer
            self.spot_at.setdefault(place_of(offer.instance_type, offer.zone), []).append(place)

    def _is_of(self, capacity_type: CapacityType) -> Bools:
        return np.array([sale.offer.capacity_type is capacity_type for sale in self.sales], dtype=np.bool_)


_shelf = remembered(4)(_Shelf)


class Market:
    """All that is for sale at one instant, asked by shape. A sale is known by its place, in order of offer and pool."""

    def __init__(self, draft: Draft, state: ClusterState, policy: ScalingPolicy) -> None:
        self._watch_seconds_max = policy.watch_age_seconds_max
        self._offers = None if state.offers is None else state.offers.offers
        shelf = _shelf(self._offers or (), policy.pools)
        came = {
            shelf.places[key]: _as_it_came(shelf.sales[shelf.places[key]].node, view, draft.pods)
            for key, view in _latest_of_each_offer(draft.views).items()
            if key in shelf.places
        }
        came |= _as_they_went(shelf, came, state.observed_allocatable, draft.as_of)
        self.sales = shelf.sales if not came else _with(shelf.sales, came)
        self.kinds = shelf.kinds  # of slices, in order of their columns
        self.capacity = shelf.capacity
        self.prices_micro_usd_per_hour = shelf.prices_micro_usd_per_hour
        self.pool_priorities = shelf.pool_priorities
        self.gpu_counts, self.boot_seconds = shelf.gpu_counts, shelf.boot_seconds
        self.is_spot, self.is_on_demand, self.is_reserved = shelf.is_spot, shelf.is_on_demand, shelf.is_reserved
        self.spot_at, self.is_in_zone = shelf.spot_at, shelf.is_in_zone
        self.rates = _rates(shelf, state, draft.as_of)
        self._accepted_as_promised = shelf.acceptance
        self._came_at = np.array(list(came), dtype=np.int64)
        self._accepted_as_it_came = Acceptance(list(came.values()))
        if came:
            new = kinds_of(node.free for node in came.values())
            self.kinds += tuple(kind for kind in new if kind not in self.kinds)
            self.capacity = _widened(shelf.capacity, by=len(self.kinds) - len(shelf.kinds))
            self.capacity[self._came_at] = rows((node.free for node in came.values()), self.kinds)
        self.has_gpus = gpu_parts(self.capacity) > 0
        self._refusals = standing(state, draft.as_of)
        self._is_buyable = self.prices_micro_usd_per_hour != _UNKNOWN_PRICE
        if self._refusals:
            is_open = [self.refused_until(sale.offer) is None for sale in self.sales]
            self._is_buyable &= np.array(is_open, dtype=np.bool_)
        self._by_amounts: dict[Resources, Ints] = {}
        self._stale = self._stale_prices(state, policy, draft.as_of)
        self._paid_periods, self._as_of = shelf.paid_periods, draft.as_of
        if shelf.paid_periods.any:
            self._is_buyable &= shelf.paid_periods.are_open(draft.as_of, self.boot_seconds + policy.reservation_drain_seconds)

    def _stale_prices(self, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> WatchStale | None:
        """Bar what is not bought at so old a price; returns what to say of that, None where nothing is barred."""
        if policy.prices.is_stale_price_allowed or state.offers is None or not self.sales:
            return None
        is_fresh = are_fresh([sale.offer for sale in self.sales], state.offers, policy, as_of)
        self._is_buyable &= is_fresh
        age_seconds = oldest_seconds(state.offers, as_of)
        limit = policy.prices.age_seconds_max
        return None if is_fresh.all() else WatchStale(source="prices", age_seconds=age_seconds, age_seconds_max=limit)

    def members(self, shape: Shape) -> Ints:
        """Return how many members of the shape a new node of each sale takes; none where it cannot be had now."""
        is_buyable = self._is_buyable
        if self._paid_periods.any and not shape.is_spot_allowed:
            is_buyable = is_buyable & ~self._paid_periods.has_end  # what must not be interrupted outlives no period
        members = self._by_amounts.get(shape.resources)  # of many shapes few ask for other amounts
        if members is None:
            if len(self._by_amounts) >= _AMOUNTS_COUNT_MAX:
                self._by_amounts.clear()
            members = members_by_amounts(shape.resources, self.capacity, self.kinds)
            self._by_amounts[shape.resources] = members
        return np.where(is_buyable & self._accepted_by(shape), members, 0)

    @property
    def has_taints_to_avoid(self) -> bool:
        """True where some node for sale would rather not have pods that do not tolerate it."""
        return self._accepted_as_promised.has_taints_to_avoid  # one that came has the taints that were promised

    def likes(self, shape: Shape) -> tuple[Ints, Ints, Ints]:
        """Return what the shape has against a new node of each sale, as `Acceptance.likes` does."""
        taints, models, nodes = self._accepted_as_promised.likes(shape)
        if self._came_at.size:
            for figures, came in zip((taints, models, nodes), self._accepted_as_it_came.likes(shape), strict=True):
                figures[self._came_at] = came
        return taints, models, nodes

    def meets(self, term: NodeSelectorTerm) -> Bools:
        """Return for each sale whether a new node of it meets these conditions."""
        met = self._accepted_as_promised.meets(term)
        if self._came_at.size:
            met[self._came_at] = self._accepted_as_it_came.meets(term)
        return met

    def by_label(self, key: str, counts: Mapping[str, int]) -> Ints:
        """Return for each sale the count of a new node's value of the label, as `Acceptance.by_label` does."""
        found = self._accepted_as_promised.by_label(key, counts)
        if self._came_at.size:
            found[self._came_at] = self._accepted_as_it_came.by_label(key, counts)
        return found

    def domains(self, shape: Shape, key: str) -> frozenset[str]:
        """Return the values of a label of all nodes that could be bought for the shape now; a new host has no name."""
        if key == labels.HOSTNAME:
            return frozenset({_ANY_NEW_HOST})
        if key == labels.ZONE:
            takes = self.members(shape) > 0
            return frozenset(zone for zone, is_there in self.is_in_zone.items() if (takes & is_there).any())
        values = (self.sales[place].node.labels.get(key) for place in np.flatnonzero(self.members(shape)))
        return frozenset(value for value in values if value is not None)

    def why_nothing(self, shape: Shape) -> DeferReason:
        """Return why no sale takes a member of this shape now; only for shapes for which that is so."""
        if self._offers is None:  # no list of offers is not an empty list
            return WatchStale(source="offers", age_seconds=None, age_seconds_max=self._watch_seconds_max)
        fitting = [self.sales[place].offer for place in np.flatnonzero(self.members_in_principle(shape))]
        refused = {offer.key: until for offer in fitting if (until := self.refused_until(offer)) is not None}
        if refused:
            return OffersUnavailable(offers=tuple(sorted(refused)), retry_at=min(refused.values()))
        if (closed := self._paid_periods.told(fitting, self._as_of)) is not None:
            return NoOfferFits(detail=closed)
        if self._stale is not None and any(one.price_micro_usd_per_hour is not None for one in fitting):
            return self._stale
        if fitting:
            return PriceUnknown(offers=tuple(sorted({offer.key for offer in fitting})))
        return NoOfferFits(detail=self._what_is_missing(shape))

    def members_in_principle(self, shape: Shape) -> Ints:
        """Return how many members a new node of each sale would take, whether or not it can be had now."""
        return members_that_fit(shape, self.capacity, self._accepted_by(shape), self.kinds)

    def _accepted_by(self, shape: Shape) -> Bools:
        accepted = self._accepted_as_promised.by(shape)
        if self._came_at.size:
            accepted = accepted.copy()
            accepted[self._came_at] = self._accepted_as_it_came.by(shape)
        return accepted

    def refused_until(self, offer: Offer) -> Instant | None:
        """Return when the offer may be asked for again; None: now."""
        found = (self._refusals[scope].until for scope in reaches(offer) if scope in self._refusals)
        return max(found, default=None)

    def _what_is_missing(self, shape: Shape) -> str:
        """Say what no offer has: the first thing that, taken alone, rules all of them out."""
        if not self.sales:
            return "no pool allows any offer"
        wanted, models = shape.resources.gpu_count, shape.gpu_models
        if wanted:
            of_model = f" of model {' or '.join(models)}" if models else ""
            offers = [sale.offer for sale in self.sales if not models or sale.offer.gpu_model in models]
            most = max((offer.resources.gpu_count for offer in offers), default=0)
            if most < wanted:
                return f"no offer has {wanted} GPUs{of_model} on one node (most: {most})"
        lacking = sorted(name for name, _ in shape.resources.slices if name not in self.kinds)
        if lacking:
            return f"no pool cuts GPUs into {' or '.join(lacking)}"
        if not self._accepted_by(shape).any():
            return "no offer has the labels, taints, GPU memory and capacity type that this asks for"
        return "no offer that is otherwise right has this much CPU, memory, disk and GPUs on one node"


def _rates(shelf: _Shelf, state: ClusterState, as_of: datetime) -> Floats:
    """Return for each sale the share of such nodes that the cloud takes."""
    ends = ends_by_place(state, as_of)
    rates = shelf.rates_unless_known.copy()
    for place in ends.keys() & shelf.spot_at.keys():
        for sale in shelf.spot_at[place]:
            rates[sale] = rate_of(shelf.sales[sale].offer, ends)
    return rates


def _widened(capacity: Ints, *, by: int) -> Ints:
    """A copy with so many columns more, of nothing. `np.pad` takes ten times as long."""
    rows_count, columns_count = capacity.shape
    wider = np.zeros((rows_count, columns_count + by), dtype=capacity.dtype)
    wider[:, :columns_count] = capacity
    return wider


def _known_price(offer: Offer) -> int:
    return _UNKNOWN_PRICE if offer.price_micro_usd_per_hour is None else offer.price_micro_usd_per_hour


@remembered(2)
def _latest_of_each_offer(views: tuple[NodeView, ...]) -> dict[tuple[str, str], NodeView]:
    """The node that became usable last, by pool and offer."""
    latest: dict[tuple[str, str], NodeView] = {}
    usable = (view for view in views if view.is_usable and view.usable_since is not None and view.order is not None)
    for view in sorted(usable, key=lambda view: (view.usable_since, view.name)):
        decision = None if view.order is None else view.order.decision
        if decision is not None:
            latest[decision.pool, decision.offer.key] = view
    return latest


def _as_they_went(shelf: _Shelf, came: Mapping[int, Bin], went: Mapping[str, ObservedAllocatable], as_of: datetime) -> dict[int, Bin]:
    """Offers of which no node is there that could speak for them, and whose last one had less than was promised."""
    found: dict[int, Bin] = {}
    for (pool, offer), place in shelf.places.items() if went else ():
        node = shelf.sales[place].node
        least = None if place in came else shortfall(node.free, went, f"{pool}/{offer}", as_of)
        if least is not None:
            found[place] = msgspec.structs.replace(node, free=least)
    return found


def _with(sales: tuple[Sale, ...], came: Mapping[int, Bin]) -> tuple[Sale, ...]:
    changed = list(sales)
    for place, node in came.items():
        changed[place] = msgspec.structs.replace(sales[place], node=node)
    return tuple(changed)


def _as_it_came(promised: Bin, came: NodeView, pods: PodsByNode) -> Bin:
    """The node that a purchase makes: the promise, with the amounts and labels of the node that came of it.

    Taints are taken from the promise: those that a node has besides are for a while, or for that node alone.
    """
    own = {key: value for key, value in came.labels.items() if key in promised.labels or not _is_of_one_node(key)}
    zone = promised.labels[labels.ZONE]  # where it is, it cannot come otherwise
    return msgspec.structs.replace(promised, free=node_free_of_work(came, pods), labels={**own, labels.ZONE: zone})


def _is_of_one_node(key: str) -> bool:
    """True for labels that the next node of the offer has otherwise: its name, and where in the building it stands.

    Cliques of NVLink, racks and blocks go by `nvidia.com/gpu.clique`, `topology.k8s.aws/network-node-layer-1`,
    `cloud.google.com/gce-topology-block` and the like (documentation of NVIDIA, EKS and GKE, read 2026-11-21).
    """
    if key in (labels.ZONE, labels.REGION):
        return False
    return key in _OF_ONE_NODE or any(word in key for word in _WORDS_OF_PLACES)

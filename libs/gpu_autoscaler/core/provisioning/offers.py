"""The catalog of what can be bought: every offer in every pool that allows it, and why an offer is unavailable.

The latest usable node of an offer overrides the offer's own amounts and labels. So a node that is smaller than
promised, or lacks a label, is not bought again and again for work that it cannot take.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
import numpy as np

from gpu_autoscaler.core.identity_cache import cached_by_identity, cached_until_change
from gpu_autoscaler.core.next_change import note
from gpu_autoscaler.core.nodes.views import NodeIndex, NodeView, PodsByNode, Table
from gpu_autoscaler.core.placement.bins import allocatable_for_work, offered_bin
from gpu_autoscaler.core.placement.constraints import NodeMatcher, members_by_amounts
from gpu_autoscaler.core.placement.resources import Bools, Floats, Ints, gpu_parts, kinds_of, rows
from gpu_autoscaler.core.placement.shapes import Bin, Shape
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.policy.pools import pool_allows
from gpu_autoscaler.core.provisioning.price_age import is_stale, oldest_seconds
from gpu_autoscaler.core.provisioning.unavailable_offers import active_unavailability, scopes_of
from gpu_autoscaler.core.state.interruption_history import capacity_pool_of, rate_of, terminations_by_pool
from gpu_autoscaler.core.state.node_shortfalls import ObservedAllocatable, shortfall
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.format import instant
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.reasons.base import first_listed
from gpu_autoscaler.model.reasons.defer import DeferReason, NoOfferFits, OffersUnavailable, PriceUnknown, WatchStale
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import NodeSelectorTerm

# ---- periods of reservations

_ROUNDING_SECONDS = 0.001


class ReservationPeriods:
    """Periods of prepaid capacity (capacity blocks, reservations with an end) of many offers, in their order.

    While a period is open, a node of it has no further cost, so waiting work uses it first. Its work has to move before
    the end.
    """

    def __init__(self, offers: Iterable[Offer]) -> None:
        offers = tuple(offers)
        self._opens = np.array([_second(offer.paid_from, -np.inf) for offer in offers], dtype=np.float64)
        self._closes = np.array([_second(offer.paid_until, np.inf) for offer in offers], dtype=np.float64)
        self.has_end: Bools = np.isfinite(self._closes)
        self.any = bool(self.has_end.any() or np.isfinite(self._opens).any())

    def are_open(self, as_of: datetime, needed_seconds: Floats) -> Bools:
        """Return for each offer whether its period is open, and stays open for longer than it takes to be of use."""
        now = as_of.timestamp()
        changes = np.concatenate((self._opens, self._closes - needed_seconds))
        ahead = changes[(changes > now) & np.isfinite(changes)]
        if ahead.size:  # a little earlier: seconds as a number are not exact to the microsecond
            note(as_of, max(datetime.fromtimestamp(float(ahead.min()) - _ROUNDING_SECONDS, UTC), as_of))
        return (self._opens <= now) & (now + needed_seconds < self._closes)

    def why_closed(self, offers: Iterable[Offer], as_of: datetime) -> str | None:
        """Return why no period of these offers is open; None: none of them has a period."""
        closed = [offer for offer in offers if offer.paid_from is not None or offer.paid_until is not None]
        if not closed:
            return None
        ahead = [offer for offer in closed if offer.paid_from is not None and offer.paid_from > as_of]
        if not ahead:
            return f"the reservation period of {closed[0].key} has ended or ends soon"
        first = min(ahead, key=lambda offer: (offer.paid_from, offer.key))
        assert first.paid_from is not None, "filtered above"  # noqa: S101 - narrows the type
        return f"the reservation period of {first.key} begins at {instant(first.paid_from)}"


def _second(at: datetime | None, without: float) -> float:
    return without if at is None else at.timestamp()


# ---- age of prices


def are_fresh(offers: Sequence[Offer], sampled: SpotOffersSampled, policy: ScalingPolicy, as_of: datetime) -> Bools:
    """Return for each offer, in order, whether its price is recent enough to buy it."""
    return np.array([not is_stale(offer, sampled, policy, as_of) for offer in offers], dtype=np.bool_)


UNKNOWN_PRICE = -1
_ANY_NEW_HOST = ""  # no node has this name
_PLACE_KEY_PARTS = ("topology", "clique", "rack", "ultraserver", "placement-group")
_AMOUNTS_COUNT_MAX, _SHAPES_COUNT_MAX = 1024, 64  # cached during one plan
_NODE_SPECIFIC_KEYS = frozenset({labels.HOSTNAME, labels.PROJECT_ID})  # the next node of an offer has other values


class Offering(msgspec.Struct, frozen=True, kw_only=True):
    """One offer in one pool: a possible purchase, whether or not it is available now."""

    pool: NodePool
    offer: Offer
    node: Bin  # a new node, except for its name

    @property
    def price_micro_usd_per_hour(self) -> int:
        """The known price. Only for offerings that are buyable or nearly were; an unknown price is not zero."""
        price = self.offer.price_micro_usd_per_hour
        assert price is not None, f"{self.offer.key} has no price"  # noqa: S101 - callers select offerings with a price
        return price


class _StaticCatalog:
    """Every offer in every pool that allows it, in order of offer and pool, as promised."""

    def __init__(self, offers: tuple[Offer, ...], pools: tuple[NodePool, ...]) -> None:
        self.offerings = tuple(
            Offering(pool=pool, offer=offer, node=offered_bin(pool, offer, ActionId("offered")))
            for offer in sorted(offers, key=lambda offer: offer.key)
            for pool in sorted(pools, key=lambda pool: pool.name)
            if pool_allows(pool, offer)
        )
        self.places = {(offering.pool.name, offering.offer.key): place for place, offering in enumerate(self.offerings)}
        self.matcher = NodeMatcher([offering.node for offering in self.offerings])
        self.kinds = kinds_of(offering.node.free for offering in self.offerings)
        self.capacity = rows((offering.node.free for offering in self.offerings), self.kinds)
        prices = [offering.offer.price_micro_usd_per_hour for offering in self.offerings]
        known = [UNKNOWN_PRICE if price is None else price for price in prices]
        self.prices_micro_usd_per_hour = np.array(known, dtype=np.int64)
        self.pool_priorities = np.array([offering.pool.priority for offering in self.offerings], dtype=np.int64)
        self.gpu_counts = np.array([offering.offer.resources.gpu_count for offering in self.offerings], dtype=np.int64)
        self.boot_seconds = np.array([offering.offer.boot_seconds for offering in self.offerings], dtype=np.float64)
        first: dict[tuple[object, ...], int] = {}
        kinds = [
            (entry.pool.name, entry.offer.zone, entry.offer.gpu_model, entry.offer.resources.gpu_count)
            for entry in self.offerings
        ]
        # Of each offering the first one that counts against the same limits of nodes and GPUs.
        self.same_limits = np.array([first.setdefault(kind, place) for place, kind in enumerate(kinds)], np.int64)
        self.is_spot = self._is_of(CapacityType.SPOT)
        self.is_on_demand = self._is_of(CapacityType.ON_DEMAND)
        self.is_reserved = self._is_of(CapacityType.RESERVED)
        self.rates_unless_known = np.array([rate_of(entry.offer, {}) for entry in self.offerings], dtype=np.float64)
        self.reservations = ReservationPeriods(offering.offer for offering in self.offerings)
        zones = [offering.offer.zone for offering in self.offerings]
        self.is_in_zone = {zone: np.array([name == zone for name in zones], np.bool_) for zone in sorted({*zones})}
        self.spot_at: dict[str, list[int]] = {}  # by type and zone
        for place in np.flatnonzero(self.is_spot).tolist():
            offer = self.offerings[place].offer
            self.spot_at.setdefault(capacity_pool_of(offer.instance_type, offer.zone), []).append(place)

    def _is_of(self, capacity_type: CapacityType) -> Bools:
        return np.array([offering.offer.capacity_type is capacity_type for offering in self.offerings], dtype=np.bool_)


_static_catalog = cached_by_identity(4)(_StaticCatalog)


_Kind = tuple[str, str]  # pool and offer


class _Latest(NamedTuple):
    """The node of a kind that became usable last."""

    since: tuple[datetime, str]  # with its name
    allocatable: Resources  # for work
    labels: Mapping[str, str]


class _LatestNodes(Table[Mapping[_Kind, _Latest]]):
    """The node that became usable last, by pool and offer."""

    def build(self, nodes: NodeIndex) -> Mapping[_Kind, _Latest]:
        """Compare all nodes."""
        return _with_later({}, nodes, nodes.pods)

    def update(
        self, table: Mapping[_Kind, _Latest], removed: Sequence[NodeView], added: Sequence[NodeView], nodes: NodeIndex
    ) -> Mapping[_Kind, _Latest] | None:
        """Compare the added nodes; all of them again if the last of a kind left. The same table if it is equal."""
        out = {(view.usable_since, view.name) for view in removed}
        kept = {kind: node for kind, node in table.items() if node.since not in out}
        latest = _with_later(kept, added, nodes.pods)
        for kind, node in table.items():
            if kind not in kept and (kind not in latest or latest[kind].since < node.since):
                return None
        return table if latest == table else latest


def _with_later(table: Mapping[_Kind, _Latest], views: Iterable[NodeView], pods: PodsByNode) -> Mapping[_Kind, _Latest]:
    """Return the table with those of these nodes that became usable later."""
    sinces = {kind: node.since for kind, node in table.items()}
    later: dict[_Kind, NodeView] = {}
    for view in views:
        decision = None if view.order is None else view.order.decision
        if decision is None or not view.is_usable or view.usable_since is None:
            continue
        kind, since = (decision.pool, decision.offer.key), (view.usable_since, view.name)
        if kind not in sinces or sinces[kind] <= since:
            sinces[kind], later[kind] = since, view
    return {
        **table,
        **{kind: _Latest(sinces[kind], allocatable_for_work(view, pods), view.labels) for kind, view in later.items()},
    }


_LATEST = _LatestNodes()


class OfferedNodes:
    """A new node of each offering: as promised, or like the last one that was delivered. Queried by shape."""

    def __init__(self, static: _StaticCatalog, delivered: Mapping[int, Bin]) -> None:
        """`delivered`: nodes that replace the promised ones, by the position of their offering."""
        self.offerings = static.offerings if not delivered else _with(static.offerings, delivered)
        self.kinds, self.capacity = static.kinds, static.capacity  # `kinds` of slices, in column order
        self._promised, self._delivered = static.matcher, NodeMatcher(list(delivered.values()))
        self._delivered_at = np.array(list(delivered), dtype=np.int64)
        if delivered:
            new = kinds_of(node.free for node in delivered.values())
            self.kinds += tuple(kind for kind in new if kind not in self.kinds)
            self.capacity = _widened(static.capacity, by=len(self.kinds) - len(static.kinds))
            self.capacity[self._delivered_at] = rows((node.free for node in delivered.values()), self.kinds)
        self.has_gpus = gpu_parts(self.capacity) > 0

    def accepted_by(self, shape: Shape) -> Bools:
        """Return for each offering whether a new node of it satisfies everything but the amounts."""
        accepted = self._promised.by(shape)
        if self._delivered_at.size:
            accepted = accepted.copy()
            accepted[self._delivered_at] = self._delivered.by(shape)
        return accepted

    @property
    def has_taints_to_avoid(self) -> bool:
        """True if some offering has PreferNoSchedule taints."""
        return self._promised.has_taints_to_avoid  # delivered nodes have the promised taints

    def preferences(self, shape: Shape) -> tuple[Ints, Ints, Ints]:
        """Return the figures of `NodeMatcher.preferences` for a new node of each offering."""
        taints, models, nodes = self._promised.preferences(shape)
        if self._delivered_at.size:
            for figures, of_delivered in zip((taints, models, nodes), self._delivered.preferences(shape), strict=True):
                figures[self._delivered_at] = of_delivered
        return taints, models, nodes

    def meets(self, term: NodeSelectorTerm) -> Bools:
        """Return for each offering whether a new node of it meets these conditions."""
        met = self._promised.meets(term)
        if self._delivered_at.size:
            met[self._delivered_at] = self._delivered.meets(term)
        return met

    def count_by_label(self, key: str, counts: Mapping[str, int]) -> Ints:
        """Return the counts of `NodeMatcher.count_by_label` for a new node of each offering."""
        of_label = self._promised.count_by_label(key, counts)
        if self._delivered_at.size:
            of_label[self._delivered_at] = self._delivered.count_by_label(key, counts)
        return of_label


@cached_until_change(4)
def _offered_nodes(
    static: _StaticCatalog,
    latest: Mapping[_Kind, _Latest],
    shortfalls: Mapping[str, ObservedAllocatable],
    as_of: datetime,
) -> OfferedNodes:
    delivered = {
        static.places[kind]: _as_delivered(static.offerings[static.places[kind]].node, node)
        for kind, node in latest.items()
        if kind in static.places
    }
    return OfferedNodes(static, delivered | _with_shortfalls(static, delivered, shortfalls, as_of))


class OfferCatalog:
    """All offerings at one instant, queried by shape. An offering is known by its position."""

    def __init__(self, nodes: NodeIndex, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> None:
        self._watch_seconds_max = policy.watch_age_seconds_max
        self._offers = None if state.offers is None else state.offers.offers
        static = _static_catalog(self._offers or (), policy.pools)
        latest, shortfalls = nodes.table(_LATEST), state.observed_allocatable
        self.nodes = offered = _offered_nodes(static, latest, shortfalls, as_of)
        self.offerings, self.kinds, self.capacity, self.has_gpus = (
            offered.offerings, offered.kinds, offered.capacity, offered.has_gpus
        )  # fmt: skip
        self.prices_micro_usd_per_hour = static.prices_micro_usd_per_hour
        self.pool_priorities, self.same_limits = static.pool_priorities, static.same_limits
        self.gpu_counts, self.boot_seconds = static.gpu_counts, static.boot_seconds
        self.is_spot, self.is_on_demand, self.is_reserved = static.is_spot, static.is_on_demand, static.is_reserved
        self.spot_at, self.is_in_zone = static.spot_at, static.is_in_zone
        self.rates = _rates(static, state, as_of)
        self._unavailable = active_unavailability(state, as_of)
        self._is_buyable = self.prices_micro_usd_per_hour != UNKNOWN_PRICE
        if self._unavailable:
            is_open = [self.unavailable_until(offering.offer) is None for offering in self.offerings]
            self._is_buyable &= np.array(is_open, dtype=np.bool_)
        self._by_amounts: dict[Resources, Ints] = {}
        self._members: dict[Shape, Ints] = {}
        self._stale = self._stale_prices(state, policy, as_of)
        self._reservations, self._as_of = static.reservations, as_of
        if static.reservations.any:
            self._is_buyable &= static.reservations.are_open(
                as_of, self.boot_seconds + policy.reservation_drain_seconds
            )

    def _stale_prices(self, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> WatchStale | None:
        """Exclude offerings with stale prices; return why, or None if there are none."""
        if policy.prices.is_stale_price_allowed or state.offers is None or not self.offerings:
            return None
        is_fresh = are_fresh([offering.offer for offering in self.offerings], state.offers, policy, as_of)
        self._is_buyable &= is_fresh
        age_seconds = oldest_seconds(state.offers, as_of)
        limit = policy.prices.age_seconds_max
        return None if is_fresh.all() else WatchStale(source="prices", age_seconds=age_seconds, age_seconds_max=limit)

    def members(self, shape: Shape) -> Ints:
        """Return how many members of the shape a new node of each offering takes; zero where it is unavailable."""
        members = self._members.get(shape)
        if members is None:
            if len(self._members) >= _SHAPES_COUNT_MAX:
                self._members.clear()
            is_buyable = self._is_buyable
            if self._reservations.any and not shape.is_spot_allowed:
                is_buyable = is_buyable & ~self._reservations.has_end  # non-interruptible work may outlive the period
            members = self._members[shape] = np.where(is_buyable, self.members_if_available(shape), 0)
        return members

    def members_if_available(self, shape: Shape) -> Ints:
        """Return how many members a new node of each offering would take, whether or not it is available now."""
        return np.where(self.nodes.accepted_by(shape), self._members_by_amounts(shape.resources), 0)

    def _members_by_amounts(self, asked: Resources) -> Ints:
        members = self._by_amounts.get(asked)  # many shapes share few amounts
        if members is None:
            if len(self._by_amounts) >= _AMOUNTS_COUNT_MAX:
                self._by_amounts.clear()
            members = self._by_amounts[asked] = members_by_amounts(asked, self.capacity, self.kinds)
        return members

    def domains(self, shape: Shape, key: str) -> frozenset[str]:
        """Return the values of a label of all nodes that could be bought for the shape now; a new host has no name."""
        if key == labels.HOSTNAME:
            return frozenset({_ANY_NEW_HOST})
        if key == labels.ZONE:
            takes = self.members(shape) > 0
            return frozenset(zone for zone, is_there in self.is_in_zone.items() if (takes & is_there).any())
        values = (self.offerings[place].node.labels.get(key) for place in np.flatnonzero(self.members(shape)))
        return frozenset(value for value in values if value is not None)

    def why_no_offering(self, shape: Shape) -> DeferReason:
        """Return why no offering takes a member of this shape now; only for shapes for which that is so."""
        if self._offers is None:  # a missing list is not an empty list
            return WatchStale(source="offers", age_seconds=None, age_seconds_max=self._watch_seconds_max)
        fitting = [self.offerings[place].offer for place in np.flatnonzero(self.members_if_available(shape))]
        refused = {offer.key: until for offer in fitting if (until := self.unavailable_until(offer)) is not None}
        if refused:
            offers, unlisted_count = first_listed(sorted(refused))
            retry_at = min(refused.values())
            return OffersUnavailable(offers=offers, offers_unlisted_count=unlisted_count, retry_at=retry_at)
        if (closed := self._reservations.why_closed(fitting, self._as_of)) is not None:
            return NoOfferFits(detail=closed)
        if self._stale is not None and any(offer.price_micro_usd_per_hour is not None for offer in fitting):
            return self._stale
        if fitting:
            return PriceUnknown.of(sorted({offer.key for offer in fitting}))
        return NoOfferFits(detail=self._missing_property(shape))

    def unavailable_until(self, offer: Offer) -> Instant | None:
        """Return when the offer may be requested again; None: now."""
        ends = (self._unavailable[scope].until for scope in scopes_of(offer) if scope in self._unavailable)
        return max(ends, default=None)

    def _missing_property(self, shape: Shape) -> str:
        """Return the first property that, taken alone, rules all offers out."""
        if not self.offerings:
            return "no pool allows any offer"
        wanted, models = shape.resources.gpu_count, shape.gpu_models
        if wanted:
            of_model = f" of model {' or '.join(models)}" if models else ""
            offers = [offering.offer for offering in self.offerings if not models or offering.offer.gpu_model in models]
            most = max((offer.resources.gpu_count for offer in offers), default=0)
            if most < wanted:
                return f"no offer has {wanted} GPUs{of_model} on one node (most: {most})"
        missing = sorted(name for name, _ in shape.resources.slices if name not in self.kinds)
        if missing:
            return f"no pool partitions GPUs into {' or '.join(missing)}"
        if not self.nodes.accepted_by(shape).any():
            return "no offer matches the requested labels, taints, GPU memory and capacity type"
        return "no otherwise suitable offer has enough CPU, memory, disk and GPUs on one node"


def _rates(static: _StaticCatalog, state: ClusterState, as_of: datetime) -> Floats:
    """Return for each offering the share of its nodes that the cloud interrupts."""
    ends = terminations_by_pool(state, as_of)
    rates = static.rates_unless_known.copy()
    for place in ends.keys() & static.spot_at.keys():
        for offering in static.spot_at[place]:
            rates[offering] = rate_of(static.offerings[offering].offer, ends)
    return rates


def _widened(capacity: Ints, *, by: int) -> Ints:
    """Return a copy with this many more columns of zeros. `np.pad` takes ten times as long."""
    rows_count, columns_count = capacity.shape
    wider = np.zeros((rows_count, columns_count + by), dtype=capacity.dtype)
    wider[:, :columns_count] = capacity
    return wider


def _with_shortfalls(
    static: _StaticCatalog, observed: Mapping[int, Bin], shortfalls: Mapping[str, ObservedAllocatable], as_of: datetime
) -> dict[int, Bin]:
    """Return the offerings without a node to observe whose last node had less than promised."""
    smaller: dict[int, Bin] = {}
    for (pool, offer), place in static.places.items() if shortfalls else ():
        node = static.offerings[place].node
        least = None if place in observed else shortfall(node.free, shortfalls, f"{pool}/{offer}", as_of)
        if least is not None:
            smaller[place] = msgspec.structs.replace(node, free=least)
    return smaller


def _with(offerings: tuple[Offering, ...], observed: Mapping[int, Bin]) -> tuple[Offering, ...]:
    changed = list(offerings)
    for place, node in observed.items():
        changed[place] = msgspec.structs.replace(offerings[place], node=node)
    return tuple(changed)


def _as_delivered(promised: Bin, latest: _Latest) -> Bin:
    """Return the promised node with the amounts and labels of a node that was delivered. Taints are those of the
    promise: others on a node are temporary, or for that node alone."""
    own = {key: value for key, value in latest.labels.items() if key in promised.labels or not _is_node_specific(key)}
    zone = promised.labels[labels.ZONE]  # the zone of an offer is fixed
    return msgspec.structs.replace(promised, free=latest.allocatable, labels={**own, labels.ZONE: zone})


def _is_node_specific(key: str) -> bool:
    """True for labels of which the next node of the offer has other values: its name and its place in the data center.

    NVLink cliques, racks and blocks have the keys `nvidia.com/gpu.clique`, `topology.k8s.aws/network-node-layer-1`,
    `cloud.google.com/gce-topology-block` and the like (documentation of NVIDIA, EKS and GKE, read 2026-11-21).
    """
    if key in (labels.ZONE, labels.REGION):
        return False
    return key in _NODE_SPECIFIC_KEYS or any(word in key for word in _PLACE_KEY_PARTS)

"""The selection among all offerings: least expected cost, within the order that the policy gives.

Prepaid reservations come first, then the pools of highest priority, then spot as far as the policy's mix wants it and
interruptions are rare, spread so that one capacity shortage takes at most a share.

The expected cost of a node an hour is its price and overhead, the price of its boot time, and of the work repeated
after an interruption. The last two occur once in a node's life, and count for more the higher the priority of the work.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gpu_autoscaler.core.demand.items import DemandItem
from gpu_autoscaler.core.identity_cache import RecentValues
from gpu_autoscaler.core.nodes.spread_cost import spread_micro_usd_per_hour
from gpu_autoscaler.core.nodes.views import Counted, NodeView, table_of
from gpu_autoscaler.core.placement.resources import Bools, Floats, Ints, rows
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.fleet.problem import FleetNode, FleetProblem
from gpu_autoscaler.core.provisioning.fleet.solver import cheapest_fleet
from gpu_autoscaler.core.provisioning.offers import OfferCatalog, Offering
from gpu_autoscaler.core.provisioning.topology_domains import MissingMembers, anti_affinity_groups
from gpu_autoscaler.core.state.interruption_history import capacity_pool_of
from gpu_autoscaler.model.jobs import PRIORITY_DEFAULT
from gpu_autoscaler.model.money import HOURS_PER_MONTH
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.reasons.buy import RejectionCause

_HOUR_SECONDS = 3600.0
# Costs are compared for one member in whole numbers; this keeps the remainder of the division.
_COST_PRECISION = 1_000_000
# Names in the counts of mixes: the pools without a share of spot of their own, and all capacity types.
_OTHER_POOLS, _ALL_TYPES = "", ""
_RATIO_DIGITS = 6  # 1 - 0.9 is a little less than 0.1 in floating point
# Fleets whose excess in one capacity pool is selected again elsewhere; what is left then stays.
_SPREADS_COUNT_MAX = 3
# By problem: work that a limit holds back is the same problem in every plan.
_FLEETS: RecentValues[bytes, tuple[FleetNode, ...]] = RecentValues(64)


class OfferSelector:
    """Selects among offerings. Counts managed GPUs by capacity pool and capacity type, including those being bought."""

    def __init__(self, catalog: OfferCatalog, views: tuple[NodeView, ...], policy: ScalingPolicy) -> None:
        self._catalog = catalog
        self._policy = policy
        gpus, gpus_by_pool = _counted(views)
        self._gpus = gpus.copy()  # by spot capacity pool; all under ""
        self._gpus_by_pool = gpus_by_pool.copy()  # by pool and capacity type
        self._spread_micro_usd_per_hour = spread_micro_usd_per_hour(views)
        # Pools with a share of spot of their own are no part of the policy's mix.
        self._own_ratios = {pool.name: pool.spot_ratio for pool in policy.pools if pool.spot_ratio is not None}
        self._costs: dict[int, Ints] = {}
        self._full: Bools | None = None  # until the next purchase
        rules = policy.spot
        self._is_risky = catalog.rates > rules.interruption_ratio_max
        self._calm_ratios = np.where(
            self._is_risky, rules.interruption_ratio_max / np.maximum(catalog.rates, 1e-9), 1.0
        )

    def add(self, pool: str, offer: Offer, count: int = 1) -> None:
        """Count this many more nodes of the offer; a negative count removes them."""
        self._full = None
        gpu_count = count * offer.resources.gpu_count
        self._gpus_by_pool[pool, offer.capacity_type] += gpu_count
        for name in _counted_as(offer):
            self._gpus[name] += gpu_count

    def add_spread_cost(self, micro_usd_per_hour: int) -> None:
        """Count what a purchase costs for the share of capacity pools; a negative amount removes it."""
        self._full = None
        self._spread_micro_usd_per_hour += micro_usd_per_hour

    def costs(self, priority: int) -> Ints:
        """Return the expected cost of a node of each offering, in micro-dollars an hour, above zero."""
        known = self._costs.get(priority)
        if known is None:
            catalog, rules = self._catalog, self._policy.spot
            lost_seconds = catalog.boot_seconds + rules.lost_work_seconds
            once_seconds = catalog.boot_seconds + catalog.rates * lost_seconds
            weight = (1.0 + priority / PRIORITY_DEFAULT) / (_HOUR_SECONDS * rules.node_lifetime_hours)
            # Reserved capacity is paid for in any case.
            prices = np.where(catalog.is_reserved, 0, catalog.prices_micro_usd_per_hour)
            costs = np.rint(prices * (1.0 + once_seconds * weight)).astype(np.int64)
            known = np.maximum(costs + self._policy.node_overhead_micro_usd_per_hour, 1)
            self._costs[priority] = known
        return known

    # ---- for one shape

    def ranked(self, buyer: DemandItem, members: Ints, missing: int, preferred_keys: Sequence[Ints] = ()) -> Ints:
        """Return the offerings that take a member, the best first: of least cost for each member that they would serve.

        Of equal cost the order is that of the sort keys `preferred_keys`, the least significant first.
        """
        each = self._cost_of_each(buyer, members, missing)
        preferred = self._without_full_pools(
            members > 0, each, is_gang=buyer.member_count > 1 or buyer.gang is not None
        )
        best_first = self._in_order(buyer, members > 0, preferred, each, preferred_keys)
        short = self._short_of_spot([self._catalog.offerings[best_first[0]]]) if best_first.size else ()
        if short:
            best_first = self._in_order(
                buyer, members > 0, self._with_its_share_of_spot(preferred, short), each, preferred_keys
            )
        return best_first

    def _in_order(
        self, buyer: DemandItem, accepted: Bools, preferred: Bools, each: Ints, preferred_keys: Sequence[Ints]
    ) -> Ints:
        catalog, costs = self._catalog, self.costs(buyer.priority)
        places = np.flatnonzero(accepted)
        has_gpus_for_nobody = catalog.has_gpus & (not buyer.shape.resources.has_gpus)
        keys = (
            *preferred_keys,
            costs,
            each,
            ~preferred,
            -catalog.pool_priorities,
            ~catalog.is_reserved,
            has_gpus_for_nobody,
        )
        return places[np.lexsort((places, *(key[places] for key in keys)))]

    def _cost_of_each(self, buyer: DemandItem, members: Ints, missing: int) -> Ints:
        served = np.minimum(np.maximum(members, 1), missing)
        return self.costs(buyer.priority) * _COST_PRECISION // served

    # ---- for many at once

    def accepts(self, wants: Sequence[MissingMembers], is_open: Sequence[Bools]) -> Bools:
        """Return for each want the offerings that it is bought from: those within limits that come first."""
        catalog = self._catalog
        accepts = np.zeros((len(wants), len(catalog.offerings)), dtype=np.bool_)
        for number, want in enumerate(wants):
            accepted = (catalog.members(want.item.shape) > 0) & is_open[number]
            if (accepted & catalog.is_reserved).any():
                accepted &= catalog.is_reserved
            if accepted.any():
                accepts[number] = accepted & (catalog.pool_priorities == catalog.pool_priorities[accepted].max())
        return accepts

    def fleet(self, wants: Sequence[MissingMembers], counts: list[int], accepts: Bools) -> Sequence[FleetNode]:
        """Return the nodes that cost least for these members of each want, within the policy's mix and spread.

        A gang is not spread: the loss of one member is the loss of all.
        """
        is_gang = any(want.item.gang is not None or want.item.member_count > 1 for want in wants)
        if is_gang and self._is_risky.any():
            accepts = self._all_without_full_pools(wants, counts, accepts, is_gang=True)
        nodes = list(self._cheapest(wants, counts, accepts))
        if short := self._short_of_spot([self._catalog.offerings[node.offer] for node in nodes]):
            shares = np.array([self._with_its_share_of_spot(accept, short) for accept in accepts], dtype=np.bool_)
            if (shares != accepts).any():
                accepts = shares
                nodes = list(self._cheapest(wants, counts, accepts))
        for _ in range(0 if is_gang else _SPREADS_COUNT_MAX):
            kept, apart = self._within_shares(nodes)
            if not apart:
                break
            left = Counter(pod for node in apart for pod in node.pods)
            more = self._elsewhere(wants, [left[number] for number in range(len(wants))], accepts, kept)
            nodes = [*kept, *more]
            if Counter(node.offer for node in more) == Counter(node.offer for node in apart):
                break
        return nodes

    def _elsewhere(
        self, wants: Sequence[MissingMembers], counts: list[int], accepts: Bools, kept: Iterable[FleetNode]
    ) -> Sequence[FleetNode]:
        """Return the cheapest nodes for these, without the capacity pools that the kept nodes have filled."""
        offerings = [self._catalog.offerings[node.offer] for node in kept]
        for offering in offerings:
            self.add(offering.pool.name, offering.offer)
        eased = self._all_without_full_pools(wants, counts, accepts, is_gang=False)
        for offering in offerings:
            self.add(offering.pool.name, offering.offer, -1)
        return self._cheapest(wants, counts, eased)

    def _all_without_full_pools(
        self, wants: Sequence[MissingMembers], counts: list[int], accepts: Bools, *, is_gang: bool
    ) -> Bools:
        eased = accepts.copy()
        for number, count in enumerate(counts):
            if count:
                item = wants[number].item
                each = self._cost_of_each(item, self._catalog.members(item.shape), count)
                eased[number] = self._without_full_pools(accepts[number], each, is_gang=is_gang)
        return eased

    def _cheapest(self, wants: Sequence[MissingMembers], counts: list[int], accepts: Bools) -> Sequence[FleetNode]:
        """Return the nodes that cost least for these members of each want.

        Work without GPUs may share nodes that are bought for their GPUs. No GPU node is bought for it alone if there is
        another: the GPUs would be paid for and idle.
        """
        fleet = self._solved(wants, counts, accepts)
        has_gpus = self._catalog.has_gpus
        asks_gpus = [want.item.shape.resources.has_gpus for want in wants]
        idle = [node for node in fleet if has_gpus[node.offer] and not any(asks_gpus[pod] for pod in node.pods)]
        without_gpus = accepts & ~has_gpus
        if not idle or not all(without_gpus[pod].any() for node in idle for pod in node.pods):
            return fleet
        again = Counter(pod for node in idle for pod in node.pods)
        others = self._solved(wants, [again[number] for number in range(len(wants))], without_gpus)
        return [*(node for node in fleet if node not in idle), *others]

    def _solved(self, wants: Sequence[MissingMembers], counts: list[int], accepts: Bools) -> tuple[FleetNode, ...]:
        """Return the nodes that the fleet solver selects for the wants with missing members, by the wants' numbers."""
        asked = [number for number, count in enumerate(counts) if count]
        if not asked:
            return ()
        problem = FleetProblem(
            requests=rows((wants[number].item.shape.resources for number in asked), self._catalog.kinds),
            counts=np.array([counts[number] for number in asked], dtype=np.int64),
            groups=np.array(
                anti_affinity_groups([wants[number].item.shape.pod_constraints for number in asked]), dtype=np.int64
            ),
            accepts=accepts[asked],
            capacity=self._catalog.capacity,
            cost=self.costs(wants[0].item.priority).astype(np.float64),  # all wait with one priority
        )
        key = problem.digest()
        nodes = _FLEETS.get(key)
        if nodes is None:
            nodes = cheapest_fleet(problem).nodes
            _FLEETS.put(key, nodes)
        return tuple(FleetNode(offer=node.offer, pods=tuple(asked[pod] for pod in node.pods)) for node in nodes)

    # ---- why a cheaper one was rejected

    def why_rejected(self, cheaper: int, taken: int, priority: int) -> RejectionCause:
        """Return why `taken` is bought though `cheaper` has a lower price, fits and is within limits."""
        catalog, costs = self._catalog, self.costs(priority)
        if catalog.is_reserved[taken] and not catalog.is_reserved[cheaper]:
            return RejectionCause.RESERVED_FIRST
        if catalog.pool_priorities[cheaper] < catalog.pool_priorities[taken]:
            return RejectionCause.POOL_PRIORITY
        if self._is_full()[cheaper]:
            return RejectionCause.INTERRUPTION_RATE if self._is_risky[cheaper] else RejectionCause.CAPACITY_POOL_SHARE
        return RejectionCause.EXPECTED_COST if costs[taken] <= costs[cheaper] else RejectionCause.FLEET_COST

    # ---- the shares of spot of the policy and of pools

    def _short_of_spot(self, more: Sequence[Offering]) -> tuple[str, ...]:
        """Return the mixes that have too much on-demand with these nodes: pools with a share of their own, by name, and
        the mix of all others as "". Of the latter, what is missing of the reserved share may be on-demand."""
        gpus = Counter(self._gpus_by_pool)
        for offering in more:
            gpus[offering.pool.name, offering.offer.capacity_type] += offering.offer.resources.gpu_count
        mixes: Counter[tuple[str, str]] = Counter()
        for (pool, capacity_type), count in gpus.items():
            mix = pool if pool in self._own_ratios else _OTHER_POOLS
            mixes[mix, capacity_type] += count
            mixes[mix, _ALL_TYPES] += count
        return tuple(mix for mix in (*self._own_ratios, _OTHER_POOLS) if self._is_short_of_spot(mix, mixes))

    def _is_short_of_spot(self, mix: str, gpus: Mapping[tuple[str, str], int]) -> bool:
        on_demand, every = gpus.get((mix, CapacityType.ON_DEMAND), 0), gpus.get((mix, _ALL_TYPES), 0)
        if not on_demand:
            return False
        if mix in self._own_ratios:
            return on_demand > round((1.0 - self._own_ratios[mix]) * every, _RATIO_DIGITS)
        shares = self._policy.spot.mix
        reserved_missing = max(0.0, shares.reserved_ratio * every - gpus.get((mix, CapacityType.RESERVED), 0))
        return on_demand > shares.on_demand_ratio * every + reserved_missing

    def _with_its_share_of_spot(self, accepted: Bools, short: Iterable[str]) -> Bools:
        """Return the offerings without on-demand of these mixes, if cheaper spot with few interruptions is in them."""
        catalog = self._catalog
        for mix in short:
            belongs = self._belongs_to(mix)
            on_demand = accepted & catalog.is_on_demand & belongs
            if not on_demand.any():
                continue
            dearest = catalog.prices_micro_usd_per_hour[on_demand].min()
            is_calm = catalog.is_spot & ~self._is_risky & (catalog.prices_micro_usd_per_hour < dearest)
            if (accepted & belongs & is_calm).any():
                accepted = accepted & ~on_demand
        return accepted

    def _belongs_to(self, mix: str) -> Bools:
        names = (offering.pool.name for offering in self._catalog.offerings)
        mixes = (name if name in self._own_ratios else _OTHER_POOLS for name in names)
        return np.array([name == mix for name in mixes], dtype=np.bool_)

    # ---- shares of capacity pools

    def _without_full_pools(self, accepted: Bools, each: Ints, *, is_gang: bool) -> Bools:
        """Return the offerings without capacity pools that have their share of spot already, as far as others are left.

        `each` is the cost for one member. A pool with few interruptions is left only for one that costs little more,
        never for on-demand at its price, and not at all by a gang. One with many interruptions is left for spot
        elsewhere at any price, and for on-demand only when interruptions are frequent.
        """
        full = accepted & self._is_full()
        if is_gang:
            full &= self._is_risky
        left = accepted & ~full
        if not full.any() or not left.any():
            return accepted
        near = each[left].min() / (1.0 + self._policy.spot.capacity_pool_extra_cost_ratio_max)
        eased: Bools = left | (full & ~self._is_risky & (each < near))
        if not (left & ~self._catalog.is_on_demand).any():  # on-demand replaces only frequently interrupted spot
            eased |= full & (self._catalog.rates <= self._policy.spot.on_demand_fallback_ratio_min)
        return eased

    def _is_full(self) -> Bools:
        """True for spot in capacity pools that one more node would give more than their share."""
        if self._full is not None:
            return self._full
        catalog = self._catalog
        has = np.zeros(len(catalog.offerings), dtype=np.int64)
        for place, offerings in catalog.spot_at.items():
            if self._gpus[place]:
                has[offerings] = self._gpus[place]
        more = catalog.gpu_counts
        self._full = catalog.is_spot & (more > 0) & (has + more > self._shares(self._gpus[""] + more))
        return self._full

    def _shares(self, gpu_counts: Ints) -> Floats:
        """Return how many GPUs may be spot in the capacity pool of each offering: the fewer, the more interruptions."""
        rules = self._policy.spot
        most = rules.capacity_pool_month_micro_usd_max
        is_limit_reached = most is not None and self._spread_micro_usd_per_hour * HOURS_PER_MONTH >= most
        ratio = 1.0 if is_limit_reached else rules.capacity_pool_gpu_ratio_max
        whole = np.maximum(ratio * gpu_counts, float(rules.capacity_pool_gpu_count_min))
        shares: Floats = self._calm_ratios * whole
        return shares

    def _within_shares(self, nodes: Sequence[FleetNode]) -> tuple[list[FleetNode], list[FleetNode]]:
        """Split the nodes, in their order, into those within the share of their capacity pool, and those beyond."""
        offers = [self._catalog.offerings[node.offer].offer for node in nodes]
        gpu_count = self._gpus[""] + sum(offer.resources.gpu_count for offer in offers)
        shares = self._shares(np.full(len(self._catalog.offerings), gpu_count, dtype=np.int64))
        gpus = self._gpus.copy()
        kept: list[FleetNode] = []
        apart: list[FleetNode] = []
        for node, offer in zip(nodes, offers, strict=True):
            place = capacity_pool_of(offer.instance_type, offer.zone)
            more = offer.resources.gpu_count
            is_spot = offer.capacity_type is CapacityType.SPOT
            if is_spot and more and gpus[place] + more > shares[node.offer]:
                apart.append(node)
                continue
            if is_spot:
                gpus[place] += more
            kept.append(node)
        return kept, apart

    def spot_shares(self, offers: Iterable[Offer]) -> "SpotShares":
        """Return what limits exchanges within a fleet of these offers: the spot share of each capacity pool."""
        gpus = self._gpus + _gpus_of(offers)
        shares = self._shares(np.full(len(self._catalog.offerings), gpus[""], dtype=np.int64))
        return SpotShares(self._catalog, gpus, shares)


class SpotShares:
    """GPUs by spot capacity pool while nodes of a fleet are exchanged."""

    def __init__(self, catalog: OfferCatalog, gpus: Counter[str], shares: Floats) -> None:
        self._catalog = catalog
        self._gpus = gpus
        self._shares = shares

    def moves(self, place: int, other: int) -> bool:
        """Exchange a node for one of the other offering if its capacity pool allows it; return whether it was."""
        before, after = self._catalog.offerings[place].offer, self._catalog.offerings[other].offer
        if after.capacity_type is CapacityType.SPOT:
            name, count = capacity_pool_of(after.instance_type, after.zone), after.resources.gpu_count
            if count and self._gpus[name] + count > self._shares[other]:
                return False
        self._gpus.subtract(_gpus_of([before]))
        self._gpus.update(_gpus_of([after]))
        return True


class _Bought(NamedTuple):
    """What counted nodes that were bought have in common."""

    pool: str
    capacity_type: CapacityType
    counts_as: tuple[str, ...]
    gpu_count: int


def _bought(view: NodeView) -> _Bought | None:
    decision = None if view.order is None else view.order.decision
    if decision is None or not view.is_ours or not view.is_counted:
        return None
    offer = decision.offer
    return _Bought(decision.pool, offer.capacity_type, _counted_as(offer), offer.resources.gpu_count)


_BOUGHT = Counted(_bought)


def _counted(views: Sequence[NodeView]) -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """Return the GPUs that were bought and count: by what they count as, and by pool and capacity type."""
    gpus: Counter[str] = Counter()
    by_pool: Counter[tuple[str, str]] = Counter()
    for kind, count in table_of(views, _BOUGHT).items():
        by_pool[kind.pool, kind.capacity_type] += count * kind.gpu_count
        for name in kind.counts_as:
            gpus[name] += count * kind.gpu_count
    return gpus, by_pool


def _counted_as(offer: Offer) -> tuple[str, ...]:
    """Return everything that a node of this offer counts as: all, and its spot capacity pool."""
    if offer.capacity_type is CapacityType.SPOT:
        return "", capacity_pool_of(offer.instance_type, offer.zone)
    return ("",)


def _gpus_of(offers: Iterable[Offer]) -> Counter[str]:
    gpus: Counter[str] = Counter()
    for offer in offers:
        for name in _counted_as(offer):
            gpus[name] += offer.resources.gpu_count
    return gpus

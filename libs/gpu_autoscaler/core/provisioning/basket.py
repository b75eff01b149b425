"""Nodes to buy, within the limits. Each counts as free capacity and against the limits at once.

A scratch pad of one step of `plan`. What a gang adds can be rolled back as long as nothing was added after it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import msgspec
import numpy as np

from gpu_autoscaler.core.demand.items import BillingScope, DemandItem, DemandSource, longest_scope
from gpu_autoscaler.core.draft import Draft, Purchase
from gpu_autoscaler.core.limits.limits import billing_scope_of, limit_usage_of
from gpu_autoscaler.core.limits.spend import spend_caps
from gpu_autoscaler.core.placement.bins import ordered_labels, slices_in
from gpu_autoscaler.core.placement.engine import FreeCapacity
from gpu_autoscaler.core.placement.pod_affinity import describe_rules
from gpu_autoscaler.core.placement.preference_scores import PlannedPods
from gpu_autoscaler.core.placement.resources import Bools, Ints
from gpu_autoscaler.core.placement.shapes import Bin, Shape
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.batching import fully_packed_nodes
from gpu_autoscaler.core.provisioning.fleet.problem import FleetNode
from gpu_autoscaler.core.provisioning.offers import UNKNOWN_PRICE, OfferCatalog, Offering
from gpu_autoscaler.core.provisioning.preference_exchange import PreferenceExchange
from gpu_autoscaler.core.provisioning.selection import OfferSelector
from gpu_autoscaler.core.provisioning.topology_domains import MissingMembers
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.reasons.buy import (
    BelowMinimum,
    BuyReason,
    DroppedPreference,
    RejectedOffer,
    RejectionCause,
    ReplacesAtRiskNode,
    UnmetDemand,
)
from gpu_autoscaler.model.reasons.defer import DeferReason, PodConstraintsViolated
from gpu_autoscaler.model.resources import NO_RESOURCES, Resources


class Order(msgspec.Struct, kw_only=True):
    """One node in the basket, and the items that count on it."""

    action_id: ActionId
    offering: Offering
    buyer: DemandItem
    scope: BillingScope  # with the longest work time of all items on the node
    instead_of: RejectedOffer | None
    dropped: tuple[DroppedPreference, ...]
    demand: dict[str, None] = msgspec.field(default_factory=dict)  # keys of all items with a member here, in order
    depends_on: set[str] = msgspec.field(default_factory=set)

    @property
    def gang(self) -> str | None:
        """The gang whose purchase it is part of."""
        return self.buyer.gang

    @property
    def spread_micro_usd_per_hour(self) -> int:
        """What it costs more for the share of capacity pools."""
        rejected = self.instead_of
        return 0 if rejected is None else rejected.spread_micro_usd_per_hour(self.offering.price_micro_usd_per_hour)

    @property
    def transaction(self) -> str:
        """Orders of one transaction are made together or not at all."""
        return self.gang or self.action_id


class PurchaseContext(NamedTuple):
    """What a decision reports besides its order."""

    nodes_count_before: int  # managed nodes before this purchase
    offers_count: int  # that were considered
    avoided_counts: Mapping[str, int]  # nodes with free capacity that cost more to keep, by demand item


def decision_of(order: Order, draft: Draft, policy: ScalingPolicy, counted: PurchaseContext) -> BuyNode:
    """Return the purchase, with all that its executor needs."""
    pool, offer = order.offering.pool, order.offering.offer
    return BuyNode(
        action_id=order.action_id,
        pool=pool.name,
        offer=offer,
        labels=tuple(sorted(ordered_labels(pool, offer, order.action_id, order.buyer.project).items())),
        taints=pool.taints,
        startup_taints=pool.startup_taints,
        deadline_at=draft.as_of + timedelta(seconds=policy.boot_seconds_max),
        reason=_reason(order, draft, policy, counted),
        gang=order.gang,
        slices=slices_in(pool, offer),
        work_seconds_max=order.scope.work_seconds_max,
    )


def _reason(order: Order, draft: Draft, policy: ScalingPolicy, counted: PurchaseContext) -> BuyReason:
    if order.buyer.buy_reason is not None:
        return order.buyer.buy_reason
    if order.buyer.source is DemandSource.MINIMUM:
        return BelowMinimum(nodes_count=counted.nodes_count_before, nodes_count_min=policy.nodes_count_min)
    demand = tuple(order.demand)
    leaves = order.buyer.leaves
    if order.buyer.source is DemandSource.AT_RISK_POD and leaves is not None:
        at_risk = (view for view in draft.views if view.node_uid == leaves and view.notice is not None)
        if (view := next(at_risk, None)) is not None:
            return ReplacesAtRiskNode(
                node_uid=leaves, node_name=view.name, reclaim_at=view.reclaim_at, demand=demand,
                instead_of=order.instead_of, dropped=order.dropped,
            )  # fmt: skip
    return UnmetDemand(
        demand=demand,
        offers_considered=counted.offers_count,
        price_micro_usd_per_hour=order.offering.price_micro_usd_per_hour,
        instead_of=order.instead_of,
        dropped=order.dropped,
        nodes_avoided_count=max((counted.avoided_counts.get(key, 0) for key in demand), default=0),
    )


class CheaperOfferings:
    """Finds the offering of least price that would hold a node's load. Equal loads are looked up once."""

    def __init__(self, catalog: OfferCatalog) -> None:
        self._catalog = catalog
        self._found: dict[tuple[int, Shape, Resources], int | None] = {}

    def than(self, taken: int, shape: Shape, load: Resources) -> int | None:
        """Return the offering of least price below that of the taken one that would hold the load; None: there is none.

        Work of this shape is part of the load. Whether it may run on spot is not considered.
        """
        asked = (taken, shape, load)
        if asked not in self._found:
            self._found[asked] = self._look(taken, shape, load)
        return self._found[asked]

    def _look(self, taken: int, shape: Shape, load: Resources) -> int | None:
        catalog = self._catalog
        prices = catalog.prices_micro_usd_per_hour
        anywhere = msgspec.structs.replace(shape, resources=load, is_spot_allowed=True)
        is_cheaper = (prices < prices[taken]) & (prices != UNKNOWN_PRICE)
        places = np.flatnonzero(is_cheaper & (catalog.members_if_available(anywhere) > 0))
        return int(places[prices[places].argmin()]) if places.size else None


def rejected_offer(
    cheaper: int,
    taken: int,
    shape: Shape,
    priority: int,
    catalog: OfferCatalog,
    selector: OfferSelector,
    *,
    is_within_limits: bool,
) -> RejectedOffer:
    """Return why the cheaper offering was not taken for work of this shape, before the other is bought."""
    offering = catalog.offerings[cheaper]
    offer = offering.offer
    if offer.capacity_type is CapacityType.SPOT and not shape.is_spot_allowed:
        because = RejectionCause.SPOT_NOT_ALLOWED
    elif catalog.unavailable_until(offer) is not None:
        because = RejectionCause.UNAVAILABLE
    elif not is_within_limits:
        because = RejectionCause.LIMIT
    else:
        because = selector.why_rejected(cheaper, taken, priority)
    return RejectedOffer(offer=offer.key, price_micro_usd_per_hour=offering.price_micro_usd_per_hour, because=because)


# Fleets that are tried for fewer members if one for all would exceed a limit; each try halves the interval.
_TRIES_COUNT_MAX = 6
# Fleets that are bought one after the other, each from the pools that the previous one has not filled.
_ROUNDS_COUNT_MAX = 3
_SECONDS_PER_HOUR = 3600.0


class _Answers:
    """What limits allow while the basket is as it is."""

    def __init__(self) -> None:
        self.excesses: dict[tuple[int, BillingScope], DeferReason | None] = {}
        self.open: dict[BillingScope, Bools] = {}
        self.closed: dict[BillingScope, DeferReason | None] = {}


class BasketMark(NamedTuple):
    """A point to come back to: how many orders there are, and what limits allow beside them."""

    orders_count: int
    answers: _Answers


class Basket:
    """Buys within the limits: the cheapest fleet for many members at once, or one shape after the other."""

    def __init__(self, draft: Draft, catalog: OfferCatalog, policy: ScalingPolicy) -> None:
        self._draft = draft
        self._catalog = catalog
        self._policy = policy
        self._usage = limit_usage_of(draft, policy)
        has_price_limits = bool(spend_caps(policy)) or policy.price_micro_usd_per_hour_max is not None
        # Of each offering the one whose limits are evaluated for it: all that differ only in price share one.
        places = np.arange(len(catalog.offerings))
        self._limited_as: Ints = places if has_price_limits else catalog.same_limits
        self._limited: list[int] = np.flatnonzero(self._limited_as == places).tolist()
        self._projects_limited = frozenset(part.name for part in policy.limits.projects)
        self._selector = OfferSelector(catalog, draft.views, policy)
        self._cheaper = CheaperOfferings(catalog)
        self._answers = _Answers()
        for purchase in draft.purchases:
            self._count(purchase.decision.pool, purchase.decision.offer, billing_scope_of(purchase.decision))
        self._nodes_count_before = self._usage.nodes_count
        self.avoided_counts: dict[str, int] = {}  # nodes that cost more to keep than a new one, by demand item
        self._orders: dict[str, Order] = {}  # by bin key, in the order of buying
        self._exchange = PreferenceExchange(catalog, self._selector, draft.free_capacity)
        self.free_capacity.add_new_domains(catalog.domains)

    @property
    def free_capacity(self) -> FreeCapacity:
        """The free capacity that purchases add to."""
        return self._draft.free_capacity

    @property
    def nodes_count(self) -> int:
        """Managed nodes with those in the basket, as limits count them."""
        return self._usage.nodes_count

    def with_current_usage(self, reason: DeferReason) -> DeferReason:
        """Return why something is not bought, as limits stand with what is in the basket."""
        return self._usage.with_current_usage(reason)

    def mark(self) -> BasketMark:
        """Return a point to come back to with `rollback`, until `assign` is called."""
        return BasketMark(len(self._orders), self._answers)

    def rollback(self, mark: BasketMark) -> None:
        """Remove everything bought since the mark, except for the free capacity, which the caller rolls back."""
        for key in list(self._orders)[mark.orders_count :]:
            self._cancel(key)
        self._answers = mark.answers

    def buy_filled(self, want: MissingMembers) -> tuple[str, ...]:
        """Buy for pods of equal shape the nodes of the cheapest fleet that more of these pods would not improve."""
        return self._buy_once([want], is_filled_only=True)[0]

    def buy_together(self, wants: Sequence[MissingMembers]) -> tuple[tuple[str, ...], ...]:
        """Buy the cheapest fleet for the members of all wants at once, with its pods placed.

        Returns the bin keys for each want. A want that no offer within limits takes has none. If a limit stops the
        purchase, the members that have waited longest are served. A gang gets all or nothing. What one pool's limit
        leaves over is bought from the next pool, again as one fleet.
        """
        keys: list[tuple[str, ...]] = [()] * len(wants)
        for _ in range(_ROUNDS_COUNT_MAX):
            left = [
                msgspec.structs.replace(want, sinces=want.sinces[len(had) :])
                for want, had in zip(wants, keys, strict=True)
            ]
            more = self._buy_once(left) if any(want.count for want in left) else ()
            if not any(more):
                break
            keys = [had + new for had, new in zip(keys, more, strict=True)]
        return tuple(keys)

    def _buy_once(
        self, wants: Sequence[MissingMembers], *, is_filled_only: bool = False
    ) -> tuple[tuple[str, ...], ...]:
        accepts = self._accepts(wants)
        counts = [want.count if accepted.any() else 0 for want, accepted in zip(wants, accepts, strict=True)]
        is_gang = any(want.item.gang is not None or want.item.member_count > 1 for want in wants)
        fleet = () if is_gang and not all(counts) else self._fleet_within_limits(wants, counts, accepts)
        fleet = self._with_preferences(fleet, wants, accepts)
        if is_filled_only:
            first = wants[0].item
            fleet = fully_packed_nodes(
                fleet, accepts[0], self._catalog.members(first.shape), self._selector.costs(first.priority)
            )
        keys: tuple[list[str], ...] = tuple([] for _ in wants)
        bins: list[Bin] = []
        planned_pods = PlannedPods(self.free_capacity)
        for node in fleet:
            items = [wants[pod].item for pod in node.pods]
            taken = sum((item.shape.resources for item in items), start=NO_RESOURCES)
            shapes = [item.shape for item in items]
            dropped = self._exchange.dropped(node.offer, shapes, planned_pods)
            entry = self._order(node.offer, items[0], taken, dropped)
            self._serve(self._orders[entry.key], _joint_scope(items))
            for shape in shapes:
                planned_pods.add(shape, entry.labels)
            bins.append(msgspec.structs.replace(entry, free=entry.free - taken))
            for pod in node.pods:
                keys[pod].append(entry.key)
        self.free_capacity.put_all(bins)
        return tuple(tuple(key) for key in keys)

    def buy(self, buyer: DemandItem, members_count: int) -> tuple[int, DeferReason | None]:
        """Buy nodes for this many members one by one, within the limits; return for how many, and why no more.

        A gang gets all or nothing, with nothing left in the basket.
        """
        covered, mark, bought = 0, self.mark(), list[str]()
        reason: DeferReason | None = None
        members = self._catalog.members(buyer.shape)
        place: int | None = None
        while covered < members_count and reason is None:
            missing = members_count - covered
            # The best offer stays the best while it is filled completely and within limits.
            goes_on = place is not None and members[place] <= missing and not buyer.shape.preferences.depends_on_pods
            if place is None or not goes_on or self._excess(place, self._limit_scope(buyer.billing_scope)) is not None:
                place, reason = self._choose(buyer, members, missing)
            if place is not None:
                entry = self._order_for(place, buyer)
                self.free_capacity.put(entry)
                bought.append(entry.key)
                covered += min(int(members[place]), missing)
        if reason is not None and buyer.member_count > 1:
            for key in bought:
                self.free_capacity.remove(key)
            self.rollback(mark)
            return 0, reason
        return covered, reason

    def buy_one_by_one(self, buyer: DemandItem, members_count: int) -> tuple[tuple[str, ...], DeferReason | None]:
        """Buy for members whose pod constraints make each node depend on the previous one.

        Returns the bin keys of those placed, and why no more. A gang gets all or nothing.
        """
        placed: tuple[str, ...] = ()
        bought: list[str] = []
        reason: DeferReason | None = None
        members = self._catalog.members(buyer.shape)
        zones = [offering.node.labels.get(labels.ZONE) for offering in self._catalog.offerings]
        mark, bought_mark = self.free_capacity.mark(), self.mark()
        while len(placed) < members_count and reason is None:
            is_open = self.free_capacity.open_zones(buyer.shape, zones)
            place, reason = self._choose(buyer, np.where(is_open, members, 0), 1)
            if place is None:
                reason = (
                    PodConstraintsViolated.of(describe_rules(buyer.shape.pod_constraints)) if members.any() else reason
                )
                break
            entry = self._order_for(place, buyer)
            self.free_capacity.put(entry)
            bought.append(entry.key)
            taken = self.free_capacity.place_on((entry.key,), buyer.shape, members_count - len(placed))
            placed += taken
            if not taken:
                reason = PodConstraintsViolated.of(describe_rules(buyer.shape.pod_constraints))
                self._remove(bought.pop())
        if reason is not None and buyer.member_count > 1:
            self.free_capacity.rollback(mark)
            self.rollback(bought_mark)
            return (), reason
        return placed, reason

    def assign(self, item: DemandItem, keys: tuple[str, ...]) -> None:
        """Record that members of the item count on these bins; a gang's purchases depend on those it shares."""
        orders = [self._orders[key] for key in dict.fromkeys(keys) if key in self._orders]
        for order in orders:
            order.demand[item.key] = None
            self._serve(order, longest_scope(order.scope, item))
        own = [order for order in orders if order.gang is not None and order.gang == item.gang]
        shared = {order.transaction for order in orders} - {order.transaction for order in own}
        for order in own:
            order.depends_on |= shared

    def _serve(self, order: Order, scope: BillingScope) -> None:
        """Change the billing scope of the order."""
        if scope != order.scope:
            self._count(order.offering.pool.name, order.offering.offer, order.scope, -1)
            self._count(order.offering.pool.name, order.offering.offer, scope)
            order.scope = scope

    def purchases(self) -> tuple[Purchase, ...]:
        """Return the content of the basket as decisions, in the order of buying."""
        counted = PurchaseContext(
            nodes_count_before=self._nodes_count_before,
            offers_count=len(self._catalog.offerings),
            avoided_counts=self.avoided_counts,
        )
        return tuple(
            Purchase(
                decision=decision_of(order, self._draft, self._policy, counted),
                transaction=order.transaction,
                depends_on=frozenset(order.depends_on),
            )
            for order in self._orders.values()
        )

    def _fleet_within_limits(
        self, wants: Sequence[MissingMembers], counts: list[int], accepts: Bools
    ) -> Sequence[FleetNode]:
        """Return the nodes of the cheapest fleet for all members.

        If limits do not allow it, return the fleet for as many as a few tries find, those that have waited longest
        first. Empty for a gang that cannot have all its members.
        """
        fleet = self._selector.fleet(wants, counts, accepts)
        within_count = self._within_limits_count(wants, fleet)
        if within_count == len(fleet):
            return fleet
        if any(want.item.gang is not None or want.item.member_count > 1 for want in wants):
            return ()
        waiting = sorted(
            (since, number) for number, want in enumerate(wants) for since in want.sinces[: counts[number]]
        )
        best: Sequence[FleetNode] = ()
        served_count, over_count = 0, len(waiting)
        count = over_count * within_count // len(fleet)
        for _ in range(_TRIES_COUNT_MAX):
            if not served_count < count < over_count:
                break
            oldest = Counter(number for _, number in waiting[:count])
            fleet = self._selector.fleet(wants, [oldest[number] for number in range(len(wants))], accepts)
            if self._within_limits_count(wants, fleet) == len(fleet):
                best, served_count = fleet, count
            else:
                over_count = count
            count = (served_count + over_count) // 2
        return best

    def _with_preferences(
        self, fleet: Sequence[FleetNode], wants: Sequence[MissingMembers], accepts: Bools
    ) -> Sequence[FleetNode]:
        """Return the fleet with preferences satisfied at equal cost; in its own pools and zones if limits require."""
        preferred = self._exchange.exchanged(fleet, wants, accepts)
        if preferred is fleet or self._within_limits_count(wants, preferred) == len(fleet):
            return preferred
        return self._exchange.exchanged(fleet, wants, accepts, is_at_home=True)

    def _accepts(self, wants: Sequence[MissingMembers]) -> Bools:
        """Return for each want the offerings within limits that it is bought from."""
        return self._selector.accepts(
            wants, [self._within_limits(self._limit_scope(want.item.billing_scope)) for want in wants]
        )

    def has_offering_within_limits(self, scope: BillingScope) -> bool:
        """False if every offering would exceed a limit; then nothing has to be selected."""
        return bool(self._within_limits(self._limit_scope(scope)).any())

    def _common_excess(self, scope: BillingScope) -> DeferReason | None:
        """Return the limit that every offering would exceed, if it is the same; cached until the next purchase."""
        closed = self._answers.closed
        if scope not in closed:
            excesses = (self._excess(place, scope) for place in self._limited)
            first = next(excesses, None)
            is_one = first is not None and all(excess == first for excess in excesses)
            closed[scope] = first if is_one else None
        return closed[scope]

    def _within_limits(self, scope: BillingScope) -> Bools:
        """Return which offerings are within limits; cached until the next purchase."""
        known = self._answers.open
        if scope not in known:
            is_open = np.zeros(len(self._catalog.offerings), dtype=np.bool_)
            is_open[self._limited] = [self._excess(place, scope) is None for place in self._limited]
            known[scope] = is_open[self._limited_as]
        return known[scope]

    def _within_limits_count(self, wants: Sequence[MissingMembers], fleet: Sequence[FleetNode]) -> int:
        """Return how many nodes of the fleet may be bought before the first that exceeds a limit."""
        counted: list[tuple[str, Offer, BillingScope]] = []
        for node in fleet:
            offering, scope = (
                self._catalog.offerings[node.offer],
                _joint_scope([wants[pod].item for pod in node.pods]),
            )
            if self._usage.excess(offering.pool.name, offering.offer, scope) is not None:
                break
            self._usage.add(offering.pool.name, offering.offer, scope)
            counted.append((offering.pool.name, offering.offer, scope))
        for pool, offer, scope in counted:
            self._usage.add(pool, offer, scope, -1)
        return len(counted)

    def _choose(self, buyer: DemandItem, members: Ints, missing: int) -> tuple[int | None, DeferReason | None]:
        """Return the best offering within limits for the missing members."""
        if not members.any():
            return None, self._catalog.why_no_offering(buyer.shape)
        scope = self._limit_scope(buyer.billing_scope)
        reason = self._common_excess(scope)
        if reason is not None:
            return None, reason
        for place in self._selector.ranked(buyer, members, missing, self._exchange.keys(buyer.shape)).tolist():
            excess = self._excess(place, scope)
            if excess is None:
                return place, None
            reason = reason or excess
        return None, reason

    def _excess(self, place: int, scope: BillingScope) -> DeferReason | None:
        """Return the limit that one more node of the offering would exceed; cached until the next purchase.

        `scope`: as limits distinguish it.
        """
        asked = (int(self._limited_as[place]), scope)
        excesses = self._answers.excesses
        if asked not in excesses:
            offering = self._catalog.offerings[asked[0]]
            excesses[asked] = self._usage.excess(offering.pool.name, offering.offer, scope)
        return excesses[asked]

    def _limit_scope(self, scope: BillingScope) -> BillingScope:
        """Return the scope reduced to what limits distinguish, so that answers are shared: projects with limits of
        their own and, with spend caps, work time rounded up to hours."""
        project, seconds = scope.project if scope.project in self._projects_limited else None, scope.work_seconds_max
        if seconds is not None:
            hours_seconds = -(-seconds // _SECONDS_PER_HOUR) * _SECONDS_PER_HOUR
            seconds = self._usage.reserved_work_seconds(hours_seconds)
        return BillingScope(project, seconds)

    def _count(self, pool: str, offer: Offer, scope: BillingScope, count: int = 1) -> None:
        self._usage.add(pool, offer, scope, count)
        self._selector.add(pool, offer, count)
        self._answers = _Answers()

    def _order_for(self, place: int, buyer: DemandItem) -> Bin:
        """Add one node for a member of this buyer at least; return its bin."""
        dropped = self._exchange.dropped(place, (buyer.shape,), PlannedPods(self.free_capacity))
        return self._order(place, buyer, buyer.shape.resources, dropped)

    def _order(self, place: int, buyer: DemandItem, load: Resources, dropped: tuple[DroppedPreference, ...]) -> Bin:
        """Add one node for this load at least; return its bin, which the caller adds to the free capacity."""
        action_id, offering = self._draft.next_action_id(), self._catalog.offerings[place]
        node = msgspec.structs.replace(offering.node, key=f"action/{action_id}", name=action_id)
        instead_of = self._rejected(place, buyer, load)
        self._count(offering.pool.name, offering.offer, buyer.billing_scope)
        order = self._orders[node.key] = Order(
            action_id=action_id,
            offering=offering,
            buyer=buyer,
            scope=buyer.billing_scope,
            instead_of=instead_of,
            dropped=dropped,
        )
        self._selector.add_spread_cost(order.spread_micro_usd_per_hour)
        return node

    def _rejected(self, place: int, buyer: DemandItem, load: Resources) -> RejectedOffer | None:
        cheaper = self._cheaper.than(place, buyer.shape, load)
        if cheaper is None:
            return None
        is_within = self._excess(cheaper, self._limit_scope(buyer.billing_scope)) is None
        return rejected_offer(
            cheaper, place, buyer.shape, buyer.priority, self._catalog, self._selector, is_within_limits=is_within
        )

    def _remove(self, key: str) -> None:
        self.free_capacity.remove(key)
        self._cancel(key)

    def _cancel(self, key: str) -> None:
        order = self._orders.pop(key)
        self._count(order.offering.pool.name, order.offering.offer, order.scope, -1)
        self._selector.add_spread_cost(-order.spread_micro_usd_per_hour)


def _joint_scope(items: Sequence[DemandItem]) -> BillingScope:
    """Return the scope of a node for all of these: that of the first, with the longest work time."""
    scope = items[0].billing_scope
    for item in items[1:]:
        scope = longest_scope(scope, item)
    return scope

"""Nodes being bought: each shows up as room and counts against the limits at once.

A scratch pad of one step of `plan`. What a gang puts in can be taken out again, as long as nothing came after it.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from gpu_autoscaler.core.buying.burst import filled
from gpu_autoscaler.core.buying.choice import Choice, Lacking
from gpu_autoscaler.core.buying.market import Market
from gpu_autoscaler.core.buying.ordering import Counted, Order, decision_of
from gpu_autoscaler.core.buying.passed_over import Cheaper, passed_over
from gpu_autoscaler.core.buying.preferring import Preferring
from gpu_autoscaler.core.demand_items import BillingScope, DemandItem, longest_scope
from gpu_autoscaler.core.draft import Draft, Purchase
from gpu_autoscaler.core.fleet.problem import FleetNode
from gpu_autoscaler.core.limits import limit_usage_of, billing_scope_of
from gpu_autoscaler.core.placement import Room
from gpu_autoscaler.core.placing.amounts import Bools, Ints
from gpu_autoscaler.core.placing.company import rules_told
from gpu_autoscaler.core.placing.liking import Newcomers
from gpu_autoscaler.core.placing.shapes import Bin
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.spending.money import spend_caps
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.passed import DroppedPreference, RejectedOffer
from gpu_autoscaler.model.reasons import (
    DeferReason,
    PodConstraintsViolated,
)
from gpu_autoscaler.model.resources import NO_RESOURCES, Resources

# Fleets that are tried for fewer members where one for all would pass a limit; each try halves what is left to find.
_TRIES_COUNT_MAX = 6
# Fleets that are bought one after the other, each from the pools that the one before has not filled up.
_ROUNDS_COUNT_MAX = 3
_SECONDS_PER_HOUR = 3600.0


class Basket:
    """Buys within the limits: for all at once at the least price of the whole, or for one shape after the other."""

    def __init__(self, draft: Draft, market: Market, policy: ScalingPolicy) -> None:
        self._draft = draft
        self._market = market
        self._policy = policy
        self._account = limit_usage_of(draft, policy)
        self._are_times_minded = bool(spend_caps(policy))
        self._projects_limited = frozenset(part.name for part in policy.limits.projects)
        self._choice = Choice(market, draft.views, policy)
        self._cheaper = Cheaper(market)
        self._excesses: dict[tuple[int, BillingScope], DeferReason | None] = {}  # while nothing more is counted
        self._open: dict[BillingScope, Bools] = {}  # as above
        self._closed: dict[BillingScope, DeferReason | None] = {}  # as above
        for purchase in draft.purchases:
            self._count(purchase.decision.pool, purchase.decision.offer, billing_scope_of(purchase.decision))
        self._nodes_count_before = self._account.nodes_count
        self._orders: dict[str, Order] = {}  # by bin key, in the order of buying
        self._preferring = Preferring(market, self._choice, draft.room)
        self.room.look_elsewhere(market.domains)

    @property
    def room(self) -> Room:
        """The room that purchases add to."""
        return self._draft.room

    @property
    def nodes_count(self) -> int:
        """Nodes of ours with those in the basket, as limits count them."""
        return self._account.nodes_count

    def with_current_usage(self, reason: DeferReason) -> DeferReason:
        """Return why something is not bought, as limits stand with what is in the basket."""
        return self._account.with_current_usage(reason)

    def mark(self) -> int:
        """A point to come back to with `rollback`."""
        return len(self._orders)

    def rollback(self, mark: int) -> None:
        """Everything that was bought since the mark has not been; the room is the caller's to roll back."""
        for key in list(self._orders)[mark:]:
            self._forget(key)

    def buy_filled(self, want: Lacking) -> tuple[str, ...]:
        """Buy for pods that are all alike those nodes of the cheapest fleet that more of them would make no better."""
        return self._buy_once([want], is_filled_only=True)[0]

    def buy_together(self, wants: Sequence[Lacking]) -> tuple[tuple[str, ...], ...]:
        """Buy the cheapest fleet for the members of all wants at once, with its pods in their places.

        Returns the keys of the bins for each want: none for one that no offer within limits takes, and where a limit
        would be passed only as many as limits let for those that have waited longest. A gang gets all or nothing.
        What one pool's limit leaves over is bought from the next, together again.
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

    def _buy_once(self, wants: Sequence[Lacking], *, is_filled_only: bool = False) -> tuple[tuple[str, ...], ...]:
        """Buy one fleet."""
        accepts = self._accepts(wants)
        counts = [want.count if accepted.any() else 0 for want, accepted in zip(wants, accepts, strict=True)]
        is_gang = any(want.item.gang is not None or want.item.member_count > 1 for want in wants)
        fleet = () if is_gang and not all(counts) else self._fleet_within_limits(wants, counts, accepts)
        fleet = self._as_liked(fleet, wants, accepts)
        if is_filled_only:
            first = wants[0].item
            fleet = filled(fleet, accepts[0], self._market.members(first.shape), self._choice.costs(first.priority))
        keys: tuple[list[str], ...] = tuple([] for _ in wants)
        bins: list[Bin] = []
        newcomers = Newcomers(self.room)
        for node in fleet:
            items = [wants[each].item for each in node.pods]
            taken = sum((item.shape.resources for item in items), start=NO_RESOURCES)
            shapes = [item.shape for item in items]
            dropped = self._preferring.dropped(node.offer, shapes, newcomers)
            entry = self._order(node.offer, items[0], taken, dropped)
            self._serve(self._orders[entry.key], _customer_of(items))
            for shape in shapes:
                newcomers.come(shape, entry.labels)
            bins.append(msgspec.structs.replace(entry, free=entry.free - taken))
            for each in node.pods:
                keys[each].append(entry.key)
        self.room.put_all(bins)
        return tuple(tuple(each) for each in keys)

    def buy(self, buyer: DemandItem, members_count: int) -> tuple[int, DeferReason | None]:
        """Put nodes for this many members in the basket, one by one, as far as limits let; return for how many, and why
        no more.

        A gang gets all or nothing, with nothing left in the basket.
        """
        covered, bought = 0, []
        reason: DeferReason | None = None
        members = self._market.members(buyer.shape)
        place: int | None = None
        while covered < members_count and reason is None:
            missing = members_count - covered
            # The best offer stays the best while it is filled whole and within limits.
            goes_on = place is not None and members[place] <= missing and not buyer.shape.likes.minds_pods
            if place is None or not goes_on or self._excess(place, buyer.customer) is not None:
                place, reason = self._choose(buyer, members, missing)
            if place is not None:
                entry = self._order_for(place, buyer)
                self.room.put(entry)
                bought.append(entry.key)
                covered += min(int(members[place]), missing)
        if reason is not None and buyer.member_count > 1:
            for key in bought:
                self._take_out(key)
            return 0, reason
        return covered, reason

    def buy_one_by_one(self, buyer: DemandItem, members_count: int) -> tuple[tuple[str, ...], DeferReason | None]:
        """Buy for members whose rules about other pods make each node depend on the one before.

        Returns the bins that took them, and why no more; a gang gets all or nothing.
        """
        placed: tuple[str, ...] = ()
        bought: list[str] = []
        reason: DeferReason | None = None
        members = self._market.members(buyer.shape)
        zones = [sale.node.labels.get(labels.ZONE) for sale in self._market.sales]
        mark = self.room.mark()
        while len(placed) < members_count and reason is None:
            is_open = self.room.open_zones(buyer.shape, zones)
            place, reason = self._choose(buyer, np.where(is_open, members, 0), 1)
            if place is None:
                reason = PodConstraintsViolated(rules=rules_told(buyer.shape.company)) if members.any() else reason
                break
            entry = self._order_for(place, buyer)
            self.room.put(entry)
            bought.append(entry.key)
            taken = self.room.place_on((entry.key,), buyer.shape, members_count - len(placed))
            placed += taken
            if not taken:
                reason = PodConstraintsViolated(rules=rules_told(buyer.shape.company))
                self._take_out(bought.pop())
        if reason is not None and buyer.member_count > 1:
            self.room.rollback(mark)
            for key in bought:
                self._forget(key)
            return (), reason
        return placed, reason

    def assign(self, item: DemandItem, keys: tuple[str, ...]) -> None:
        """Note that members of the item count on these bins; a gang's purchases need what it shares."""
        orders = [self._orders[key] for key in dict.fromkeys(keys) if key in self._orders]
        for order in orders:
            order.demand[item.key] = None
            self._serve(order, longest_scope(order.customer, item))
        own = [order for order in orders if order.gang is not None and order.gang == item.gang]
        shared = {order.transaction for order in orders} - {order.transaction for order in own}
        for order in own:
            order.needs |= shared

    def _serve(self, order: Order, customer: BillingScope) -> None:
        """The node is for this from now on."""
        if customer != order.customer:
            self._count(order.sale.pool.name, order.sale.offer, order.customer, -1)
            self._count(order.sale.pool.name, order.sale.offer, customer)
            order.customer = customer

    def purchases(self) -> tuple[Purchase, ...]:
        """What is in the basket, as decisions, in the order of buying."""
        counted = Counted(nodes_count_before=self._nodes_count_before, offers_count=len(self._market.sales))
        return tuple(
            Purchase(
                decision=decision_of(order, self._draft, self._policy, counted),
                transaction=order.transaction,
                needs=frozenset(order.needs),
            )
            for order in self._orders.values()
        )

    def _fleet_within_limits(self, wants: Sequence[Lacking], counts: list[int], accepts: Bools) -> Sequence[FleetNode]:
        """Return the nodes of the cheapest fleet for all; where limits are in the way, of one for those that have
        waited longest: as many as a few tries find. Nothing for a gang that cannot have all."""
        fleet = self._choice.fleet(wants, counts, accepts)
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
            fleet = self._choice.fleet(wants, [oldest[number] for number in range(len(wants))], accepts)
            if self._within_limits_count(wants, fleet) == len(fleet):
                best, served_count = fleet, count
            else:
                over_count = count
            count = (served_count + over_count) // 2
        return best

    def _as_liked(self, fleet: Sequence[FleetNode], wants: Sequence[Lacking], accepts: Bools) -> Sequence[FleetNode]:
        """The fleet at the same cost as its pods like it; where that would pass a limit, in its own pools and zones."""
        liked = self._preferring.exchanged(fleet, wants, accepts)
        if liked is fleet or self._within_limits_count(wants, liked) == len(fleet):
            return liked
        return self._preferring.exchanged(fleet, wants, accepts, is_at_home=True)

    def _accepts(self, wants: Sequence[Lacking]) -> Bools:
        """For each want the sales that it is bought from, of those within limits."""
        return self._choice.accepts(wants, [self._open_to(self._as_limits_see(want.item.customer)) for want in wants])

    def is_open_to(self, customer: BillingScope) -> bool:
        """False where every sale would pass a limit: then nobody has to be asked what would be best."""
        return bool(self._open_to(self._as_limits_see(customer)).any())

    def _closed_to(self, customer: BillingScope) -> DeferReason | None:
        """The limit that each sale would pass, where it is one for all; found once for as long as nothing is bought."""
        asked = self._as_limits_see(customer)
        if asked not in self._closed:
            excesses = [self._excess(place, asked) for place in range(len(self._market.sales))]
            is_one = bool(excesses) and all(each == excesses[0] for each in excesses)
            self._closed[asked] = excesses[0] if is_one else None
        return self._closed[asked]

    def _open_to(self, customer: BillingScope) -> Bools:
        """The sales within limits, found once for as long as nothing is bought."""
        if customer not in self._open:
            sales = range(len(self._market.sales))
            self._open[customer] = np.array([self._excess(place, customer) is None for place in sales], np.bool_)
        return self._open[customer]

    def _within_limits_count(self, wants: Sequence[Lacking], fleet: Sequence[FleetNode]) -> int:
        """Return how many nodes of the fleet may be bought before the first that passes a limit."""
        counted: list[tuple[str, Offer, BillingScope]] = []
        for node in fleet:
            sale, customer = self._market.sales[node.offer], _customer_of([wants[each].item for each in node.pods])
            if self._account.excess(sale.pool.name, sale.offer, customer) is not None:
                break
            self._account.add(sale.pool.name, sale.offer, customer)
            counted.append((sale.pool.name, sale.offer, customer))
        for pool, offer, customer in counted:
            self._account.add(pool, offer, customer, -1)
        return len(counted)

    def _choose(self, buyer: DemandItem, members: Ints, missing: int) -> tuple[int | None, DeferReason | None]:
        """The best sale within limits for the members that are missing."""
        if not members.any():
            return None, self._market.why_nothing(buyer.shape)
        reason = self._closed_to(buyer.customer)
        if reason is not None:
            return None, reason
        liked = self._preferring.keys(buyer.shape)
        for place in self._choice.ranked(buyer, members, missing, liked).tolist():
            excess = self._excess(place, buyer.customer)
            if excess is None:
                return place, None
            reason = reason or excess
        return None, reason

    def _excess(self, place: int, customer: BillingScope) -> DeferReason | None:
        """The limit that one more node of the sale would pass, found once for as long as nothing is bought."""
        customer = self._as_limits_see(customer)
        asked = (place, customer)
        if asked not in self._excesses:
            sale = self._market.sales[place]
            self._excesses[asked] = self._account.excess(sale.pool.name, sale.offer, customer)
        return self._excesses[asked]

    def _as_limits_see(self, customer: BillingScope) -> BillingScope:
        """With limits of money by time what takes as many hours is alike; without them all work of a project is.

        Projects without limits of their own are alike as well.
        """
        if not self._are_times_minded:
            return BillingScope(customer.project if customer.project in self._projects_limited else None)
        seconds = customer.work_seconds_max
        if seconds is None:
            return BillingScope(customer.project)
        return BillingScope(customer.project, -(-seconds // _SECONDS_PER_HOUR) * _SECONDS_PER_HOUR)

    def _count(self, pool: str, offer: Offer, customer: BillingScope, count: int = 1) -> None:
        self._account.add(pool, offer, customer, count)
        self._choice.add(offer, count)
        self._excesses.clear()
        self._open.clear()
        self._closed.clear()

    def _order_for(self, place: int, buyer: DemandItem) -> Bin:
        """Put one node in the basket, for a member of this buyer at least."""
        dropped = self._preferring.dropped(place, (buyer.shape,), Newcomers(self.room))
        return self._order(place, buyer, buyer.shape.resources, dropped)

    def _order(self, place: int, buyer: DemandItem, load: Resources, dropped: tuple[DroppedPreference, ...]) -> Bin:
        """Put one node in the basket, for this load at least; the room is the caller's to add."""
        action_id, sale = self._draft.next_action_id(), self._market.sales[place]
        node = msgspec.structs.replace(sale.node, key=f"action/{action_id}", name=action_id)
        instead_of = self._instead_of(place, buyer, load)
        self._count(sale.pool.name, sale.offer, buyer.customer)
        self._orders[node.key] = Order(
            action_id=action_id,
            sale=sale,
            buyer=buyer,
            customer=buyer.customer,
            instead_of=instead_of,
            dropped=dropped,
        )
        return node

    def _instead_of(self, place: int, buyer: DemandItem, load: Resources) -> RejectedOffer | None:
        cheaper = self._cheaper.than(place, buyer.shape, load)
        if cheaper is None:
            return None
        is_within = self._excess(cheaper, buyer.customer) is None
        return passed_over(
            cheaper, place, buyer.shape, buyer.priority, self._market, self._choice, is_within_limits=is_within
        )

    def _take_out(self, key: str) -> None:
        self.room.remove(key)
        self._forget(key)

    def _forget(self, key: str) -> None:
        order = self._orders.pop(key)
        self._count(order.sale.pool.name, order.sale.offer, order.customer, -1)


def _customer_of(items: Sequence[DemandItem]) -> BillingScope:
    """Who buys a node for all of these: the first, for as long as the longest of them takes."""
    customer = items[0].customer
    for item in items[1:]:
        customer = longest_scope(customer, item)
    return customer

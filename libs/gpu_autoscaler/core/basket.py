"""Nodes being bought: each shows up as room and counts against the limits at once.

A scratch pad of one step of `plan`. What a gang puts in can be taken out again, as long as nothing came after it.
"""

from datetime import timedelta

import msgspec

from gpu_autoscaler.core.bins import ordered_labels
from gpu_autoscaler.core.demand import DemandItem, DemandSource
from gpu_autoscaler.core.draft import Draft, Purchase
from gpu_autoscaler.core.life import NodeView
from gpu_autoscaler.core.limits import Account
from gpu_autoscaler.core.market import Candidate, Market
from gpu_autoscaler.core.placement import Room, Shape
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.ids import ActionId, NodeUid
from gpu_autoscaler.model.reasons import BelowMinimum, BuyReason, HoldReason, ReplacesDoomed, UnmetDemand

# Prices are compared for one member in whole numbers; this keeps the remainder of the division.
_PRICE_PRECISION = 1_000_000


class _Order(msgspec.Struct, kw_only=True):
    """One node in the basket, and who counts on it."""

    action_id: ActionId
    candidate: Candidate
    buyer: DemandItem
    demand: dict[str, None]  # keys of all items with a member here, in the order in which they came
    needs: set[str]

    @property
    def gang(self) -> str | None:
        return self.buyer.key if self.buyer.member_count > 1 else None

    @property
    def transaction(self) -> str:
        return self.gang or self.action_id


class Basket:
    """Buys for one shape after the other, at the least price for each member, within the limits."""

    def __init__(self, draft: Draft, market: Market, policy: ScalingPolicy) -> None:
        self._draft = draft
        self._market = market
        self._policy = policy
        self._account = Account(draft.views, policy)
        for purchase in draft.purchases:
            self._account.add(purchase.decision.pool, purchase.decision.offer)
        self._nodes_count_before = self._account.nodes_count
        self._orders: dict[str, _Order] = {}  # by bin key, in the order of buying

    @property
    def room(self) -> Room:
        """The room that purchases add to."""
        return self._draft.room

    @property
    def nodes_count(self) -> int:
        """Nodes of ours with those in the basket, as limits count them."""
        return self._account.nodes_count

    def buy(self, buyer: DemandItem, members_count: int) -> tuple[int, HoldReason | None]:
        """Put nodes for this many members in the basket; return for how many there are, and why no more.

        A gang gets all or nothing, with nothing left in the basket.
        """
        covered, bought = 0, []
        choice: Candidate | None = None
        reason: HoldReason | None = None
        while covered < members_count and reason is None:
            missing = members_count - covered
            # The best offer stays the best while it is filled whole and within limits.
            if choice is None or choice.members_count > missing or self._excess(choice) is not None:
                choice, reason = self._choose(buyer.shape, missing)
            if choice is not None:
                bought.append(self._put(choice, buyer))
                covered += min(choice.members_count, missing)
        if reason is not None and buyer.member_count > 1:
            for key in bought:
                self._take_out(key)
            return 0, reason
        return covered, reason

    def assign(self, item: DemandItem, keys: tuple[str, ...]) -> None:
        """Note that members of the item count on these bins; a gang's purchases need what it shares."""
        orders = [self._orders[key] for key in dict.fromkeys(keys) if key in self._orders]
        for order in orders:
            order.demand[item.key] = None
        own = [order for order in orders if order.buyer.key == item.key and order.gang is not None]
        shared = {order.transaction for order in orders} - {order.transaction for order in own}
        for order in own:
            order.needs |= shared

    def purchases(self) -> tuple[Purchase, ...]:
        """What is in the basket, as decisions, in the order of buying."""
        doomed = {view.node_uid: view for view in self._draft.views if view.notice is not None and view.node_uid}
        return tuple(
            Purchase(
                decision=self._decision(order, doomed),
                transaction=order.transaction,
                needs=frozenset(order.needs),
            )
            for order in self._orders.values()
        )

    def _choose(self, shape: Shape, missing: int) -> tuple[Candidate | None, HoldReason | None]:
        """The candidate of least price for each member it would serve, from the first pool that has one."""
        assortment = self._market.for_shape(shape)
        reason = assortment.hold_reason
        best: tuple[tuple[bool, int, int, int, str, str], Candidate] | None = None
        for candidate in assortment.candidates:
            excess = self._excess(candidate)
            if excess is not None:
                reason = reason or excess
                continue
            served = min(candidate.members_count, missing)
            rank = (
                shape.resources.gpu_count == 0 and candidate.offer.resources.gpu_count > 0,  # GPUs for nobody: last
                -candidate.pool.priority,
                candidate.price_micro_usd_per_hour * _PRICE_PRECISION // served,
                candidate.price_micro_usd_per_hour,
                candidate.offer.key,
                candidate.pool.name,
            )
            if best is None or rank < best[0]:
                best = (rank, candidate)
        return (None, reason) if best is None else (best[1], None)

    def _excess(self, candidate: Candidate) -> HoldReason | None:
        return self._account.excess(candidate.pool.name, candidate.offer)

    def _put(self, candidate: Candidate, buyer: DemandItem) -> str:
        action_id = self._draft.next_action_id()
        node = msgspec.structs.replace(candidate.node, key=f"action/{action_id}", name=action_id)
        self.room.put(node)
        self._account.add(candidate.pool.name, candidate.offer)
        self._orders[node.key] = _Order(action_id=action_id, candidate=candidate, buyer=buyer, demand={}, needs=set())
        return node.key

    def _take_out(self, key: str) -> None:
        order = self._orders.pop(key)
        self.room.remove(key)
        self._account.add(order.candidate.pool.name, order.candidate.offer, -1)

    def _decision(self, order: _Order, doomed: dict[NodeUid, NodeView]) -> BuyNode:
        pool, offer = order.candidate.pool, order.candidate.offer
        return BuyNode(
            action_id=order.action_id,
            pool=pool.name,
            offer=offer,
            labels=tuple(sorted(ordered_labels(pool, offer, order.action_id).items())),
            taints=pool.taints,
            deadline_at=self._draft.as_of + timedelta(seconds=self._policy.boot_seconds_max),
            reason=self._reason(order, doomed),
            gang=order.gang,
        )

    def _reason(self, order: _Order, doomed: dict[NodeUid, NodeView]) -> BuyReason:
        if order.buyer.source is DemandSource.MINIMUM:
            return BelowMinimum(nodes_count=self._nodes_count_before, nodes_count_min=self._policy.nodes_count_min)
        demand = tuple(order.demand)
        leaves = order.buyer.leaves
        if order.buyer.source is DemandSource.DOOMED_POD and leaves is not None and leaves in doomed:
            view = doomed[leaves]
            return ReplacesDoomed(node_uid=leaves, node_name=view.name, reclaim_at=view.reclaim_at, demand=demand)
        return UnmetDemand(
            demand=demand,
            offers_considered=self._market.offers_count,
            price_micro_usd_per_hour=order.candidate.price_micro_usd_per_hour,
        )

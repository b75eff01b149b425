"""One node in the basket, and the decision that it becomes. Used by `core/buying/basket.py`."""

from datetime import timedelta
from typing import NamedTuple

import msgspec

from gpu_autoscaler.core.bins import ordered_labels, slices_in
from gpu_autoscaler.core.buying.market import Sale
from gpu_autoscaler.core.demand_items import BillingScope, DemandItem, DemandSource
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.passed import DroppedPreference, RejectedOffer
from gpu_autoscaler.model.reasons import BelowMinimum, BuyReason, ReplacesAtRiskNode, UnmetDemand


class Order(msgspec.Struct, kw_only=True):
    """One node in the basket, and who counts on it."""

    action_id: ActionId
    sale: Sale
    buyer: DemandItem
    customer: BillingScope  # the buyer, for as long as the longest of all work that counts on the node
    instead_of: RejectedOffer | None
    dropped: tuple[DroppedPreference, ...]
    # Keys of all items with a member here, in the order in which they came.
    demand: dict[str, None] = msgspec.field(default_factory=dict)
    needs: set[str] = msgspec.field(default_factory=set)

    @property
    def gang(self) -> str | None:
        """The gang that it stands or falls with."""
        return self.buyer.gang

    @property
    def transaction(self) -> str:
        """Orders of one transaction are made together or not at all."""
        return self.gang or self.action_id


class Counted(NamedTuple):
    """What a decision tells besides its order."""

    nodes_count_before: int  # of ours, before anything was bought
    offers_count: int  # that were considered


def decision_of(order: Order, draft: Draft, policy: ScalingPolicy, counted: Counted) -> BuyNode:
    """The purchase, with all that its executor needs."""
    pool, offer = order.sale.pool, order.sale.offer
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
        work_seconds_max=order.customer.work_seconds_max,
    )


def _reason(order: Order, draft: Draft, policy: ScalingPolicy, counted: Counted) -> BuyReason:
    if order.buyer.ahead is not None:
        return order.buyer.ahead
    if order.buyer.source is DemandSource.MINIMUM:
        return BelowMinimum(nodes_count=counted.nodes_count_before, nodes_count_min=policy.nodes_count_min)
    demand = tuple(order.demand)
    leaves = order.buyer.leaves
    if order.buyer.source is DemandSource.AT_RISK_POD and leaves is not None:
        doomed = (view for view in draft.views if view.node_uid == leaves and view.notice is not None)
        if (view := next(doomed, None)) is not None:
            return ReplacesAtRiskNode(
                node_uid=leaves, node_name=view.name, reclaim_at=view.reclaim_at, demand=demand,
                instead_of=order.instead_of, dropped=order.dropped,
            )  # fmt: skip
    return UnmetDemand(
        demand=demand,
        offers_considered=counted.offers_count,
        price_micro_usd_per_hour=order.sale.price_micro_usd_per_hour,
        instead_of=order.instead_of,
        dropped=order.dropped,
    )

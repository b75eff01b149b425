"""Nodes with low utilization; and step `react_to_utilization`: what high utilization may cause.

By default utilization alone moves no node. Faults of telemetry pause these steps, with a reason.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime

from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.next_change import has_lasted, plain
from gpu_autoscaler.core.nodes.fleet_utilization import fleet_utilization
from gpu_autoscaler.core.placement.shapes import Shape
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.basket import Basket
from gpu_autoscaler.core.provisioning.offers import OfferCatalog
from gpu_autoscaler.core.state.freshness import stale_watch
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.core.state.telemetry_history import since_at_most
from gpu_autoscaler.model.decisions import DrainNode
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.reasons.buy import UtilizationHigh
from gpu_autoscaler.model.reasons.defer import DeferReason, UtilizationUnconfirmed
from gpu_autoscaler.model.reasons.defer_limits import Cooldown
from gpu_autoscaler.model.reasons.drain import NodeUnderused
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import NodeDemands, Toleration

_STEP = "react_to_utilization"


# ---- low utilization


def underutilized(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Mapping[NodeUid, float]:
    """Return the nodes whose utilization has been low for long enough, with the last figure; empty if unreliable. Held
    GPUs that read zero all the time hint at a telemetry fault: they prove nothing."""
    if not state.telemetry_history:
        return {}
    rules = policy.utilization
    utilization = fleet_utilization(draft.views, draft.pods, state.telemetry_history, rules, draft.as_of)
    if utilization.fault is not None:
        return {}
    low: dict[NodeUid, float] = {}
    for uid, history in utilization.trusted.items():
        since = since_at_most(history.utilization, rules.low_ratio * 100)
        if since is not None and has_lasted(since, rules.low_seconds, draft.as_of) and history.busy_ratio:
            low[uid] = history.busy_ratio
    return low


def utilization_cooldown(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> Cooldown | None:
    """Return how long no other node is removed for its utilization alone; None: the next one may be."""
    planned = (
        record.planned_at
        for record in state.drains.values()
        if record.planned_at is not None
        and isinstance(record.decision, DrainNode)
        and isinstance(record.decision.reason, NodeUnderused)
        and record.decision.reason.utilization_ratio is not None
    )
    return _cooling(max(planned, default=None), policy.scale_down_cooldown_seconds, as_of)


# ---- high utilization


def react_to_utilization(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Report high utilization; with the trigger `direct` buy one node per cooldown for it, within the limits."""
    is_direct = policy.utilization_trigger == "direct"
    if not is_direct and not state.telemetry_history:
        return draft
    rules, histories = policy.utilization, state.telemetry_history
    utilization = fleet_utilization(draft.views, draft.pods, histories, rules, draft.as_of)
    if utilization.fault is not None:
        return draft.deferring(_STEP, "cluster", utilization.fault)
    reason: DeferReason | None
    high = policy.utilization.high_ratio
    # Any purchase, made now or on its way, answers it.
    is_answered = bool(draft.purchases) or not draft.is_demand_met or any(view.is_booting for view in draft.views)
    if utilization.busy_ratio is None or utilization.busy_ratio <= high or is_answered:
        return draft
    if not is_direct:
        reason = UtilizationUnconfirmed(utilization_ratio=utilization.busy_ratio, utilization_ratio_max=high)
        return draft.deferring(_STEP, "cluster", reason)
    reason = stale_watch(state, policy, draft.as_of) or _cooling(
        max(_purchases_for_utilization(state), default=None), policy.utilization.cooldown_seconds, draft.as_of
    )
    if reason is not None:
        return draft.deferring(_STEP, "cluster", reason)
    basket = Basket(draft, OfferCatalog(draft.views, state, policy, draft.as_of), policy)
    _, reason = basket.buy(_item(utilization.busiest_model, utilization.busy_ratio, draft, policy), 1)
    if reason is not None:
        return draft.deferring(_STEP, "cluster", reason)
    return draft.adding(purchases=basket.purchases())


def _item(model: str | None, busy_ratio: float, draft: Draft, policy: ScalingPolicy) -> DemandItem:
    any_taint = NodeDemands(tolerations=(Toleration(operator="Exists"),))
    return DemandItem(
        key="cluster",
        source=DemandSource.BUFFER,
        shape=Shape(resources=Resources(gpu_count=1), demands=any_taint, gpu_models=() if model is None else (model,)),
        member_count=1,
        priority=0,
        since=plain(draft.as_of),
        buy_reason=UtilizationHigh(utilization_ratio=busy_ratio, utilization_ratio_max=policy.utilization.high_ratio),
    )


def _purchases_for_utilization(state: ClusterState) -> Iterator[datetime]:
    for order in state.orders.values():
        if order.decision is not None and order.planned_at and isinstance(order.decision.reason, UtilizationHigh):
            yield order.planned_at


def _cooling(last: datetime | None, seconds: float, as_of: datetime) -> Cooldown | None:
    if last is None or has_lasted(last, seconds, as_of):
        return None
    return Cooldown(remaining_seconds=seconds - (as_of - last).total_seconds())

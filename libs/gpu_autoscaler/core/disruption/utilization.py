"""GPU utilization, as far as telemetry is reliable; and step `react_to_utilization`: what high utilization may cause.

By default utilization alone moves no node. Missing, unchanged or impossible samples and a fleet that reads all zero are
telemetry faults: they pause these steps, with a reason.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.next_change import has_lasted, has_lasted_longer, plain
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import NodeView
from gpu_autoscaler.core.placement.shapes import Shape
from gpu_autoscaler.core.policy.disruption_settings import UtilizationPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.basket import Basket
from gpu_autoscaler.core.provisioning.offers import OfferCatalog
from gpu_autoscaler.core.state.freshness import stale_watch
from gpu_autoscaler.core.state.queries import counts_for_idleness
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.core.state.telemetry_history import NodeTelemetryHistory, since_at_most
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.decisions import DrainNode
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.reasons.buy import UtilizationHigh
from gpu_autoscaler.model.reasons.defer import DeferReason, TelemetryFault, TelemetryUnreliable, UtilizationUnconfirmed
from gpu_autoscaler.model.reasons.defer_limits import Cooldown
from gpu_autoscaler.model.reasons.drain import NodeUnderused
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import NodeDemands, Toleration

_STEP = "react_to_utilization"


class FleetUtilization(msgspec.Struct, frozen=True, kw_only=True):
    """Utilization of all GPUs together."""

    busy_ratio: float | None  # mean of nodes with reliable telemetry; None: there are none
    trusted: Mapping[NodeUid, NodeTelemetryHistory]
    busiest_model: str | None  # with the highest mean; None: unknown
    fault: TelemetryUnreliable | None  # why the telemetry as a whole is unreliable


def fleet_utilization(
    views: tuple[NodeView, ...],
    pods: Mapping[str, tuple[PodObserved, ...]],
    state: ClusterState,
    rules: UtilizationPolicy,
    as_of: datetime,
) -> FleetUtilization:
    """Return the GPU utilization of managed ready nodes, without nodes whose telemetry is unreliable."""
    faults: dict[TelemetryFault, int] = {}
    trusted: dict[NodeUid, NodeTelemetryHistory] = {}
    by_model: dict[str, list[float]] = {}
    nodes_count = 0
    for view in views:
        if view.phase is not NodePhase.READY or view.node_uid is None or not view.allocatable.has_gpus:
            continue
        if not view.is_ours or view.usable_since is None:
            continue
        if not has_lasted(view.usable_since, rules.telemetry_age_seconds_max, as_of):
            continue  # foreign nodes, and nodes too young to have telemetry
        nodes_count += 1
        history = state.telemetry_history.get(view.node_uid)
        fault = _fault_of(history, rules, as_of)
        if fault is not None:
            faults[fault] = faults.get(fault, 0) + 1
        elif history is not None and history.busy_ratio is not None:
            trusted[view.node_uid] = history
            by_model.setdefault(view.gpu_model or "", []).append(history.busy_ratio)
    ratios = [ratio for of_model in by_model.values() for ratio in of_model]
    worst = max(faults, key=lambda fault: (faults[fault], fault), default=None)
    unreliable: TelemetryUnreliable | None = None
    if worst is not None and len(trusted) < rules.telemetry_coverage_ratio_min * nodes_count:
        unreliable = TelemetryUnreliable(fault=worst, nodes_count=faults[worst], gpu_nodes_count=nodes_count)
    elif ratios and not any(ratios) and any(_holds_gpus(view, pods) for view in views if view.node_uid in trusted):
        unreliable = TelemetryUnreliable(fault="all_zero", nodes_count=len(trusted), gpu_nodes_count=nodes_count)
    busiest = max(by_model, key=lambda model: (sum(by_model[model]) / len(by_model[model]), model), default=None)
    return FleetUtilization(
        busy_ratio=sum(ratios) / len(ratios) if ratios else None,
        trusted=trusted,
        busiest_model=busiest or None,
        fault=unreliable,
    )


def _fault_of(history: NodeTelemetryHistory | None, rules: UtilizationPolicy, as_of: datetime) -> TelemetryFault | None:
    if history is None or has_lasted_longer(history.seen_until, rules.telemetry_age_seconds_max, as_of):
        return "silent"
    if history.seen_until - history.changed_at >= timedelta(seconds=rules.unchanged_seconds_max):
        return "frozen"
    return "corrupt" if history.busy_ratio is None else None


def _holds_gpus(view: NodeView, pods: Mapping[str, tuple[PodObserved, ...]]) -> bool:
    return any(counts_for_idleness(pod) and pod.requests.has_gpus for pod in pods.get(view.name, ()))


# ---- low utilization


def underutilized(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Mapping[NodeUid, float]:
    """Return the nodes whose utilization has been low for long enough, with the last figure; empty if unreliable. Held
    GPUs that read zero all the time hint at a telemetry fault: they prove nothing."""
    if not state.telemetry_history:
        return {}
    rules = policy.utilization
    utilization = fleet_utilization(draft.views, draft.pods, state, rules, draft.as_of)
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
    utilization = fleet_utilization(draft.views, draft.pods, state, policy.utilization, draft.as_of)
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
    basket = Basket(draft, OfferCatalog(draft, state, policy), policy)
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

"""Translates the folded state to the answers for nodes and status. Pure functions."""

from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta
from statistics import fmean

from gpu_autoscaler.core.explain.names import Namer, names_in_state, reason_sentence
from gpu_autoscaler.core.nodes.spread_cost import spread_micro_usd_per_hour
from gpu_autoscaler.core.nodes.views import NodeView, node_views
from gpu_autoscaler.core.state import queries
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.decisions import Cut
from gpu_autoscaler.model.money import HOURS_PER_MONTH
from gpu_autoscaler_services.gateway import schema

UNKNOWN = "unknown"


def nodes(
    views: Iterable[NodeView], state: ClusterState, as_of: datetime, telemetry_age_seconds_max: float
) -> tuple[schema.Node, ...]:
    """Return nodes as they are shown. The utilization of older telemetry is unknown."""
    bound = queries.pods_by_node(state)
    names = names_in_state(state)
    fresh_after = as_of - timedelta(seconds=telemetry_age_seconds_max)
    return tuple(_node(view, bound.get(view.name, ()), names, fresh_after) for view in views)


def _node(view: NodeView, pods: Iterable[PodObserved], names: Namer, fresh_after: datetime) -> schema.Node:
    workload = [pod for pod in pods if queries.is_workload(pod)]
    order = view.order
    return schema.Node(
        name=view.name,
        phase=view.phase,
        pool=view.pool,
        instance_type=view.instance_type,
        zone=view.zone,
        capacity_type=view.capacity_type,
        gpu_model=view.gpu_model,
        gpu_count=view.allocatable.gpu_count,
        gpu_busy_count=sum(pod.requests.gpu_count for pod in workload),
        gpu_utilization_ratio=_utilization(view, fresh_after),
        price_micro_usd_per_hour=view.price_micro_usd_per_hour,
        node_uid=view.node_uid,
        action_id=view.action_id,
        provider_id=view.provider_id,
        since=_since(view),
        usable_by=view.usable_by if view.is_booting else None,
        notice=_notice(view),
        pods=tuple(
            schema.NodePod(pod=f"{pod.namespace}/{pod.name}", gpu_count=pod.requests.gpu_count, job_id=pod.job_id)
            for pod in workload
        ),
        reason=reason_sentence(order.decision.reason, names)
        if order is not None and order.decision is not None
        else "",
    )


def _since(view: NodeView) -> datetime | None:
    if view.order is not None and view.order.planned_at is not None:
        return view.order.planned_at
    if view.instance is not None:
        return view.instance.launched_at
    return None if view.node is None else view.node.created_at


def _notice(view: NodeView) -> schema.Notice | None:
    if view.notice is None:
        return None
    return schema.Notice(
        kind=view.notice.notice.kind, reclaim_at=view.reclaim_at, received_at=view.notice.first_received_at
    )


def _utilization(view: NodeView, fresh_after: datetime) -> float | None:
    """Return the mean of the newest minute. None if it is unknown: no telemetry, too old, or, on a node without pods,
    of a time when it still had some."""
    telemetry = view.telemetry
    if telemetry is None or telemetry.window_started_at + timedelta(seconds=telemetry.window_seconds) < fresh_after:
        return None
    if view.empty_since is not None and telemetry.window_started_at < view.empty_since:
        return None
    ratios = [gpu.utilization_ratio_mean for gpu in telemetry.gpus if gpu.utilization_ratio_mean is not None]
    return fmean(ratios) if ratios else None


def status(
    state: ClusterState,
    cut: Cut,
    as_of: datetime,
    *,
    clock_factor: float,
    is_broker_connected: bool,
    active_scaler: str | None,
    directives: tuple[schema.Directive, ...] = (),
) -> schema.Status:
    """Return the cluster in numbers. `gpu_count` includes usable nodes only."""
    all_nodes = node_views(state, as_of)
    bound = queries.pods_by_node(state)
    usable = [view for view in all_nodes if view.is_usable]
    billed = [view for view in all_nodes if view.is_counted and view.provider_id is not None]
    return schema.Status(
        as_of=as_of,
        clock_factor=clock_factor,
        is_broker_connected=is_broker_connected,
        active_scaler=active_scaler,
        nodes_by_phase=dict(Counter(str(view.phase) for view in all_nodes)),
        nodes_by_capacity_type=dict(Counter(str(view.capacity_type or UNKNOWN) for view in all_nodes)),
        gpu_count=sum(view.allocatable.gpu_count for view in usable),
        gpu_busy_count=sum(
            pod.requests.gpu_count for view in usable for pod in bound.get(view.name, ()) if queries.is_workload(pod)
        ),
        gpu_booting_count=sum(view.allocatable.gpu_count for view in all_nodes if view.is_booting),
        jobs_by_status=dict(Counter(str(job_state) for job_state in queries.job_states(state).values())),
        pods_unschedulable_count=sum(
            pod.unschedulable_since is not None and pod.node_name is None and not queries.is_finished(pod)
            for pod in state.pods.values()
        ),
        notices_count=sum(view.notice is not None for view in all_nodes),
        price_micro_usd_per_hour=sum(view.price_micro_usd_per_hour or 0 for view in billed),
        price_unknown_count=sum(view.price_micro_usd_per_hour is None for view in billed),
        spread_micro_usd_per_month=spread_micro_usd_per_hour(all_nodes) * HOURS_PER_MONTH,
        last_plan_at=state.last_plan_at,
        directives=directives,
        cut=dict(cut.last_sequences),
    )

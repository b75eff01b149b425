"""Nodes and the cluster in numbers, as people see them: pure translation from the folded state to the wire."""

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from statistics import fmean

from gpu_autoscaler.core import views
from gpu_autoscaler.core.explain import sentence
from gpu_autoscaler.core.nodes import life
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.events.gpu import GpuNodeSummarised
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.decisions import Cut
from gpu_autoscaler_services.gateway import wire

UNKNOWN = "unknown"


def nodes(state: ClusterState, as_of: datetime) -> tuple[wire.Node, ...]:
    """Every node that is not gone, by name."""
    bound = views.pods_by_node(state)
    return tuple(_node(view, bound.get(view.name, ())) for view in life.node_views(state, as_of))


def _node(view: life.NodeView, pods: Iterable[PodObserved]) -> wire.Node:
    working = [pod for pod in pods if views.is_workload(pod)]
    order = view.order
    return wire.Node(
        name=view.name,
        phase=view.phase,
        pool=view.pool,
        instance_type=view.instance_type,
        zone=view.zone,
        capacity_type=view.capacity_type,
        gpu_model=view.gpu_model,
        gpu_count=view.allocatable.gpu_count,
        gpu_busy_count=sum(pod.requests.gpu_count for pod in working),
        gpu_utilization_ratio=_utilization(view.telemetry),
        price_micro_usd_per_hour=view.price_micro_usd_per_hour,
        node_uid=view.node_uid,
        action_id=view.action_id,
        provider_id=view.provider_id,
        since=_since(view),
        usable_by=view.usable_by if view.is_booting else None,
        notice=_notice(view),
        pods=tuple(
            wire.NodePod(pod=f"{pod.namespace}/{pod.name}", gpu_count=pod.requests.gpu_count, job_id=pod.job_id)
            for pod in working
        ),
        reason=sentence(order.decision.reason) if order is not None and order.decision is not None else "",
    )


def _since(view: life.NodeView) -> datetime | None:
    if view.order is not None and view.order.planned_at is not None:
        return view.order.planned_at
    if view.instance is not None:
        return view.instance.launched_at
    return None if view.node is None else view.node.created_at


def _notice(view: life.NodeView) -> wire.Notice | None:
    if view.notice is None:
        return None
    return wire.Notice(
        kind=view.notice.notice.kind, reclaim_at=view.reclaim_at, received_at=view.notice.first_received_at
    )


def _utilization(telemetry: GpuNodeSummarised | None) -> float | None:
    if telemetry is None:
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
    directives: tuple[wire.Directive, ...] = (),
) -> wire.Status:
    """The cluster in numbers. Only usable nodes count as GPUs that are there."""
    known = life.node_views(state, as_of)
    bound = views.pods_by_node(state)
    usable = [view for view in known if view.is_usable]
    paid = [view for view in known if view.is_counted and view.provider_id is not None]
    return wire.Status(
        as_of=as_of,
        clock_factor=clock_factor,
        is_broker_connected=is_broker_connected,
        active_scaler=active_scaler,
        nodes_by_phase=dict(Counter(str(view.phase) for view in known)),
        nodes_by_capacity_type=dict(Counter(str(view.capacity_type or UNKNOWN) for view in known)),
        gpu_count=sum(view.allocatable.gpu_count for view in usable),
        gpu_busy_count=sum(
            pod.requests.gpu_count for view in usable for pod in bound.get(view.name, ()) if views.is_workload(pod)
        ),
        gpu_booting_count=sum(view.allocatable.gpu_count for view in known if view.is_booting),
        jobs_by_status=dict(Counter(str(each) for each in views.job_states(state).values())),
        pods_unschedulable_count=sum(
            pod.unschedulable_since is not None and pod.node_name is None and not views.is_finished(pod)
            for pod in state.pods.values()
        ),
        notices_count=sum(view.notice is not None for view in known),
        price_micro_usd_per_hour=sum(view.price_micro_usd_per_hour or 0 for view in paid),
        price_unknown_count=sum(view.price_micro_usd_per_hour is None for view in paid),
        last_plan_at=state.last_plan_at,
        directives=directives,
        cut=dict(cut.last_sequences),
    )

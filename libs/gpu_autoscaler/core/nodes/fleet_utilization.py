"""GPU utilization of the fleet, as far as telemetry is reliable.

Missing, unchanged or impossible samples and a fleet that reads all zero are telemetry faults.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.identity_cache import cached_until_change
from gpu_autoscaler.core.next_change import has_lasted, has_lasted_longer
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import NodeView
from gpu_autoscaler.core.policy.disruption_settings import UtilizationPolicy
from gpu_autoscaler.core.state.queries import counts_for_idleness
from gpu_autoscaler.core.state.telemetry_history import NodeTelemetryHistory
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.reasons.defer import TelemetryFault, TelemetryUnreliable


class FleetUtilization(msgspec.Struct, frozen=True, kw_only=True):
    """Utilization of all GPUs together."""

    busy_ratio: float | None  # mean of nodes with reliable telemetry; None: there are none
    trusted: Mapping[NodeUid, NodeTelemetryHistory]
    busiest_model: str | None  # with the highest mean; None: unknown
    fault: TelemetryUnreliable | None  # why the telemetry as a whole is unreliable


@cached_until_change(4)
def fleet_utilization(
    views: tuple[NodeView, ...],
    pods: Mapping[str, tuple[PodObserved, ...]],
    histories: Mapping[NodeUid, NodeTelemetryHistory],
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
        history = histories.get(view.node_uid)
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

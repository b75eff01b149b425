"""The measured use of GPUs that pods hold, for the placement policy `least-utilized`.

A pod counts by the highest of its last minutes: training that loads data or saves is not idle. Held GPUs that were not
measured all that time, or whose telemetry is stale or unreliable, count as used: unknown is not zero.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from gpu_autoscaler.core.next_change import has_lasted
from gpu_autoscaler.core.nodes.fleet_utilization import fleet_utilization
from gpu_autoscaler.core.nodes.views import NodeIndex, bin_key
from gpu_autoscaler.core.placement.gpu_packing import WHOLE
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.core.state.telemetry_history import GpuTelemetryHistory
from gpu_autoscaler.events.pod import PodObserved

LEAST_UTILIZED = "least-utilized"
_MEASURED_SECONDS = 300.0  # Project default.


class MeasuredUse(NamedTuple):
    """Use of the GPUs of a node."""

    idle_milli: int  # thousandths of held GPUs that are measured as unused
    ratio: float | None  # used share of all its GPUs; None: unknown for some that are held


UNKNOWN_USE: Mapping[str, MeasuredUse] = {}


def measured_use(
    state: ClusterState, views: NodeIndex, policy: ScalingPolicy, as_of: datetime
) -> Mapping[str, MeasuredUse]:
    """Return the use of nodes with whole GPUs by the keys of their bins; empty under another placement policy."""
    if policy.placement != LEAST_UTILIZED:
        return UNKNOWN_USE
    fleet = fleet_utilization(views, views.pods, state.telemetry_history, policy.utilization, as_of)
    by_bin: dict[str, MeasuredUse] = {}
    for view in views:
        gpu_count = view.allocatable.gpu_count
        if view.node_uid is None or not gpu_count:
            continue
        history = fleet.trusted.get(view.node_uid) if fleet.fault is None else None
        gpus = () if history is None else history.gpus
        held = [pod for pod in views.pods.get(view.name, ()) if pod.requests.gpu_count]
        percents = [_use_percent(pod, gpus, as_of) for pod in held]
        held_milli = WHOLE * sum(pod.requests.gpu_count for pod in held)
        idle_milli = sum(
            WHOLE * pod.requests.gpu_count - WHOLE // 100 * percent
            for pod, percent in zip(held, percents, strict=True)
            if percent is not None
        )
        ratio = None if None in percents else round((held_milli - idle_milli) / (WHOLE * gpu_count), 3)
        by_bin[bin_key(view)] = MeasuredUse(idle_milli, ratio)
    return by_bin


def _use_percent(pod: PodObserved, gpus: tuple[GpuTelemetryHistory, ...], as_of: datetime) -> int | None:
    """Return the highest use of the last minutes, summed over the pod's GPUs; None: one was not measured throughout."""
    own = [gpu for gpu in gpus if gpu.pod == f"{pod.namespace}/{pod.name}"]
    if len(own) != pod.requests.gpu_count:
        return None
    percents = [
        next((level for level, since in gpu.utilization if has_lasted(since, _MEASURED_SECONDS, as_of)), None)
        for gpu in own
    ]
    known = [min(percent, 100) for percent in percents if percent is not None]
    return sum(known) if len(known) == len(own) else None

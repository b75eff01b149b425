"""The first missing step of a boot that timed out, for the reason of the removal."""

from collections.abc import Mapping
from datetime import datetime

from gpu_autoscaler.core.nodes.views import NodeView
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.queries import counts_for_idleness
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.reasons.drain import BootStep, BootTimedOut
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.model.scheduling import is_startup


def boot_timed_out(view: NodeView, policy: ScalingPolicy, as_of: datetime) -> BootTimedOut:
    """Return the reason to remove a node that missed its boot deadline."""
    planned_at = None if view.order is None else view.order.planned_at
    step, detail = _missing_step(view)
    return BootTimedOut(
        booting_seconds=0.0 if planned_at is None else (as_of - planned_at).total_seconds(),
        boot_seconds_max=policy.boot_seconds_max,
        missing_step=step,
        detail=detail,
    )


def _missing_step(view: NodeView) -> tuple[BootStep, str]:
    node = view.node
    if node is None:
        return "node", ""
    if not node.is_ready:
        return "kubelet", ""
    decision = None if view.order is None else view.order.decision or view.order.ordered
    if decision is not None and not decision.promised.gpus_fit_in(node.allocatable):
        counts = {GPU_RESOURCE: decision.promised.gpu_count, **dict(decision.promised.slices)}
        present = {GPU_RESOURCE: node.allocatable.gpu_count, **dict(node.allocatable.slices)}
        return "gpus", ", ".join(
            f"{present.get(name, 0)} of {count} {name}"
            for name, count in counts.items()
            if present.get(name, 0) < count
        )
    starting = sorted(taint.key for taint in node.taints if is_startup(taint))
    return ("startup_taint", ", ".join(starting)) if starting else ("kubelet", "")


def has_workload_pods(view: NodeView, pods: Mapping[str, tuple[PodObserved, ...]]) -> bool:
    """True for a ready node with workload pods. Even if it misses GPUs, it is drained before it is terminated."""
    is_up = view.node is not None and view.node.is_ready
    return is_up and any(map(counts_for_idleness, pods.get(view.name, ())))

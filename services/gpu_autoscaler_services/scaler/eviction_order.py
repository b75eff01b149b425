"""Which pods leave a draining node, in which order, and by when. Pure; used by `drains.py`."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from gpu_autoscaler.core.disruption.protection import can_save, checkpointed_at, has_answered
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.jobs import PRIORITY_NAMES

# Pods from here on are critical to cluster or node (Kubernetes, "Pod Priority and Preemption", read 2026-11-21).
CRITICAL_PRIORITY_MIN = 2_000_000_000
MIRROR = "kubernetes.io/config.mirror"  # on mirror pods of static pods, which cannot be evicted (kubectl drain)
# For pods without the priority annotation; training leaves last. Source: docs/decisions.md#eviction-priority.
_PRIORITY_BY_WORKLOAD = {"training": "high", "inference": "medium", "development": "low", "batch": "low"}
# A pod that waits for its wave is evicted at the latest this long before its own grace period would end at the
# deadline. Source: our own; a few passes of the drain.
TURN_MARGIN_SECONDS = 5.0
# How long after its grace period a deleted pod may be listed before its kubelet is considered dead.
# Source: our own; a kubelet removes the object within seconds.
OVERDUE_SECONDS = 10.0


def leaving(pods: Sequence[core.Pod]) -> list[core.Pod]:
    """Return the pods that a drain evicts, in order of eviction.

    DaemonSet, mirror and finished pods are ignored. Low eviction priority first, critical pods last (as Karpenter,
    `terminator/eviction.go`, read 2026-11-21); of one priority, the latest checkpoint first, pods without one last.
    """
    return sorted(
        filter(_is_evictable, pods),
        key=lambda pod: (tier(pod), -_saved_at(pod), pod.metadata.namespace, pod.metadata.name),
    )


def tier(pod: core.Pod) -> tuple[bool, int]:
    """Return the pod's wave: the pods of a wave are evicted together, the next wave after they are gone."""
    named = pod.metadata.annotations.get(labels.EVICTION_PRIORITY, "")
    if named not in PRIORITY_NAMES:
        named = _PRIORITY_BY_WORKLOAD.get(labels.workload_type_of(pod.metadata.labels), "medium")
    return pod.spec.priority >= CRITICAL_PRIORITY_MIN, PRIORITY_NAMES[named]


def due(
    pods: Sequence[core.Pod],
    deadline_at: datetime,
    now: datetime,
    *,
    asked_at: datetime | None = None,
    is_patient: bool = False,
) -> list[core.Pod]:
    """Return the pods of `leaving` to evict now: the first wave, and pods that have only their grace period left.

    A pod that was asked at `asked_at` to save a checkpoint is not due until it has; with `is_patient` (a voluntary
    drain) not even when its time runs out.
    """
    first = tier(pods[0])

    def is_due(pod: core.Pod) -> bool:
        is_hurried = now >= latest_eviction_at(pod, deadline_at) - timedelta(seconds=TURN_MARGIN_SECONDS)
        if _is_saving(pod, asked_at) and (is_patient or not is_hurried):
            return False
        return is_hurried or tier(pod) == first

    return [pod for pod in pods if pod.metadata.deletion_timestamp is None and is_due(pod)]


def latest_eviction_at(pod: core.Pod, deadline_at: datetime) -> datetime:
    """Return the latest eviction whose grace period ends by the deadline."""
    return deadline_at - timedelta(seconds=pod.spec.termination_grace_period_seconds)


def grace_seconds(pod: core.Pod, deadline_at: datetime, now: datetime) -> int:
    """Return the grace that is left before the deadline: at most the pod's own, at least one second."""
    left_seconds = (deadline_at - now).total_seconds()
    return max(1, int(min(pod.spec.termination_grace_period_seconds, left_seconds)))


def is_overdue(pod: core.Pod, now: datetime) -> bool:
    """Return True if the grace period ended OVERDUE_SECONDS ago: the kubelet is considered dead."""
    deleted_at = pod.metadata.deletion_timestamp  # the end of the grace period
    return deleted_at is not None and now >= deleted_at + timedelta(seconds=OVERDUE_SECONDS)


def _is_saving(pod: core.Pod, asked_at: datetime | None) -> bool:
    annotations = pod.metadata.annotations
    return asked_at is not None and can_save(annotations) and not has_answered(annotations, asked_at)


def _saved_at(pod: core.Pod) -> float:
    at = checkpointed_at(pod.metadata.annotations)
    return 0.0 if at is None else at.timestamp()


def _is_evictable(pod: core.Pod) -> bool:
    owner = next((owner.kind for owner in pod.metadata.owner_references if owner.controller), None)
    is_bound_to_node = owner in ("DaemonSet", "Node") or MIRROR in pod.metadata.annotations
    return not is_bound_to_node and pod.status.phase not in ("Succeeded", "Failed")

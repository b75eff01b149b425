"""Who has to leave a node, in which order, and when it cannot wait any longer. Pure; used by the drains."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from gpu_autoscaler.core.removing.checkpoints import can_save, checkpointed_at, has_answered
from gpu_autoscaler.kube import wire
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.jobs import PRIORITY_NAMES

# Pods from here on are critical to cluster or node (Kubernetes, "Pod Priority and Preemption", read 2026-11-21).
CRITICAL_PRIORITY_MIN = 2_000_000_000
MIRROR = "kubernetes.io/config.mirror"  # on the shadows of static pods: they cannot be evicted (kubectl drain)
# S77 and its ruling: the annotation first, else the kind of work. Training leaves last and has the most time.
_PRIORITY_BY_WORKLOAD = {"training": "high", "inference": "medium", "development": "low", "batch": "low"}
# A pod that may wait for its turn is told to go at the latest this long before its own grace period would end at the
# deadline. Source: our own; a few passes of the drain.
TURN_MARGIN_SECONDS = 5.0
# How long after its grace period a deleted pod may still be listed before its kubelet counts as dead.
# Source: our own; a kubelet removes the object within seconds.
OVERDUE_SECONDS = 10.0


def leaving(pods: Sequence[wire.Pod]) -> list[wire.Pod]:
    """Return the pods that keep a node from being drained, in the order in which they are to go.

    DaemonSet and mirror pods stay with their node, and what has ended holds nothing. Critical pods go last; before
    them low eviction priority first (CHECKLIST S77; Karpenter, `terminator/eviction.go`, read 2026-11-21), and of one
    priority who saved last goes first, who never did last.
    """
    return sorted(
        filter(_counts, pods), key=lambda pod: (tier(pod), -_saved_at(pod), pod.metadata.namespace, pod.metadata.name)
    )


def tier(pod: wire.Pod) -> tuple[bool, int]:
    """Return the pod's wave: all of one wave are told to go together, the next one after they are gone."""
    named = pod.metadata.annotations.get(labels.EVICTION_PRIORITY, "")
    if named not in PRIORITY_NAMES:
        named = _PRIORITY_BY_WORKLOAD.get(pod.metadata.labels.get(labels.WORKLOAD_TYPE, ""), "medium")
    return pod.spec.priority >= CRITICAL_PRIORITY_MIN, PRIORITY_NAMES[named]


def due(
    pods: Sequence[wire.Pod],
    deadline_at: datetime,
    now: datetime,
    *,
    asked_at: datetime | None = None,
    is_patient: bool = False,
) -> list[wire.Pod]:
    """Return those of `leaving` whose turn it is: the first wave, and who has just its grace period left.

    Of a wave that was asked at `asked_at` to save, who can save and has not yet is left to it; where nobody has to go
    (`is_patient`), to the end.
    """
    first = tier(pods[0])

    def is_due(pod: wire.Pod) -> bool:
        is_hurried = now >= last_call(pod, deadline_at) - timedelta(seconds=TURN_MARGIN_SECONDS)
        if _is_saving(pod, asked_at) and (is_patient or not is_hurried):
            return False
        return is_hurried or tier(pod) == first

    return [pod for pod in pods if pod.metadata.deletion_timestamp is None and is_due(pod)]


def last_call(pod: wire.Pod, deadline_at: datetime) -> datetime:
    """Return the instant from which on the pod's grace period would pass the deadline."""
    return deadline_at - timedelta(seconds=pod.spec.termination_grace_period_seconds)


def grace_seconds(pod: wire.Pod, deadline_at: datetime, now: datetime) -> int:
    """Return the grace that is left before the deadline: the pod's own at most, one second at least."""
    left_seconds = (deadline_at - now).total_seconds()
    return max(1, int(min(pod.spec.termination_grace_period_seconds, left_seconds)))


def is_overdue(pod: wire.Pod, now: datetime) -> bool:
    """True for a pod whose grace period is long over: its kubelet is dead and will never say that it is gone."""
    deleted_at = pod.metadata.deletion_timestamp  # the instant at which the grace period ends
    return deleted_at is not None and now >= deleted_at + timedelta(seconds=OVERDUE_SECONDS)


def _is_saving(pod: wire.Pod, asked_at: datetime | None) -> bool:
    told = pod.metadata.annotations
    return asked_at is not None and can_save(told) and not has_answered(told, asked_at)


def _saved_at(pod: wire.Pod) -> float:
    at = checkpointed_at(pod.metadata.annotations)
    return 0.0 if at is None else at.timestamp()


def _counts(pod: wire.Pod) -> bool:
    owner = next((owner.kind for owner in pod.metadata.owner_references if owner.controller), None)
    is_bound_to_node = owner in ("DaemonSet", "Node") or MIRROR in pod.metadata.annotations
    return not is_bound_to_node and pod.status.phase not in ("Succeeded", "Failed")

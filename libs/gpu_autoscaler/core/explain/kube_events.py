"""Texts of the Kubernetes Events on pods and nodes: why they wait, arrive, stay and are removed.

The texts are those of `why` (`core/explain/status.py`); the reasons are the names that Kubernetes users know.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Literal

import msgspec

from gpu_autoscaler.core.disruption.protection import annotated_instant, exhausted_budget
from gpu_autoscaler.core.explain.status import (
    StatusView,
    invalid_annotations,
    is_ordered_for,
    view_line,
    waiting_pod_line,
)
from gpu_autoscaler.core.nodes.views import NodeView
from gpu_autoscaler.core.state.queries import counts_for_idleness, is_finished, pods_by_node
from gpu_autoscaler.core.state.state import DrainRecord
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.events.scaling import ScalingPodEvicted
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import DrainNode, ReleaseInstance
from gpu_autoscaler.model.format import counted, instant, listed
from gpu_autoscaler.model.reasons.defer import DeferReason, NoOfferFits, NotYetIdle, OffersUnavailable, PriceUnknown
from gpu_autoscaler.model.reasons.defer_limits import HourlyPriceLimit, SpendLimit
from gpu_autoscaler.model.reasons.defer_waits import BatchWindowOpen, CapacityExpected

# How long after it happened something is still announced, so that a restarted announcer does not miss it.
ANNOUNCED_FOR = timedelta(minutes=5)
# How long a drain may wait for a PodDisruptionBudget before that is announced.
BLOCKED_DRAIN_AFTER = timedelta(seconds=10)
MESSAGE_LENGTH_MAX = 1024  # Kubernetes API reference v1.36, "Event": longer notes are rejected (read 2026-11-21)


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """One Kubernetes Event about one object."""

    kind: Literal["Pod", "Node", "AutoscalingPolicy"]
    namespace: str  # empty for cluster-scoped objects
    name: str
    uid: str
    reason: str
    message: str
    is_warning: bool
    is_once: bool = False  # about something that is over: written once, never repeated

    @property
    def topic(self) -> tuple[str, str]:
        """Announcements of one topic are repetitions of one Event."""
        return (self.uid, self.reason)


def announcements(status: StatusView) -> Iterator[Announcement]:
    """Yield what is to be announced now: stalled and abandoned drains, evicted pods by time of their eviction,
    unschedulable pods (longest waiting first), and our nodes by name."""
    drains = sorted(status.state.drains.values(), key=lambda drain: drain.action_id)
    yield from filter(None, (_of_stalled_drain(drain, status) for drain in drains))
    evictions = [(evicted, drain) for drain in drains for evicted in drain.evicted.values()]
    for evicted, drain in sorted(evictions, key=lambda pair: (pair[0].evicted_at, pair[0].pod_uid)):
        if status.as_of - evicted.evicted_at <= ANNOUNCED_FOR:
            yield _of_eviction(evicted, drain, status)
    for pod in sorted(status.state.pods.values(), key=lambda pod: pod.pod_uid):
        yield from filter(None, (_of_idle(pod, status), _of_annotations(pod)))
    waiting = (
        (pod.unschedulable_since, pod.pod_uid, pod)
        for pod in status.state.pods.values()
        if pod.unschedulable_since is not None and pod.node_name is None and pod.phase == "pending"
    )
    for _, _, pod in sorted(waiting, key=lambda row: row[:2]):
        if (announcement := _of_pod(pod, status)) is not None:
            yield announcement
    for view in sorted(status.views, key=lambda view: view.name):
        if view.is_ours and view.node_uid is not None:
            yield _of_node(view, status)


def _of_idle(pod: PodObserved, status: StatusView) -> Announcement | None:
    """Return that the workload of the pod ends soon because its GPUs are idle."""
    if is_finished(pod) or not any(key == labels.IDLE_ENDS_AT for key, _ in pod.annotations):
        return None
    ends_at = annotated_instant(dict(pod.annotations), labels.IDLE_ENDS_AT)
    if ends_at is None or status.as_of > ends_at + ANNOUNCED_FOR:
        return None
    message = (
        f"Its GPUs are idle. If they stay so, its workload ends at {instant(ends_at)}. To keep it, annotate its pods"
        f" {labels.IDLE_ALLOWED}=true."
    )
    return Announcement(
        kind="Pod",
        namespace=pod.namespace,
        name=pod.name,
        uid=pod.pod_uid,
        reason="GPUIdle",
        message=message,
        is_warning=True,
        is_once=True,
    )


def _of_annotations(pod: PodObserved) -> Announcement | None:
    """Return which annotations have an invalid value, and how to write them."""
    message = " ".join(invalid_annotations(pod))
    if not message or is_finished(pod):
        return None
    return Announcement(
        kind="Pod",
        namespace=pod.namespace,
        name=pod.name,
        uid=pod.pod_uid,
        reason="InvalidAnnotation",
        message=message[:MESSAGE_LENGTH_MAX],
        is_warning=True,
    )


def _of_pod(pod: PodObserved, status: StatusView) -> Announcement | None:
    deferred = status.planned.get(f"pod/{pod.pod_uid}")
    is_coming = is_ordered_for(pod, status)
    if isinstance(deferred, BatchWindowOpen):
        return None  # over in a few seconds
    if deferred is None and not is_coming:
        return None  # no plan covers it yet; the Kubernetes scheduler has written its own Event
    reason = "ScaleUpTriggered" if is_coming or deferred is None else _event_reason(deferred)
    return Announcement(
        kind="Pod",
        namespace=pod.namespace,
        name=pod.name,
        uid=pod.pod_uid,
        reason=reason,
        message=waiting_pod_line(pod, status)[:MESSAGE_LENGTH_MAX],
        is_warning=reason != "ScaleUpTriggered",
    )


def _event_reason(deferred: DeferReason) -> str:
    match deferred:
        case CapacityExpected():
            return "ScaleUpTriggered"
        case HourlyPriceLimit() | SpendLimit():
            return "BudgetExceeded"
        case NoOfferFits() | OffersUnavailable() | PriceUnknown():
            return "InsufficientCapacity"
        case _:
            return "ScaleUpBlocked"


def _of_node(view: NodeView, status: StatusView) -> Announcement:
    deferred = status.planned.get(f"node/{view.node_uid}")
    if view.node_uid in status.orphaned:
        reason = "DeletingNode"  # as cloud-controller-managers call it
    elif view.notice is not None:
        reason = "SpotInterruption"
    elif view.drain is not None:
        reason = "ScaleDownTriggered"
    elif deferred is not None and not isinstance(deferred, NotYetIdle):
        reason = "ScaleDownBlocked"
    else:
        reason = "NodeRegistered"
    is_warning = reason == "SpotInterruption"
    return _about_node(view.name, view.node_uid or "", reason, view_line(view, status), is_warning=is_warning)


def _of_eviction(evicted: ScalingPodEvicted, drain: DrainRecord, status: StatusView) -> Announcement:
    """Why the pod was evicted, and when its node is removed."""
    namespace, _, name = evicted.pod.partition("/")
    action = "Deleted, because its eviction was not allowed in time," if evicted.is_forced else "Evicted"
    decision = drain.decision
    why = f" {status.explain(decision.reason)}" if isinstance(decision, DrainNode) else ""
    deadline_at = drain.started.deadline_at if drain.started is not None else None
    until = "" if deadline_at is None else f", by {instant(deadline_at)} at the latest"
    message = f"{action} by gpu-autoscaler: node {evicted.node_name} is removed once it is empty{until}.{why}"
    return Announcement(
        kind="Pod",
        namespace=namespace,
        name=name,
        uid=evicted.pod_uid,
        reason="Evicted",
        message=message[:MESSAGE_LENGTH_MAX],
        is_warning=evicted.is_forced,
        is_once=True,
    )


def _of_stalled_drain(drain: DrainRecord, status: StatusView) -> Announcement | None:
    """A drain that was abandoned, or that makes no progress, and what blocks it."""
    if (canceled := drain.cancelled) is not None:
        if not canceled.abandoned_because or status.as_of - canceled.cancelled_at > ANNOUNCED_FOR:
            return None
        what = "release" if isinstance(drain.decision, ReleaseInstance) else "drain"
        message = f"The {what} of the node was abandoned: {canceled.abandoned_because}. The node accepts pods again."
        return _about_node(
            canceled.node_name, canceled.node_uid, "FailedDraining", message, is_warning=True, is_once=True
        )
    started = drain.started
    if started is None or drain.drained is not None or drain.terminated is not None or drain.cancel is not None:
        return None
    pods_here = pods_by_node(status.state).get(started.node_name, ())
    remaining = [pod for pod in pods_here if counts_for_idleness(pod) and pod.deleting_since is None]
    budgets = status.state.budgets.values()
    blockers = sorted({budget for pod in remaining if (budget := exhausted_budget(pod, budgets)) is not None})
    # Pods may take their time to save a checkpoint; a PodDisruptionBudget that blocks is announced sooner.
    slow_after = BLOCKED_DRAIN_AFTER if blockers else (started.deadline_at - started.started_at) / 2
    if not remaining or status.as_of - started.started_at < slow_after:
        return None
    why = f" ({'; '.join(blockers)})" if blockers else ""
    outcome = (
        "the drain is abandoned" if started.is_voluntary else "they are deleted with the grace period that is left"
    )
    names = listed([f"{pod.namespace}/{pod.name}" for pod in remaining])
    count = counted(len(remaining), "pod")
    message = f"The drain waits for {count}: {names}{why}; at {instant(started.deadline_at)} {outcome}."
    return _about_node(started.node_name, started.node_uid, "FailedDraining", message, is_warning=True)


def _about_node(
    name: str, uid: str, reason: str, message: str, *, is_warning: bool, is_once: bool = False
) -> Announcement:
    return Announcement(
        kind="Node",
        namespace="",
        name=name,
        uid=uid,
        reason=reason,
        message=message[:MESSAGE_LENGTH_MAX],
        is_warning=is_warning,
        is_once=is_once,
    )

"""What is to be said of pods and nodes where their users look first: why they wait, come, stay and go.

Called by the announcer, which writes it as Kubernetes Events. The words are those of `why` (`core/headline.py`); the
names of the reasons are those that users of the field know.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Literal

import msgspec

from gpu_autoscaler.core.headline import Sight, is_ordered_for, view_line, waiting_pod_line
from gpu_autoscaler.core.nodes.life import NodeView
from gpu_autoscaler.core.removing.protection import exhausted_budget
from gpu_autoscaler.core.state import DrainRecord
from gpu_autoscaler.core.views import counts_for_idleness, pods_by_node
from gpu_autoscaler.core.words.sentences import sentence
from gpu_autoscaler.core.words.wording import counted, instant, named
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.events.scaling import ScalingPodEvicted
from gpu_autoscaler.model import reasons
from gpu_autoscaler.model.decisions import DrainNode, ReleaseInstance
from gpu_autoscaler.model.waits import BatchWindowOpen

# What happened is told for so long: an announcer that was away a moment still tells it. Source: our own.
TOLD_FOR = timedelta(minutes=5)
# Pods that go one after the other take a moment; after so long somebody may want to know. Source: our own.
DRAIN_PATIENCE = timedelta(seconds=10)
MESSAGE_LENGTH_MAX = 1024  # Kubernetes API reference v1.36, "Event": longer notes are refused (read 2026-11-21)


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to be said of one object."""

    kind: Literal["Pod", "Node", "AutoscalingPolicy"]
    namespace: str  # empty: of what stands in none
    name: str
    uid: str
    reason: str
    message: str
    is_warning: bool
    is_once: bool = False  # it happened, and is over: written already it has been said

    @property
    def topic(self) -> tuple[str, str]:
        """What it is about: said again it is the same event, once more."""
        return (self.uid, self.reason)


def announcements(sight: Sight) -> Iterator[Announcement]:
    """Yield what is to be said now: of drains that do not come to their end and of pods that were evicted, in their
    order, of pods that Kubernetes found no node for, those waiting longest first, then of our nodes, by name."""
    drains = sorted(sight.state.drains.values(), key=lambda each: each.action_id)
    yield from filter(None, (_of_failure(drain, sight) for drain in drains))
    evicted = [(each, drain) for drain in drains for each in drain.evicted.values()]
    for each, drain in sorted(evicted, key=lambda pair: (pair[0].evicted_at, pair[0].pod_uid)):
        if sight.as_of - each.evicted_at <= TOLD_FOR:
            yield _of_eviction(each, drain)
    waiting = (
        (pod.unschedulable_since, pod.pod_uid, pod)
        for pod in sight.state.pods.values()
        if pod.unschedulable_since is not None and pod.node_name is None and pod.phase == "pending"
    )
    for _, _, pod in sorted(waiting, key=lambda each: each[:2]):
        if (found := _of_pod(pod, sight)) is not None:
            yield found
    for view in sorted(sight.views, key=lambda view: view.name):
        if view.is_ours and view.node_uid is not None:
            yield _of_node(view, sight)


def _of_pod(pod: PodObserved, sight: Sight) -> Announcement | None:
    held = sight.planned.get(f"pod/{pod.pod_uid}")
    is_coming = is_ordered_for(pod, sight)
    if isinstance(held, BatchWindowOpen):
        return None  # over in a moment
    if held is None and not is_coming:
        return None  # no plan has spoken of it: its own scheduler has said what there is to say
    reason = "ScaleUpTriggered" if is_coming or held is None else _of_hold(held)
    return Announcement(
        kind="Pod",
        namespace=pod.namespace,
        name=pod.name,
        uid=pod.pod_uid,
        reason=reason,
        message=waiting_pod_line(pod, sight)[:MESSAGE_LENGTH_MAX],
        is_warning=reason != "ScaleUpTriggered",
    )


def _of_hold(held: reasons.DeferReason) -> str:
    match held:
        case reasons.CapacityExpected():
            return "ScaleUpTriggered"
        case reasons.HourlyPriceLimit() | reasons.SpendLimit():
            return "BudgetExceeded"
        case reasons.NoOfferFits() | reasons.OffersUnavailable() | reasons.PriceUnknown():
            return "InsufficientCapacity"
        case _:
            return "ScaleUpBlocked"


def _of_node(view: NodeView, sight: Sight) -> Announcement:
    held = sight.planned.get(f"node/{view.node_uid}")
    if view.node_uid in sight.left_over:
        reason = "DeletingNode"  # as cloud-controller-managers call it
    elif view.notice is not None:
        reason = "SpotInterruption"
    elif view.drain is not None:
        reason = "ScaleDownTriggered"
    elif held is not None and not isinstance(held, reasons.NotYetIdle):
        reason = "ScaleDownBlocked"
    else:
        reason = "NodeRegistered"
    return Announcement(
        kind="Node",
        namespace="",
        name=view.name,
        uid=view.node_uid or "",
        reason=reason,
        message=view_line(view, sight)[:MESSAGE_LENGTH_MAX],
        is_warning=reason == "SpotInterruption",
    )


def _of_eviction(evicted: ScalingPodEvicted, drain: DrainRecord) -> Announcement:
    """Who told the pod to go, why, and when its node goes."""
    namespace, _, name = evicted.pod.partition("/")
    how = "Deleted, as its eviction was not allowed in time," if evicted.is_forced else "Evicted by gpu-autoscaler"
    decision = drain.decision
    why = f" {sentence(decision.reason)}" if isinstance(decision, DrainNode) else ""
    deadline_at = drain.started.deadline_at if drain.started is not None else None
    until = "" if deadline_at is None else f", by {instant(deadline_at)} at the latest"
    return Announcement(
        kind="Pod",
        namespace=namespace,
        name=name,
        uid=evicted.pod_uid,
        reason="Evicted",
        message=f"{how} from node {evicted.node_name}, which goes when it is empty{until}.{why}"[:MESSAGE_LENGTH_MAX],
        is_warning=evicted.is_forced,
        is_once=True,
    )


def _of_failure(drain: DrainRecord, sight: Sight) -> Announcement | None:
    """That a drain was given up, or does not get on, and what is in its way."""
    if (over := drain.cancelled) is not None:
        if not over.given_up_because or sight.as_of - over.cancelled_at > TOLD_FOR:
            return None
        what = "It is not given back" if isinstance(drain.decision, ReleaseInstance) else "Its drain was given up"
        said = f"{what}, as {over.given_up_because}. It takes pods again."
        return _failed(over.node_name, over.node_uid, said, is_once=True)
    begun = drain.started
    if begun is None or drain.drained is not None or drain.terminated is not None or drain.cancel is not None:
        return None
    lasted = sight.as_of - begun.started_at
    here = pods_by_node(sight.state).get(begun.node_name, ())
    left = [pod for pod in here if counts_for_idleness(pod) and pod.deleting_since is None]
    budgets = sight.state.budgets.values()
    in_the_way = sorted({held for pod in left if (held := exhausted_budget(pod, budgets)) is not None})
    # Pods may take their time to save; that somebody is in the way is news sooner.
    is_slow = lasted >= (DRAIN_PATIENCE if in_the_way else (begun.deadline_at - begun.started_at) / 2)
    if not left or not is_slow:
        return None
    why = f" ({'; '.join(in_the_way)})" if in_the_way else ""
    what = "the drain is given up" if begun.is_voluntary else "they are deleted with what grace is left"
    who = named([f"{pod.namespace}/{pod.name}" for pod in left])
    said = f"{counted(len(left), 'pod')} not gone yet: {who}{why}; at {instant(begun.deadline_at)} {what}."
    return _failed(begun.node_name, begun.node_uid, said, is_once=False)


def _failed(name: str, uid: str, message: str, *, is_once: bool) -> Announcement:
    return Announcement(
        kind="Node",
        namespace="",
        name=name,
        uid=uid,
        reason="FailedDraining",
        message=message[:MESSAGE_LENGTH_MAX],
        is_warning=True,
        is_once=is_once,
    )

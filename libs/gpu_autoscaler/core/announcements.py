"""What is to be said of pods and nodes where their users look first: why they wait, come, stay and go.

Called by the announcer, which writes it as Kubernetes Events. The words are those of `why` (`core/headline.py`); the
names of the reasons are those that users of the field know.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from gpu_autoscaler.core.headline import Sight, is_ordered_for, view_line, waiting_pod_line
from gpu_autoscaler.core.life import NodeView
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import reasons

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

    @property
    def topic(self) -> tuple[str, str]:
        """What it is about: said again it is the same event, once more."""
        return (self.uid, self.reason)


def announcements(sight: Sight) -> Iterator[Announcement]:
    """Yield what is to be said now: of pods that Kubernetes found no node for, those waiting longest first, then of
    our nodes, by name."""
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


def _of_hold(held: reasons.HoldReason) -> str:
    match held:
        case reasons.RoomExpected():
            return "ScaleUpTriggered"
        case reasons.BudgetLimit() | reasons.MoneyLimit():
            return "BudgetExceeded"
        case reasons.NoOfferFits() | reasons.OffersRefused() | reasons.PriceUnknown():
            return "InsufficientCapacity"
        case _:
            return "ScaleUpBlocked"


def _of_node(view: NodeView, sight: Sight) -> Announcement:
    held = sight.planned.get(f"node/{view.node_uid}")
    if view.notice is not None:
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

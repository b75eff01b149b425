"""Events of ours on a real API server, as `kubectl describe` shows them."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from tests.controlplane.fixtures import plane
from tests.controlplane.plane import ControlPlane
from tests.support import stories
from tests.support.kube_objects import node, pod
from tests.support.money import clusters, ledger
from tests.support.stories import policy, purchase

from gpu_autoscaler.core.explain.kube_events import Announcement, announcements
from gpu_autoscaler.core.explain.status import StatusView
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import from_kubeconfig
from gpu_autoscaler.kube.event_recorder import EventRecorder
from gpu_autoscaler.kube.protocol import NODES, PODS
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.drain import NodeDeleted
from gpu_autoscaler.model.scheduling import LabelRequirement
from gpu_autoscaler.runtime.clock import Clock

__all__ = ["plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]


async def test_describe_shows_why_a_pod_waits_and_what_happens_to_a_node(plane: ControlPlane) -> None:
    """The event has reason and message; a repeat increases its count and updates the message."""
    kube = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
    now = datetime.now(UTC)
    try:
        await kube.create("/api/v1/namespaces/default/pods", pod("train-0", gpus=8))
        await kube.create("/api/v1/nodes", node("gpu-a"))
        waiting = await kube.get(PODS, "default", "train-0")
        here = await kube.get(NODES, "", "gpu-a")
        events = EventRecorder(kube)
        said = Announcement(
            kind="Pod",
            namespace="default",
            name="train-0",
            uid=waiting.metadata.uid,
            reason="BudgetExceeded",
            message="Waiting: The daily spend budget is used up.",
            is_warning=True,
        )
        of_node = Announcement(
            kind="Node",
            namespace="",
            name="gpu-a",
            uid=here.metadata.uid,
            reason="NodeRegistered",
            message="Bought: job train waits.",
            is_warning=False,
        )
        await events.record(said, now)
        await events.record(of_node, now)
        await events.record(
            msgspec.structs.replace(said, message="Waiting: The spend budget is used up."), now + timedelta(minutes=1)
        )
        nowhere = msgspec.structs.replace(said, namespace="gone", uid="another")
        await events.record(nowhere, now)  # its namespace is gone, and so is who would read it
    finally:
        await kube.close()

    pod_told = plane.kubectl("describe", "pod", "train-0")
    assert "BudgetExceeded" in pod_told
    assert "(x2 over" in pod_told
    assert "Waiting: The spend budget is used up." in pod_told
    assert "gpu-autoscaler" in pod_told
    node_told = plane.kubectl("describe", "node", "gpu-a")
    assert "NodeRegistered" in node_told
    assert "Bought: job train waits." in node_told


def everything() -> Iterator[Announcement]:
    """One situation a name that users of the field know, as our own core tells it."""
    wants = UnmetDemand(demand=("pod/uid-coming",), offers_considered=1, price_micro_usd_per_hour=1)
    deleted = NodeDeleted(deleted_at=stories.T0)
    app = (LabelRequirement(key="app", operator="In", values=("stuck",)),)
    leaving = stories.drained("gpu-stuck", reason=deleted, is_voluntary=False)
    told: tuple[tuple[ScalingPolicy, tuple[stories.Story, ...]], ...] = (
        (policy(), (stories.pod("coming", gpus=8), stories.on_sale(), stories.bought(purchase("buy", reason=wants)))),
        (policy(), (stories.pod("huge", gpus=16), stories.on_sale())),
        (clusters(day=0.01), (stories.pod("poor", gpus=8), stories.on_sale(), ledger())),
        (policy(), (stories.node("gpu-young"), stories.on_sale())),
        (policy(), (stories.node("gpu-doomed"), stories.notice("gpu-doomed"))),
        (
            policy(),
            (
                stories.node("gpu-stuck"),
                stories.pod("stuck", on="gpu-stuck", labels={"app": "stuck"}),
                stories.budget("never", match=app, disruptions_allowed=0),
                leaving,
                stories.evicted("going", off="gpu-stuck"),
            ),
        ),
        (policy(idle_seconds_max=30.0, nodes_count_min=1), (stories.node("gpu-kept"), stories.on_sale())),
    )
    for rules, story in told:
        at = stories.T0 + stories.MINUTE
        state = stories.given(*story, as_of=at)
        yield from announcements(StatusView.of(state, rules, at, plan(state, rules, at)))


async def test_describe_shows_each_name_that_users_know(plane: ControlPlane) -> None:
    """Why a pod waits or was evicted, and why a node exists, stays, is removed, or does not become empty."""
    kube = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
    found = {(each.kind, each.name): each for each in everything()}
    said = {(each.kind, each.name, each.reason): each for each in everything()}
    try:
        for kind, name in found:
            if kind == "Pod":
                await kube.create("/api/v1/namespaces/default/pods", pod(name, gpus=1))
            else:
                await kube.create("/api/v1/nodes", node(name))
        for each in said.values():
            uid = plane.kubectl("get", each.kind.lower(), each.name, "-o", "jsonpath={.metadata.uid}")
            await EventRecorder(kube).record(msgspec.structs.replace(each, uid=uid), datetime.now(UTC))
    finally:
        await kube.close()

    shown = {name: plane.kubectl("describe", kind.lower(), name) for kind, name in found}
    for name, reason in (
        ("coming", "ScaleUpTriggered"),
        ("huge", "InsufficientCapacity"),
        ("poor", "BudgetExceeded"),
        ("going", "Evicted"),
        ("gpu-young", "NodeRegistered"),
        ("gpu-doomed", "SpotInterruption"),
        ("gpu-stuck", "FailedDraining"),
        ("gpu-kept", "ScaleDownBlocked"),
    ):
        line = next((line for line in shown[name].splitlines() if f" {reason} " in line), None)
        assert line is not None, (name, shown[name])
        assert "gpu-autoscaler" in line
    assert "disruption budget default/never allows no disruption" in shown["gpu-stuck"]


async def test_what_happened_once_is_one_event(plane: ControlPlane) -> None:
    """A restarted announcer repeats the event without counting it twice."""
    kube = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
    once = Announcement(
        kind="Pod",
        namespace="default",
        name="gone-0",
        uid="u1",
        reason="Evicted",
        message="Evicted.",
        is_warning=False,
        is_once=True,
    )
    try:
        for seconds in (0, 60):
            await EventRecorder(kube).record(once, datetime.now(UTC) + timedelta(seconds=seconds))
    finally:
        await kube.close()
    shown = plane.kubectl("get", "events", "--field-selector", "involvedObject.name=gone-0", "-o", "jsonpath={..count}")
    assert shown == "1"

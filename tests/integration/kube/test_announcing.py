"""Events of ours on a real API server, as `kubectl describe` shows them."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from tests.controlplane.fixtures import plane
from tests.controlplane.plane import ControlPlane
from tests.support.kube_objects import node, pod

from gpu_autoscaler.core.announcements import Announcement
from gpu_autoscaler.kube.announcing import EventWriter
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import from_kubeconfig
from gpu_autoscaler.kube.protocol import NODES, PODS
from gpu_autoscaler.runtime.clock import Clock

__all__ = ["plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]


async def test_describe_says_why_a_pod_waits_and_what_becomes_of_a_node(plane: ControlPlane) -> None:
    """Reason and words stand there; the same thing said again counts, under its latest words."""
    kube = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
    now = datetime.now(UTC)
    try:
        await kube.create("/api/v1/namespaces/default/pods", pod("train-0", gpus=8))
        await kube.create("/api/v1/nodes", node("gpu-a"))
        waiting = await kube.get(PODS, "default", "train-0")
        here = await kube.get(NODES, "", "gpu-a")
        events = EventWriter(kube)
        said = Announcement(
            kind="Pod",
            namespace="default",
            name="train-0",
            uid=waiting.metadata.uid,
            reason="BudgetExceeded",
            message="Waiting because the money of today is spent.",
            is_warning=True,
        )
        of_node = Announcement(
            kind="Node",
            namespace="",
            name="gpu-a",
            uid=here.metadata.uid,
            reason="NodeRegistered",
            message="Bought because: job train waits.",
            is_warning=False,
        )
        await events.say(said, now)
        await events.say(of_node, now)
        await events.say(
            msgspec.structs.replace(said, message="Waiting because all of it is spent."), now + timedelta(minutes=1)
        )
        nowhere = msgspec.structs.replace(said, namespace="gone", uid="another")
        await events.say(nowhere, now)  # its namespace is gone, and so is who would read it
    finally:
        await kube.close()

    pod_told = plane.kubectl("describe", "pod", "train-0")
    assert "BudgetExceeded" in pod_told
    assert "(x2 over" in pod_told
    assert "Waiting because all of it is spent." in pod_told
    assert "gpu-autoscaler" in pod_told
    node_told = plane.kubectl("describe", "node", "gpu-a")
    assert "NodeRegistered" in node_told
    assert "Bought because: job train waits." in node_told

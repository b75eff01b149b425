"""Our finalizer on a real API server: `kubectl delete node` waits only for our nodes."""

import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.controlplane.fixtures import plane
from tests.controlplane.plane import ControlPlane
from tests.support.fake_capacity import FakeCapacity
from tests.support.kube_objects import node
from tests.support.stories import TimedFact, offer, policy, record
from tests.support.upkeep import PlannedUpkeep

from gpu_autoscaler.core.disruption.deleted_nodes import finalizer_changes
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.policy.disruption_settings import RemovalPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeInstanceObserved
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import from_kubeconfig
from gpu_autoscaler.kube.protocol import NODES, Conflict, NotFound
from gpu_autoscaler.kube.translate.node import node_observed
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.labels import ACTION_ID, TERMINATION_FINALIZER
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.runtime.clock import Clock

__all__ = ["plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]

NOTES = Path(__file__).resolve().parents[3] / "deploy/charts/gpu-autoscaler/templates/NOTES.txt"
ON, OFF = policy(), policy(removal=RemovalPolicy(is_finalizer_on=False))


@pytest.fixture
async def kube(plane: ControlPlane) -> AsyncIterator[KubeClient]:
    """Our client, and one node of ours beside one of somebody else."""
    client = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
    for name, labels in (("ours", {ACTION_ID: "buy-1"}), ("theirs", {})):
        body = node(name, labels=labels)
        body["spec"] = {**body.get("spec", {}), "providerID": f"sim:///zone-a/{name}"}
        await client.create("/api/v1/nodes", body)
    yield client
    plane.kubectl("delete", "node", "--all", "--wait=false")
    for one in json.loads(plane.kubectl("get", "nodes", "-o", "json"))["items"]:
        clear = '{"metadata":{"finalizers":null}}'
        plane.kubectl("patch", "node", one["metadata"]["name"], "--type=merge", "-p", clear)
    await client.close()


async def seen(kube: KubeClient, *more: Fact) -> ClusterState:
    """Return the pod watcher's facts of both, with the other known facts."""
    facts: list[Fact] = []
    for name in ("ours", "theirs"):
        try:
            facts.append(node_observed(await kube.get(NODES, "", name), epoch=1))
        except NotFound:
            continue
    now = datetime.now(UTC)
    return fold(EMPTY_STATE, record([TimedFact(fact, now) for fact in (*facts, *more)]))


async def write_due(kube: KubeClient, policy: ScalingPolicy, *more: Fact) -> None:
    """Carry out one plan of the state as it is."""
    state = await seen(kube, *more)
    cloud = FakeCapacity([offer()], installation="uid", now=Clock().now)
    await PlannedUpkeep(kube, cloud).take(state, policy, datetime.now(UTC))


def instance(state: str) -> NodeInstanceObserved:
    """The cloud's word about the instance behind our node."""
    return NodeInstanceObserved(
        epoch=0, version=9, provider_id=ProviderId("sim:///zone-a/ours"), action_id=ActionId("buy-1"), state=state,  # type: ignore[arg-type]
        instance_type="g4dn.2xlarge", zone="zone-a", capacity_type=CapacityType.SPOT, price_micro_usd_per_hour=1,
        launched_at=datetime.now(UTC), terminated_at=datetime.now(UTC) if state == "terminated" else None,
    )  # fmt: skip


async def test_a_node_of_ours_deleted_by_hand_stays_until_its_instance_has_ended(
    plane: ControlPlane, kube: KubeClient
) -> None:
    """Others' finalizers stay as they are; a node of others is never held."""
    theirs = '{"metadata":{"finalizers":["example.com/theirs"]}}'
    plane.kubectl("patch", "node", "ours", "--type=merge", "-p", theirs)
    await write_due(kube, ON)
    held = await kube.get(NODES, "", "ours")
    assert held.metadata.finalizers == ("example.com/theirs", TERMINATION_FINALIZER)
    assert (await kube.get(NODES, "", "theirs")).metadata.finalizers == ()
    assert finalizer_changes(await seen(kube), ON, datetime.now(UTC)) == ()

    plane.kubectl("delete", "node", "ours", "theirs", "--wait=false")
    with pytest.raises(NotFound):
        await kube.get(NODES, "", "theirs")
    await write_due(kube, ON, instance("running"))
    there = await kube.get(NODES, "", "ours")
    assert there.metadata.deletion_timestamp is not None
    assert TERMINATION_FINALIZER in there.metadata.finalizers

    await write_due(kube, ON, instance("terminated"))
    assert (await kube.get(NODES, "", "ours")).metadata.finalizers == ("example.com/theirs",)


async def test_what_changed_under_way_is_not_overwritten(kube: KubeClient) -> None:
    """The version that was seen is a condition: a finalizer that somebody else puts meanwhile is not lost."""
    before = await kube.get(NODES, "", "ours")
    await kube.patch_node("ours", {"metadata": {"finalizers": ["example.com/theirs"]}})
    late = {"resourceVersion": before.metadata.resource_version, "finalizers": [TERMINATION_FINALIZER]}
    with pytest.raises(Conflict):
        await kube.patch_node("ours", {"metadata": late})
    await write_due(kube, ON)
    held = await kube.get(NODES, "", "ours")
    assert held.metadata.finalizers == ("example.com/theirs", TERMINATION_FINALIZER)


async def test_switched_off_nothing_is_held_any_more(plane: ControlPlane, kube: KubeClient) -> None:
    """Before an uninstall: a node deleted meanwhile is removed at once."""
    await write_due(kube, ON)
    plane.kubectl("delete", "node", "ours", "--wait=false")
    await write_due(kube, OFF)
    with pytest.raises(NotFound):
        await kube.get(NODES, "", "ours")
    assert finalizer_changes(await seen(kube), OFF, datetime.now(UTC)) == ()


async def test_after_an_uninstall_the_command_of_the_chart_lets_nodes_go(plane: ControlPlane, kube: KubeClient) -> None:
    """Nobody of us is left: the patch in the chart's notes takes ours off, and what others wrote or never had stays."""
    await kube.patch_node("ours", {"metadata": {"finalizers": ["example.com/theirs", TERMINATION_FINALIZER]}})
    (patch,) = re.findall(r"kubectl patch \{} --type=strategic -p '(.+)'", NOTES.read_text(encoding="utf-8"))
    for name in ("ours", "theirs"):
        plane.kubectl("patch", "node", name, "--type=strategic", "-p", patch)
    assert (await kube.get(NODES, "", "ours")).metadata.finalizers == ("example.com/theirs",)
    assert (await kube.get(NODES, "", "theirs")).metadata.finalizers == ()


async def test_volumes_of_a_node_are_seen_while_they_are_attached(plane: ControlPlane, kube: KubeClient) -> None:
    """Those of others are not its own; a volume that is detached is gone from the list."""
    for name, where in (("one", "ours"), ("two", "theirs")):
        body = {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "VolumeAttachment",
            "metadata": {"name": f"attached-{name}"},
            "spec": {
                "attacher": "csi.example.com",
                "nodeName": where,
                "source": {"persistentVolumeName": f"pv-{name}"},
            },
        }
        plane.kubectl("apply", "-f", "-", text=json.dumps(body))
    assert await kube.volumes_on("ours") == ["pv-one"]
    plane.kubectl("delete", "volumeattachment", "attached-one")
    assert await kube.volumes_on("ours") == []

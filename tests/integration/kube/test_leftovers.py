"""Orphaned nodes on a real API server: our unresponsive ones are removed, and a missing permission is reported."""

import asyncio
import json
import shlex
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
import structlog
from tests.controlplane.fixtures import plane
from tests.controlplane.plane import ControlPlane
from tests.support.fake_capacity import FakeCapacity
from tests.support.kube_objects import node
from tests.support.stories import TimedFact, given, offer, policy
from tests.support.upkeep import PlannedUpkeep

from gpu_autoscaler.core.disruption.orphaned_nodes import ORPHANED_SECONDS
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeInstanceObserved
from gpu_autoscaler.events.scaling import ScalingNodeRemoved
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import from_kubeconfig
from gpu_autoscaler.kube.protocol import NODES, NotFound
from gpu_autoscaler.kube.translate.node import node_observed
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.labels import ACTION_ID, TERMINATION_FINALIZER
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.scaler.orphaned_nodes import ASKED_AGAIN_SECONDS

__all__ = ["plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]

LATER, LONG = timedelta(seconds=ASKED_AGAIN_SECONDS), timedelta(minutes=10)
NAMES = ("ended", "well", "theirs")
RULES = policy(watch_age_seconds_max=86_400)


def ready(status: str) -> dict[str, object]:
    """Set the Ready condition, as a kubelet or the node controller does."""
    return {"status": {"conditions": [{"type": "Ready", "status": status, "reason": "r", "message": "m"}]}}


@pytest.fixture
async def kube(plane: ControlPlane) -> AsyncIterator[KubeClient]:
    """Our client; a silent node of ours, one that is well, and one of somebody else."""
    client = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
    for name in NAMES:
        body = node(name, labels={} if name == "theirs" else {ACTION_ID: f"buy-{name}"})
        body["spec"] = {"providerID": f"fake:///zone-a/{name}"}
        body["metadata"]["finalizers"] = [TERMINATION_FINALIZER]
        await client.create("/api/v1/nodes", body)
        status = json.dumps(ready("True" if name == "well" else "Unknown"))
        plane.kubectl("patch", "node", name, "--subresource=status", "--type=strategic", "-p", status)
    yield client
    for name in NAMES:
        plane.kubectl("delete", "node", name, "--wait=false", "--ignore-not-found")
    for one in json.loads(plane.kubectl("get", "nodes", "-o", "json"))["items"]:
        plane.kubectl("patch", "node", one["metadata"]["name"], "-p", '{"metadata":{"finalizers":null}}')
    await client.close()


async def seen(kube: KubeClient, at: datetime) -> ClusterState:
    """What is known of all three: every instance has ended, as the cloud shows, long enough ago."""
    ended_at = at - timedelta(seconds=ORPHANED_SECONDS)
    facts: list[Fact] = []
    for name in NAMES:
        provider_id = ProviderId(f"fake:///zone-a/{name}")
        apply_to = NodeInstanceObserved(
            epoch=0, version=4, provider_id=provider_id, action_id=None, state="terminated", instance_type="t",
            zone="z", capacity_type=CapacityType.SPOT, price_micro_usd_per_hour=1, launched_at=ended_at,
            terminated_at=ended_at,
        )  # fmt: skip
        facts += [apply_to, node_observed(await kube.get(NODES, "", name), epoch=1)]
    return given(tuple(TimedFact(fact, ended_at) for fact in facts), as_of=at)


def cloud() -> FakeCapacity:
    """One that knows nothing of any of these instances."""
    return FakeCapacity([offer()], installation="uid", now=Clock().now)


async def test_the_silent_node_of_an_ended_instance_goes_and_no_other(kube: KubeClient) -> None:
    """With our finalizer; those that report, and those of others, stay as they are."""
    now = datetime.now(UTC)
    state, leftovers = await seen(kube, now), PlannedUpkeep(kube, cloud())
    assert await leftovers.take(state, RULES, now) == []
    (removed,) = await leftovers.take(state, RULES, now + LATER)
    assert isinstance(removed, ScalingNodeRemoved)
    assert removed.node_name == "ended"
    with pytest.raises(NotFound):
        await kube.get(NODES, "", "ended")
    for name in ("well", "theirs"):
        there = await kube.get(NODES, "", name)
        assert (there.metadata.finalizers, there.metadata.deletion_timestamp) == ((TERMINATION_FINALIZER,), None)


async def test_a_kubelet_that_reports_in_between_keeps_its_node(plane: ControlPlane, kube: KubeClient) -> None:
    """The last look is at the node itself, and the version that was seen is deleted or none."""
    now = datetime.now(UTC)
    state, leftovers = await seen(kube, now), PlannedUpkeep(kube, cloud())
    assert await leftovers.take(state, RULES, now) == []
    before = await kube.get(NODES, "", "ended")
    status = json.dumps(ready("True"))
    plane.kubectl("patch", "node", "ended", "--subresource=status", "--type=strategic", "-p", status)
    assert not await kube.delete_node(before)
    assert await leftovers.take(state, RULES, now + LATER) == []
    assert (await kube.get(NODES, "", "ended")).metadata.finalizers == (TERMINATION_FINALIZER,)


async def test_a_missing_permission_is_reported_with_its_remedy(plane: ControlPlane, kube: KubeClient) -> None:
    """With an older Role nothing is removed, and everything else works. With the permission the node is removed."""
    certificate, key = plane.authority.client("dora")
    path = plane.kubeconfig("dora", {"client-certificate": str(certificate), "client-key": str(key)})
    verbs = ("--verb=get,patch", "--resource=nodes")
    plane.kubectl("create", "clusterrole", "keeps-nodes", *verbs)
    plane.kubectl("create", "clusterrolebinding", "keeps-nodes", "--clusterrole=keeps-nodes", "--user=dora")
    poor, now = KubeClient(from_kubeconfig(str(path)), now=Clock().now), datetime.now(UTC)
    try:
        state, leftovers = await seen(kube, now), PlannedUpkeep(poor, cloud())
        with structlog.testing.capture_logs() as told:
            for after in (timedelta(0), LATER, LATER + LONG):
                assert await leftovers.take(state, RULES, now + after) == []
        line, again = told  # each attempt
        assert line["error"] == again["error"]
        assert 'cannot delete resource "nodes"' in line["error"]
        assert (line["log_level"], line["decision"]) == ("warning", "remove_orphaned_node")
        for each in line["error"].partition("grant it: ")[2].split(" && "):
            plane.kubectl(*shlex.split(each)[1:])
        at = now + LATER + LONG
        async with asyncio.timeout(60):
            while not await leftovers.take(state, RULES, at := at + LONG):
                await asyncio.sleep(0.1)  # the server hears of the new role a moment later
        with pytest.raises(NotFound):
            await kube.get(NODES, "", "ended")
    finally:
        await poor.close()

"""Our taint on a real API server: those of others are kept, and kube-scheduler prefers nodes without it."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.controlplane.plane import EVERYTHING, ControlPlane, running_plane
from tests.support.kube_objects import node, pod
from tests.support.stories import T0

from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import from_kubeconfig
from gpu_autoscaler.kube.protocol import NODES, PODS, Conflict
from gpu_autoscaler.kube.wire.core import WireTaint
from gpu_autoscaler.model.decisions import AvoidNode, OpenNode
from gpu_autoscaler.model.ids import ActionId, NodeUid
from gpu_autoscaler.model.labels import AVOID_TAINT
from gpu_autoscaler.model.reasons.upkeep import CheaperToEmpty, TaintUnneeded
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.scaler.node_taints import NodeTaints

pytestmark = [pytest.mark.slow, pytest.mark.integration]
OURS = WireTaint(key=AVOID_TAINT, effect="PreferNoSchedule")


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """An API server with kube-scheduler, and KWOK in place of kubelets."""
    with tempfile.TemporaryDirectory(prefix="plane-") as folder, running_plane(Path(folder), EVERYTHING) as running:
        yield running


@pytest.fixture
async def kube(plane: ControlPlane) -> AsyncIterator[KubeClient]:
    """Our client, and two nodes that differ in nothing."""
    client = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
    for name in ("a", "b"):
        await client.create("/api/v1/nodes", node(name))
    yield client
    plane.kubectl("delete", "pod,node", "--all", "--force", "--grace-period=0")
    await client.close()


async def write(kube: KubeClient, name: str, *, is_avoided: bool, uid: str | None = None) -> None:
    """Carry out one change of a plan."""
    node_uid = NodeUid(uid or (await kube.get(NODES, "", name)).metadata.uid)
    cheaper, in_vain = (
        CheaperToEmpty(node_micro_usd_per_hour=2, open_micro_usd_per_hour=1),
        TaintUnneeded(cause="policy"),
    )
    act = ActionId("act")
    decision: AvoidNode | OpenNode = OpenNode(
        action_id=act, attempts_count=1, retry_at=T0, node_uid=node_uid, node_name=name, reason=in_vain
    )
    if is_avoided:
        decision = AvoidNode(
            action_id=act, attempts_count=1, retry_at=T0, node_uid=node_uid, node_name=name, reason=cheaper
        )
    async with asyncio.timeout(30):
        while True:
            try:
                return await NodeTaints(kube).write(decision)
            except Conflict:  # KWOK reports the node; in the product a later plan decides it again
                continue


async def taints(kube: KubeClient, name: str) -> tuple[WireTaint, ...]:
    """Those of the node, without the ones that Kubernetes sets until KWOK reports it ready."""
    seen = (await kube.get(NODES, "", name)).spec.taints
    return tuple(taint for taint in seen if not taint.key.startswith("node.kubernetes.io/"))


async def test_taints_of_others_are_kept(plane: ControlPlane, kube: KubeClient) -> None:
    """As they are, also the time from which NoExecute counts; a node of the same name is another one."""
    theirs = {"key": "example.com/theirs", "effect": "NoExecute", "value": "x", "timeAdded": "2026-11-21T12:00:00Z"}
    plane.kubectl("patch", "node", "a", "--type=merge", "-p", json.dumps({"spec": {"taints": [theirs]}}))
    (before,) = await taints(kube, "a")
    assert before.time_added == T0

    await write(kube, "a", is_avoided=True, uid="another")
    assert await taints(kube, "a") == (before,)
    await write(kube, "a", is_avoided=True)
    await write(kube, "a", is_avoided=True)
    assert await taints(kube, "a") == (before, OURS)
    await write(kube, "a", is_avoided=False)
    assert await taints(kube, "a") == (before,)


async def test_new_pods_avoid_the_node_and_use_it_when_the_other_is_full(kube: KubeClient) -> None:
    """Three pods with four GPUs each, on two nodes with eight."""
    await write(kube, "a", is_avoided=True)
    for number, expected in enumerate(("b", "b", "a")):
        name = f"pod-{number}"
        await kube.create("/api/v1/namespaces/default/pods", pod(name, gpus=4))
        async with asyncio.timeout(30):
            while (bound := (await kube.get(PODS, "default", name)).spec.node_name) is None:
                await asyncio.sleep(0.1)
        assert bound == expected

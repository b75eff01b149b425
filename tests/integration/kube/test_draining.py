"""Our drains on a real API server, pass by pass: eviction order, protected pods, and waits."""

import itertools
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import aiohttp
import pytest
from tests.controlplane.fixtures import plane
from tests.controlplane.plane import ControlPlane
from tests.support.kube_http import STRATEGIC, Json, KubeHttp
from tests.support.kube_objects import budget, node, pod
from tests.support.stories import Story, TimedFact, given, planned

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.scaling import ScalingDrainCancelled, ScalingDrainStarted, ScalingNodeDrained
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import from_kubeconfig
from gpu_autoscaler.kube.protocol import NODES
from gpu_autoscaler.kube.translate.node import node_observed
from gpu_autoscaler.model.decisions import CancelDrain, DrainNode
from gpu_autoscaler.model.ids import ActionId, NodeUid, PlanId
from gpu_autoscaler.model.labels import EVICTION_PRIORITY, EXCLUDE_FROM_BALANCERS
from gpu_autoscaler.model.reasons.drain import DemandReturned, DrainReason, NodeUnderused, SpotReclaim
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler_services.scaler.drains import Drains

__all__ = ["plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]

UNDERUSED = NodeUnderused(pods=(), saving_micro_usd_per_hour=1)
RECLAIM = SpotReclaim(notice_id="n", kind="terminate", reclaim_at=None)
PATH = "/api/v1/namespaces/default/pods"
BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
PLAN = PlanId("plan-1")
_number = itertools.count(1)


class Bench:
    """One node of this server with its pods, and the drains; kubelets and controllers are the test's own hand."""

    def __init__(self, kube: KubeClient, outside: KubeHttp, made: Json) -> None:
        self.name, self.uid = made["metadata"]["name"], NodeUid(made["metadata"]["uid"])
        self.kube, self.outside, self.clock, self.view = kube, outside, Clock(), StateView()
        self.drains = Drains(self.view, kube, self.clock)
        self._story: Story = ()

    async def runs(self, name: str, *, kind: str = "ReplicaSet", annotations: Json | None = None, **spec: Any) -> str:  # noqa: ANN401 - fields of a pod
        """A pod that runs here and belongs to a controller of this kind."""
        name = f"{self.name}-{name}"
        body = pod(name, annotations=annotations, labels={"app": name}, nodeName=self.name, **spec)
        owner = {"apiVersion": "apps/v1", "kind": kind, "name": "owner", "uid": "owner", "controller": True}
        body["metadata"]["ownerReferences"] = [owner]
        await self.outside.made(PATH, body)
        ready = [{"type": "Ready", "status": "True"}]
        status = {"status": {"phase": "Running", "conditions": ready}}
        await self.outside.patched(f"{PATH}/{name}/status", status, STRATEGIC)
        return name

    async def begin(self, reason: DrainReason, *, seconds: float = 60.0) -> ScalingDrainStarted:
        """Decide it, and take its first step."""
        decision = DrainNode(
            action_id=ActionId("drain-1"),
            node_uid=self.uid,
            node_name=self.name,
            provider_id=None,
            is_voluntary=reason is not RECLAIM,
            deadline_at=self.clock.now() + timedelta(seconds=seconds),
            reason=reason,
        )
        self.knows(planned(decision, plan_id=PLAN, at=self.clock.now()))
        started = (await self.drains.start(decision, PLAN))[-1]
        assert isinstance(started, ScalingDrainStarted)
        self.knows((TimedFact(started, self.clock.now()),))
        return started

    def knows(self, story: Story) -> None:
        """Make the drain record return this from now on."""
        self._story = (*self._story, *story)
        self.view.advance(given(self._story, is_synced=False), {})

    async def leaving(self) -> set[str]:
        """Return the terminating pods of the node."""
        pods = await self.kube.pods_on(self.name)
        return {one.metadata.name for one in pods if one.metadata.deletion_timestamp is not None}

    async def waves(self, started: ScalingDrainStarted) -> list[set[str]]:
        """Run passes until the node is drained, with evicted pods ending; return the pods of each pass."""
        told: list[set[str]] = []
        facts: tuple[Fact, ...] = ()
        while not any(isinstance(fact, ScalingNodeDrained) for fact in facts):
            facts = (await self.drains.proceed(started)).facts
            if going := await self.leaving():
                told.append(going)
            for name in going:
                await self.outside.send("DELETE", f"{PATH}/{name}?gracePeriodSeconds=0")
            assert len(told) < 10, "it ends"
        return told

    async def call_back(self, started: ScalingDrainStarted) -> ScalingDrainCancelled:
        """Decide that the node stays, and carry it out."""
        cancel = CancelDrain(
            action_id=ActionId("cancel-1"),
            drain_action_id=started.action_id,
            node_uid=self.uid,
            node_name=self.name,
            reason=DemandReturned(demand=("job/x",)),
        )
        self.knows(planned(cancel, plan_id="plan-2", at=self.clock.now()))
        (cancelled,) = await self.drains.cancel(cancel, PlanId("plan-2"))
        assert isinstance(cancelled, ScalingDrainCancelled)
        return cancelled

    async def balancers(self) -> str | None:
        """Return the load balancer exclusion label of the node; None: not set."""
        return (await self.kube.get(NODES, "", self.name)).metadata.labels.get(EXCLUDE_FROM_BALANCERS)

    async def is_cordoned(self) -> bool:
        """Whether it takes no new pods."""
        return (await self.kube.get(NODES, "", self.name)).spec.unschedulable


@pytest.fixture
async def bench(plane: ControlPlane) -> AsyncIterator[Bench]:
    """A bench with a separate node."""
    kube = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
    async with aiohttp.ClientSession() as session:
        outside = KubeHttp(session, plane.url, plane.admin_token, plane.tls)
        yield Bench(kube, outside, await outside.made("/api/v1/nodes", node(f"gpu-{next(_number)}")))
    await kube.close()


async def test_pods_go_in_their_order_and_those_of_the_node_stay(bench: Bench) -> None:
    """Low eviction priority first, critical ones last; DaemonSet and mirror pods are not asked to go."""
    last = await bench.runs("dns", priorityClassName="system-cluster-critical")
    middle = await bench.runs("train", annotations={EVICTION_PRIORITY: "high"})
    first = {await bench.runs(f"notebook-{number}", annotations={EVICTION_PRIORITY: "low"}) for number in range(2)}
    stay = [
        await bench.runs("agent", kind="DaemonSet"),
        await bench.runs("proxy", kind="Node", annotations={"kubernetes.io/config.mirror": "hash"}),
    ]
    assert await bench.waves(await bench.begin(RECLAIM)) == [first, {middle}, {last}]
    assert {one.metadata.name for one in await bench.kube.pods_on(bench.name)} == set(stay)
    assert await bench.leaving() == set()


async def test_a_canceled_drain_uncordons_and_stops_evicting(bench: Bench) -> None:
    """The node takes pods again; a pass that comes late does nothing."""
    name = await bench.runs("train")
    started = await bench.begin(UNDERUSED)
    assert await bench.is_cordoned()
    assert await bench.balancers() == "gpu-autoscaler", "nor is anything sent through it"
    assert (await bench.call_back(started)).abandoned_because == ""
    assert not await bench.is_cordoned()
    assert await bench.balancers() is None
    late = await bench.drains.proceed(started)
    assert (late.facts, late.redeliver_after_seconds) == ((), None)
    assert await bench.leaving() == set()
    assert [one.metadata.name for one in await bench.kube.pods_on(bench.name)] == [name]


async def test_a_load_balancer_label_set_by_another_writer_stays(bench: Bench) -> None:
    """A node that its user keeps out of them is kept out before a drain, during it and after."""
    mark = {"metadata": {"labels": {EXCLUDE_FROM_BALANCERS: ""}}}
    marked = await bench.kube.patch_node(bench.name, mark)
    bench.knows((TimedFact(node_observed(marked, epoch=1), bench.clock.now()),))
    started = await bench.begin(UNDERUSED)
    assert (await bench.is_cordoned(), await bench.balancers()) == (True, "")
    await bench.call_back(started)
    assert (await bench.is_cordoned(), await bench.balancers()) == (False, "")


async def test_a_voluntary_drain_is_abandoned_at_its_deadline_with_a_reason(bench: Bench) -> None:
    """The reason names the PodDisruptionBudget; two of them give a 500 from the server. Never forced."""
    name = await bench.runs("train")
    for number in range(2):
        await bench.outside.made(BUDGETS, budget(f"{name}-{number}", name, maxUnavailable=0))
    started = await bench.begin(UNDERUSED, seconds=8.0)
    waits = 0
    while (outcome := await bench.drains.proceed(started)).redeliver_after_seconds is not None:
        assert (outcome.facts, outcome.redeliver_after_seconds >= 0.2) == ((), True), "it does not spin"
        waits += 1
    (given_up,) = outcome.facts
    assert isinstance(given_up, ScalingDrainCancelled)
    assert given_up.abandoned_because == "1 pod left at the deadline"
    assert waits > 0
    assert not await bench.is_cordoned()
    assert await bench.leaving() == set()


async def test_volumes_are_waited_for_until_they_are_detached(bench: Bench) -> None:
    """An empty node with an attached volume is not drained yet; attachments of other nodes are ignored."""
    path = "/apis/storage.k8s.io/v1/volumeattachments"
    for name, where in ((bench.name, bench.name), (f"{bench.name}-other", "another")):
        spec = {"attacher": "csi.example.com", "nodeName": where, "source": {"persistentVolumeName": name}}
        await bench.outside.made(path, {"metadata": {"name": name}, "spec": spec})
    started = await bench.begin(RECLAIM)
    waiting = await bench.drains.proceed(started)
    assert (waiting.facts, waiting.redeliver_after_seconds is None) == ((), False)
    await bench.outside.send("DELETE", f"{path}/{bench.name}")
    (drained,) = (await bench.drains.proceed(started)).facts
    assert isinstance(drained, ScalingNodeDrained)

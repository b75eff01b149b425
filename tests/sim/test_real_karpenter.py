"""The karpenter-like baseline beside real Karpenter: the same workloads on the same offers, the one in the simulation,
the other on a real control plane with KWOK nodes. After each step both come to rest, and their nodes are compared.
"""

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest
from tests.bench.peers import real
from tests.controlplane.plane import EVERYTHING, ControlPlane, running_plane
from tests.support.karpenter import needed_karpenter
from tests.support.kube_http import Json, KubeHttp

from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.sim.cluster.cloud import TYPES
from gpu_autoscaler.sim.scoring.baselines.actuator import Actuator
from gpu_autoscaler.sim.scoring.baselines.karpenter import Karpenter
from gpu_autoscaler.sim.scoring.runner import ScoringRun
from gpu_autoscaler.sim.scoring.scenario import Scenario
from gpu_autoscaler.simcluster.offers import offers_of

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.sweep, pytest.mark.timeout(900)]

OFFERS = offers_of(TYPES)
REST_SECONDS = 600.0  # of the simulation, in which it comes to rest after a step


class Group(NamedTuple):
    """Replicas of one pod."""

    replicas_count: int
    gpu_count: int = 1
    cpu_count: int = 1
    is_on_demand: bool = False


Step = Mapping[str, Group]  # by name; what is not named is gone
Nodes = Counter[tuple[str, str]]  # by instance type and capacity type


class Simulated:
    """The baseline in the simulation."""

    def __init__(self) -> None:
        self._run = ScoringRun(Scenario(name="peer", description="", hours=1.0, arrivals=(), offers=OFFERS))
        asyncio.set_event_loop(self._run.loop)
        run = self._run
        self._actuator = Actuator(run.loop, run.faults, run.identity, run.workloads, run.replica_sets, run.cloud)
        self._actuator.begin(Karpenter())
        self._uids: dict[str, str] = {}

    def step(self, wanted: Step) -> Nodes:
        """Start and stop groups; return the nodes at rest."""
        for name in sorted(self._uids.keys() - wanted.keys()):
            self._run.replica_sets.stop(self._uids.pop(name))
        for name, group in wanted.items():
            if name not in self._uids:
                self._uids[name] = self._run.replica_sets.start(
                    name, _spec(group), replicas_count=group.replicas_count, annotations={}, healthy_count_min=0
                )
        self._run.loop.call_later(REST_SECONDS, self._run.loop.stop)
        self._run.loop.run_forever()
        return Counter(
            (machine.offer.instance_type, str(machine.offer.capacity_type)) for machine in self._run.cloud.alive()
        )

    def close(self) -> None:
        self._actuator.close()
        self._run.loop.end()


def _amounts(group: Group) -> dict[str, str]:
    amounts = {"cpu": str(group.cpu_count), "memory": f"{2 * group.cpu_count}Gi"}
    return {**amounts, GPU_RESOURCE: str(group.gpu_count)} if group.gpu_count else amounts


def _spec(group: Group) -> core.PodSpec:
    amounts = _amounts(group)
    selector = {labels.CAPACITY_TYPE: "on-demand"} if group.is_on_demand else {}
    container = core.Container(name="main", resources=core.ResourceList(requests=amounts, limits=amounts))
    return core.PodSpec(containers=(container,), node_selector=selector)


def simulated(story: Sequence[Step]) -> list[Nodes]:
    """Return the nodes of the baseline after each step."""
    world = Simulated()
    try:
        return [world.step(step) for step in story]
    finally:
        world.close()


CAPACITY = "karpenter.sh/capacity-type"
NODES, PODS, GROUPS = "/api/v1/nodes", "/api/v1/namespaces/default/pods", "/apis/apps/v1/namespaces/default/deployments"
POLL_SECONDS, STILL_SECONDS, STEP_SECONDS_MAX = 1.0, 30.0, 240.0  # it validates after 15 s, and looks every 10 s


class Real:
    """Karpenter on a control plane."""

    def __init__(self, kube: KubeHttp) -> None:
        self._kube = kube
        self._running: set[str] = set()

    async def step(self, wanted: Step) -> Nodes:
        """Create and delete Deployments; return the nodes at rest."""
        for name in sorted(self._running - wanted.keys()):
            await self._kube.send("DELETE", f"{GROUPS}/{name}", {"propagationPolicy": "Background"})
        for name in sorted(wanted.keys() - self._running):
            await self._kube.made(GROUPS, _deployment(name, wanted[name]))
        self._running = set(wanted)
        return await self._at_rest(sum(group.replicas_count for group in wanted.values()))

    async def _at_rest(self, pods_count: int) -> Nodes:
        """Wait until all pods run and nothing has changed for longer than a consolidation takes."""
        last: tuple[Nodes, dict[str, str]] = Counter(), {}
        still_seconds = waited_seconds = 0.0
        nodes: Json = {"items": []}
        while still_seconds < STILL_SECONDS:
            assert waited_seconds < STEP_SECONDS_MAX, f"not at rest: {last}"
            await asyncio.sleep(POLL_SECONDS)
            waited_seconds += POLL_SECONDS
            nodes, placed = await self._kube.read(NODES), _placed(await self._kube.read(PODS))
            seen = _nodes(nodes), placed
            is_still = seen == last and len(placed) == pods_count and not _is_moving(nodes)
            still_seconds = still_seconds + POLL_SECONDS if is_still else 0.0
            last = seen
        return _nodes(nodes)


def _nodes(listed: Json) -> Nodes:
    of = (item["metadata"]["labels"] for item in listed["items"])
    return Counter((each["node.kubernetes.io/instance-type"], each[CAPACITY]) for each in of)


def _placed(listed: Json) -> dict[str, str]:
    return {
        item["metadata"]["name"]: item["spec"].get("nodeName", "")
        for item in listed["items"]
        if item["status"].get("phase") == "Running"
    }


def _is_moving(listed: Json) -> bool:
    """True if a node is being disrupted or removed."""
    return any(
        "deletionTimestamp" in item["metadata"]
        or any(taint["key"].startswith("karpenter.sh/") for taint in item["spec"].get("taints", ()))
        for item in listed["items"]
    )


def _deployment(name: str, group: Group) -> Json:
    amounts = _amounts(group)
    container = {"name": "main", "image": "work:1", "resources": {"requests": amounts, "limits": amounts}}
    pod = {
        "nodeSelector": {CAPACITY: "on-demand"} if group.is_on_demand else {},
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": group.replicas_count,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
        },
    }


def _pool() -> Json:
    """All offers, spot and on demand, consolidated at once: the defaults that the baseline states."""
    pool = json.loads(real.node_pool({}))
    pool["spec"]["template"]["spec"]["requirements"][-1]["values"] = ["spot", "on-demand"]
    pool["spec"]["disruption"] = {"consolidationPolicy": "WhenEmptyOrUnderutilized", "consolidateAfter": "0s"}
    return dict(pool)


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """Karpenter, and KWOK for what runs on its nodes."""
    needed_karpenter()
    with (
        tempfile.TemporaryDirectory(prefix="peer-") as name,
        running_plane(Path(name) / "plane", EVERYTHING) as plane,
        real.running(plane, OFFERS, None),
    ):
        plane.kubectl("apply", "-f", "-", text=json.dumps(_pool()))
        plane.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "nodepool/default")
        yield plane


STORIES: dict[str, tuple[Step, ...]] = {
    "pods that need on-demand": (
        {"a": Group(6, is_on_demand=True)},
        {"a": Group(6, is_on_demand=True), "b": Group(5, is_on_demand=True)},
        {"b": Group(5, is_on_demand=True)},  # what is left moves, and the last pod gets a cheaper node
    ),
    "pods of three sizes on spot": (
        {"a": Group(3), "b": Group(2, gpu_count=2), "c": Group(1, gpu_count=4)},
        {"a": Group(3), "b": Group(2, gpu_count=2)},  # spot is not replaced by cheaper spot
    ),
    "on-demand that is no longer needed": (
        {"a": Group(3, is_on_demand=True)},
        {"a": Group(3, is_on_demand=True), "b": Group(1), "c": Group(2, gpu_count=0)},  # the node has room for them
        {"b": Group(1), "c": Group(2, gpu_count=0)},  # they get a smaller node, as spot
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_the_baseline_has_the_nodes_of_real_karpenter(plane: ControlPlane, story: str) -> None:
    """Types, capacity types and numbers are equal at rest; times, zones and names are not compared."""
    steps = (*STORIES[story], {})

    assert asyncio.run(really(plane, steps)) == simulated(steps)


async def really(plane: ControlPlane, steps: Sequence[Step]) -> list[Nodes]:
    """Return the nodes of Karpenter after each step."""
    async with aiohttp.ClientSession() as session:
        karpenter = Real(KubeHttp(session, plane.url, plane.admin_token, plane.tls))
        return [await karpenter.step(step) for step in steps]

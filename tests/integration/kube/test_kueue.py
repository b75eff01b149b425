"""Real Kueue beside gpu-autoscaler: its ProvisioningRequests are bought for as gangs, and it admits what has capacity.

Pod watcher, plan, plan check and the writer of answers are those of the services. The test launches what the plan buys:
KWOK nodes that become ready when it says so.
"""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.controlplane import kueue_controller
from tests.controlplane.fixtures import kube
from tests.controlplane.plane import EVERYTHING, ControlPlane, needed_programs, running_plane
from tests.integration.kube.gangs import until
from tests.support.accepted import accepted_plan
from tests.support.fake_capacity import FakeCapacity
from tests.support.kube_http import MERGE, Json, KubeHttp
from tests.support.kube_objects import job, node
from tests.support.purchases import bought, offer, on_sale
from tests.support.stories import policy
from tests.support.timed_facts import TimedFact, record
from tests.support.upkeep import steps_of

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.node import NodeInstanceListed
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.model.decisions import AnswerProvisioningRequest, BuyNode, Cut, Plan
from gpu_autoscaler.model.demands import BEST_EFFORT_ATOMIC, CHECK_CAPACITY, PodSet
from gpu_autoscaler.model.ids import ActionId, PlanId
from gpu_autoscaler.model.reasons.upkeep import RequestExpired
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.pod_watcher.service import PodWatcher
from gpu_autoscaler_services.scaler.request_answers import RequestAnswers

__all__ = ["kube"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]

_KUEUE = "kueue.x-k8s.io/v1beta1"
_REQUESTS = "/apis/autoscaling.x-k8s.io/v1beta1/namespaces/{}/provisioningrequests"
_RETRY = {"backoffLimitCount": 3, "backoffBaseSeconds": 1, "backoffMaxSeconds": 2}


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A whole control plane with Kueue on it."""
    needed_programs(), kueue_controller.needed()
    with (
        tempfile.TemporaryDirectory(prefix="plane-") as folder,
        running_plane(Path(folder), EVERYTHING) as plane,
        kueue_controller.running(plane),
    ):
        yield plane


@pytest.fixture
async def user(plane: ControlPlane) -> AsyncIterator[KubeHttp]:
    """Users, and the cloud."""
    async with aiohttp.ClientSession() as session:
        http = KubeHttp(session, plane.url, plane.admin_token, plane.tls)
        yield http
        for found in (await http.read("/apis/batch/v1/jobs"))["items"]:  # its pods would wait for nodes later on
            path = f"/apis/batch/v1/namespaces/{found['metadata']['namespace']}/jobs/{found['metadata']['name']}"
            await http.send("DELETE", path, {"propagationPolicy": "Background"})
        for found in (await http.read("/api/v1/nodes"))["items"]:
            await http.send("DELETE", f"/api/v1/nodes/{found['metadata']['name']}")


class Autoscaler:
    """Watches, plans and answers, as the services do; purchases wait until `launch`."""

    def __init__(self, kube: KubeClient, user: KubeHttp, namespace: str, **rules: object) -> None:
        self._kube, self._user, self._namespace = kube, user, namespace
        self._rules = policy(removal={"is_finalizer_on": False}, idle_seconds=3_600.0, **rules)
        self._story: list[TimedFact] = []
        self._folded_count = 0
        self._state = EMPTY_STATE
        self.ordered: list[BuyNode] = []
        self.is_launching = True

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Autoscaler"]:
        """Run until the end of the block; a failure of it fails the block."""
        watcher = PodWatcher(self._kube, await self._kube.cluster(), are_provisioning_requests_served=True)
        self._story += on_sale(offer(gpus=8), at=Clock().now())
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._follow(watcher, source)) for source in watcher.sources()]
            running.append(tasks.create_task(self._plan()))
            yield self
            for task in running:
                task.cancel()

    @property
    def zones(self) -> list[str]:
        """The zone of each node that was bought for a request: pods of earlier tests may wait as well."""
        gangs = {f"provisioning/{uid}" for uid in self._state.provisioning}
        return [decision.offer.zone for decision in self.ordered if decision.gang in gangs]

    @property
    def pod_sets(self) -> list[PodSet]:
        """The pod sets of all requests."""
        return [pods for request in self._state.provisioning.values() for pods in request.pod_sets]

    async def _follow(self, watcher: PodWatcher, source: AsyncIterator[Any]) -> None:
        async for item in source:
            facts = await watcher.on_item(item)
            self._story += [TimedFact(fact, Clock().now()) for fact in facts]

    async def _plan(self) -> None:
        steps = steps_of(self._kube, FakeCapacity((), installation="i", now=Clock().now), Clock().now)
        while True:
            await asyncio.sleep(0.2)
            now = Clock().now()
            instances = tuple(self._state.instances)
            self._story.append(TimedFact(NodeInstanceListed(provider_ids=instances, listed_at=now), now))
            made = self._planned(now)
            for decision in made.decisions:
                if isinstance(decision, BuyNode):
                    self.ordered.append(decision)
                    self._story += bought(decision, at=now)[1:]
            for act in made.upkeep_decisions:
                await steps.take(act, PlanId("p"))
            if self.is_launching:
                await self._launch()

    def _planned(self, now: datetime) -> Plan:
        records = record(self._story)
        self._state = fold(self._state, records[self._folded_count :])
        self._folded_count = len(records)
        if self._state.nodes_synced is None or self._state.pods_synced is None:
            return Plan(as_of=now, parent_sequence=0)
        made = accepted_plan(self._state, self._rules, now)
        if made.decisions or made.upkeep_decisions:
            plan_id = PlanId(now.isoformat())
            fact = ScalingPlanMade(plan_id=plan_id, plan=made, cut=Cut(), policy_digest="p", core_digest="c")
            self._story.append(TimedFact(fact, now))
        return made

    async def _launch(self) -> None:
        """Make the ordered nodes that do not exist yet."""
        for decision in self.ordered:
            if decision.action_id not in {known.action_id for known in self._state.nodes.values()}:
                carried = dict(decision.labels) | {"topology.kubernetes.io/zone": decision.offer.zone}
                await _add_node(self._user, f"{self._namespace}-{decision.action_id[:8]}", carried)


async def _add_node(user: KubeHttp, name: str, labels: Json) -> None:
    """Make a ready node of the offered instance type, unless it exists."""
    body = node(name, labels=labels)
    amounts = body["status"]["capacity"] | {"cpu": "96", "memory": "1100Gi"}
    await user.send("POST", "/api/v1/nodes", {**body, "status": {"capacity": amounts, "allocatable": amounts}})


def _made(plane: ControlPlane, *objects: Json) -> None:
    for body in objects:
        plane.kubectl("apply", "-f", "-", text=json.dumps(body))


def _queue(plane: ControlPlane, name: str, class_name: str, **parameters: str) -> None:
    """Make a namespace with a LocalQueue, whose ClusterQueue admits by requests of this class."""
    flavor = {"name": "gpus", "resources": [
        {"name": resource, "nominalQuota": amount}
        for resource, amount in (("cpu", 100), ("memory", "1Ti"), ("nvidia.com/gpu", 64))
    ]}  # fmt: skip
    config = {"apiGroup": "kueue.x-k8s.io", "kind": "ProvisioningRequestConfig", "name": name}
    _made(
        plane,
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}},
        _object("ResourceFlavor", "gpus"),
        _object("ProvisioningRequestConfig", name, provisioningClassName=class_name, parameters=parameters,
                managedResources=["nvidia.com/gpu"], retryStrategy=_RETRY),
        _object("AdmissionCheck", name, controllerName="kueue.x-k8s.io/provisioning-request", parameters=config),
        _object("ClusterQueue", name, namespaceSelector={}, admissionChecks=[name], resourceGroups=[
            {"coveredResources": [row["name"] for row in flavor["resources"]], "flavors": [flavor]}  # type: ignore[index]
        ]),
        {**_object("LocalQueue", "queue", clusterQueue=name), "metadata": {"name": "queue", "namespace": name}},
    )  # fmt: skip


def _object(kind: str, name: str, **spec: object) -> Json:
    return {"apiVersion": _KUEUE, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _submit(plane: ControlPlane, namespace: str, **template: object) -> None:
    """Submit a Job of two pods with 8 GPUs each to the queue; `template` adds to their spec."""
    body = job("train", gpus=8, template=template, parallelism=2, completions=2, suspend=True)
    metadata = {"name": "train", "namespace": namespace, "labels": {"kueue.x-k8s.io/queue-name": "queue"}}
    _made(plane, {**body, "metadata": metadata})


async def _conditions(user: KubeHttp, namespace: str) -> dict[str, tuple[str, str]]:
    """Return status and reason of each condition of the last request; empty without one."""
    items = (await user.read(_REQUESTS.format(namespace)))["items"]
    known = items[-1].get("status", {}).get("conditions", []) if items else []
    return {found["type"]: (found["status"], found["reason"]) for found in known}


async def _pods(user: KubeHttp, namespace: str) -> list[Json]:
    return list((await user.read(f"/api/v1/namespaces/{namespace}/pods"))["items"])


async def _check_state(user: KubeHttp, namespace: str) -> tuple[str, str]:
    """Return state and message of the workload's admission check."""
    items = (await user.read(f"/apis/{_KUEUE}/namespaces/{namespace}/workloads"))["items"]
    checks = items[0].get("status", {}).get("admissionChecks", []) if items else []
    return (checks[0]["state"], checks[0].get("message", "")) if checks else ("", "")


async def _run_all(user: KubeHttp, namespace: str) -> bool:
    pods = await _pods(user, namespace)
    return len(pods) == 2 and all(pod["status"]["phase"] == "Running" for pod in pods)


async def test_kueue_admits_a_job_once_its_gang_is_bought(
    plane: ControlPlane, user: KubeHttp, kube: KubeClient
) -> None:
    """Suspended until both nodes are ready; then its pods run on them, and nothing more is bought for the pods."""
    _queue(plane, "atomic", BEST_EFFORT_ATOMIC)
    async with Autoscaler(kube, user, "atomic").running() as autoscaler:
        autoscaler.is_launching = False
        _submit(plane, "atomic")
        ordered = {"Accepted": ("True", "Accepted"), "Provisioned": ("False", "CapacityIsOrdered")}

        async def is_ordered() -> bool:
            return await _conditions(user, "atomic") == ordered

        await until(is_ordered)
        assert len(autoscaler.ordered) == 2
        assert len({decision.gang for decision in autoscaler.ordered}) == 1
        assert await _pods(user, "atomic") == []

        async def shows_when() -> bool:
            state, message = await _check_state(user, "atomic")
            return state == "Pending" and "ordered and not ready yet" in message

        await until(shows_when)
        autoscaler.is_launching = True
        await until(lambda: _run_all(user, "atomic"))
        assert (await _conditions(user, "atomic"))["Provisioned"] == ("True", "CapacityIsProvisioned")
        pods = await _pods(user, "atomic")
        assert len({pod["spec"]["nodeName"] for pod in pods}) == 2
        requests = (await user.read(_REQUESTS.format("atomic")))["items"]
        assert [found["metadata"]["name"] for found in requests] == [
            pods[0]["metadata"]["annotations"]["autoscaling.x-k8s.io/consume-provisioning-request"]
        ]
        await asyncio.sleep(2.0)
        assert len(autoscaler.ordered) == 2


async def test_a_check_admits_what_fits_and_buys_nothing(plane: ControlPlane, user: KubeHttp, kube: KubeClient) -> None:
    """One node of somebody else is not enough; with the second one the job runs."""
    _queue(plane, "check", CHECK_CAPACITY)
    await _add_node(user, "check-1", {})
    async with Autoscaler(kube, user, "check").running() as autoscaler:
        _submit(plane, "check")

        async def is_missing() -> bool:
            return (await _conditions(user, "check")).get("Provisioned") == ("False", "CapacityIsNotFound")

        await until(is_missing)
        assert await _pods(user, "check") == []
        await _add_node(user, "check-2", {})
        await until(lambda: _run_all(user, "check"))
        assert (await _conditions(user, "check"))["Provisioned"] == ("True", "CapacityIsFound")
        assert autoscaler.ordered == []


async def test_pods_to_come_have_their_volume_and_priority(
    plane: ControlPlane, user: KubeHttp, kube: KubeClient
) -> None:
    """Without the claim nothing is bought and the workload says why; then both nodes are bought in its zone."""
    _queue(plane, "volumes", BEST_EFFORT_ATOMIC)
    urgent = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "urgent"}}
    _made(plane, {**urgent, "value": 1000})
    async with Autoscaler(kube, user, "volumes").running() as autoscaler:
        data = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
        _submit(plane, "volumes", volumes=[data], priorityClassName="urgent")

        async def is_missing() -> bool:
            _, message = await _check_state(user, "volumes")
            return "claim volumes/data does not exist" in message

        await until(is_missing)
        assert (await _conditions(user, "volumes"))["Provisioned"] == ("False", "CapacityIsNotFound")
        assert autoscaler.zones == []
        assert 1000 in [pods.priority for pods in autoscaler.pod_sets]
        size = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        amount = {"storage": "1Gi"}
        zone = offer(gpus=8).zone
        affinity = {"required": {"nodeSelectorTerms": [{"matchExpressions": [
            {"key": "topology.kubernetes.io/zone", "operator": "In", "values": [zone]}
        ]}]}}  # fmt: skip
        source = {"csi": {"driver": "disk.example.com", "volumeHandle": "data"}}
        _made(
            plane,
            {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "volumes-data"},
             "spec": {**size, **source, "capacity": amount, "nodeAffinity": affinity}},
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data", "namespace": "volumes"},
             "spec": {**size, "resources": {"requests": amount}, "volumeName": "volumes-data"}},
        )  # fmt: skip

        async def is_provisioned() -> bool:
            return (await _conditions(user, "volumes")).get("Provisioned") == ("True", "CapacityIsProvisioned")

        await until(is_provisioned)
        assert autoscaler.zones == [zone, zone]


async def test_kueue_tries_again_after_a_request_fails(plane: ControlPlane, user: KubeHttp, kube: KubeClient) -> None:
    """One node is allowed, so that the gang of two is never bought; the request is valid for three seconds."""
    _queue(plane, "late", BEST_EFFORT_ATOMIC, ValidUntilSeconds="3")
    async with Autoscaler(kube, user, "late", nodes_count_max=1).running() as autoscaler:
        _submit(plane, "late")

        async def is_retried() -> bool:
            names = [found["metadata"]["name"] for found in (await user.read(_REQUESTS.format("late")))["items"]]
            return any(name.endswith("-late-2") for name in names)

        await until(is_retried)
        assert await _pods(user, "late") == []
        assert autoscaler.zones == []


async def test_one_condition_is_written_and_others_are_kept(
    plane: ControlPlane, user: KubeHttp, kube: KubeClient
) -> None:
    """Written once; of a request that was made again under the name nothing is touched."""
    _made(plane, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "answers"}})
    path = _REQUESTS.format("answers")
    pods = [{"podTemplateRef": {"name": "none"}, "count": 1}]
    spec = {"provisioningClassName": CHECK_CAPACITY, "podSets": pods}
    body = {"apiVersion": "autoscaling.x-k8s.io/v1beta1", "kind": "ProvisioningRequest", "metadata": {"name": "r"}}
    request = await user.made(path, {**body, "spec": spec})
    at = "2026-11-27T10:00:00Z"
    other = {"type": "OfAnother", "status": "Unknown", "reason": "Mine", "message": "m", "lastTransitionTime": at}
    await user.patched(f"{path}/r/status", {"status": {"conditions": [other]}}, MERGE)
    decision = AnswerProvisioningRequest(
        action_id=ActionId("a"), retry_at=Clock().now(), request_uid=request["metadata"]["uid"], namespace="answers",
        name="r", condition="Failed", is_true=True, code="Expired", at=Clock().now(),
        reason=RequestExpired(valid_seconds=60.0),
    )  # fmt: skip
    await RequestAnswers(kube).write(msgspec.structs.replace(decision, request_uid="of-another"))
    assert await _conditions(user, "answers") == {"OfAnother": ("Unknown", "Mine")}
    await RequestAnswers(kube).write(decision)
    assert await _conditions(user, "answers") == {"OfAnother": ("Unknown", "Mine"), "Failed": ("True", "Expired")}
    written = await user.read(f"{path}/r")
    assert written["status"]["conditions"][0] == other
    await RequestAnswers(kube).write(decision)
    assert (await user.read(f"{path}/r"))["metadata"]["resourceVersion"] == written["metadata"]["resourceVersion"]

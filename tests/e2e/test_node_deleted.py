"""`kubectl delete node` on our nodes on a real control plane: drained, terminated, then deleted."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from tests.controlplane.plane import EVERYTHING, ControlPlane, running_plane
from tests.e2e.test_kubernetes import POLICY, placed, real_cluster
from tests.support.cluster import until
from tests.support.kube_http import Json, KubeHttp
from tests.support.kube_objects import budget, pod
from tests.support.running import Running

from gpu_autoscaler.events.scaling import ScalingDrainStarted, ScalingNodeTerminated, ScalingPodEvicted
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.labels import TERMINATION_FINALIZER
from gpu_autoscaler_services.demo.record import Record

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.sweep, pytest.mark.timeout(400)]

OURS = "ours"
AUDIT = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Request
  users: [ours]
  verbs: [create, delete, patch]
  resources: [{group: "", resources: [pods, pods/eviction, nodes]}]
- level: None
"""
DRAIN_SECONDS = 40.0  # an evicted pod runs elsewhere by then, also on a busy machine
GRACE_SECONDS = 5.0  # of `kube_objects.pod`
KEPT = "example.com/kept"  # a finalizer that keeps an ended pod for `kubectl describe`
PODS, NODES = "/api/v1/namespaces/default/pods", "/api/v1/nodes"


def account(plane: ControlPlane) -> Path:
    """The kubeconfig of our services, so that the audit log distinguishes them from Kubernetes."""
    certificate, key = plane.authority.client(OURS)
    plane.kubectl("create", "clusterrolebinding", OURS, "--clusterrole=cluster-admin", f"--user={OURS}")
    return plane.kubeconfig(OURS, {"client-certificate": str(certificate), "client-key": str(key)})


def deployment(app: str, *, replicas: int, finalizers: Sequence[str]) -> Json:
    """Replicas with two GPUs each: two of them fill the smallest feasible machine."""
    template = pod(app, gpus=2, labels={"app": app}, nodeSelector={"gpu-autoscaler.io/gpu-model": "T4"})
    template["spec"]["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": app},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": app}},
            "template": {
                "metadata": {"labels": {"app": app}, "finalizers": list(finalizers)},
                "spec": template["spec"],
            },
        },
    }


class Deleting:
    """A cluster in which nodes are deleted by a user, with the audit log of our account."""

    def __init__(self, plane: ControlPlane, cluster: Running, kube: KubeHttp, audit: Path) -> None:
        self.plane, self.cluster, self.kube = plane, cluster, kube
        self._audit = audit

    async def runs(self, app: str, *, replicas: int, budgeted: Json, finalizers: Sequence[str] = ()) -> str:
        """Run a user's work with a PodDisruptionBudget until it runs on a node of ours; return the node."""
        await self.kube.made("/apis/policy/v1/namespaces/default/poddisruptionbudgets", budget(app, app, **budgeted))
        body = deployment(app, replicas=replicas, finalizers=finalizers)
        await self.kube.made("/apis/apps/v1/namespaces/default/deployments", body)
        of_app = f"{PODS}?labelSelector=app%3D{app}"
        where = placed(await self.kube.until(of_app, lambda answer: len(placed(answer)) == replicas, 90.0))
        (name,) = set(where.values())
        path = f"{NODES}/{name}"
        await self.kube.until(path, lambda node: TERMINATION_FINALIZER in node["metadata"].get("finalizers", ()), 60.0)
        return name

    async def is_over(self, name: str) -> None:
        """Wait until the node object is gone; its instance is terminated by then."""
        await self.kube.until(f"{NODES}/{name}", lambda node: node == {}, 120.0)
        started = self.drain_of(name)
        assert not started.is_voluntary
        assert started.provider_id not in (await self.cluster.world.truth()).instances_left
        await self.cluster.until(lambda record: started.provider_id in ended(record), "its end on record")
        assert ended(self.cluster.record).count(started.provider_id) == 1

    def drain_of(self, name: str) -> ScalingDrainStarted:
        """Return the drain of this node."""
        (found,) = (fact for fact, _ in self.cluster.record.of(ScalingDrainStarted) if fact.node_name == name)
        return found

    async def described(self, kind: str, name: str, words: str) -> str:
        """Return the output of `kubectl describe` once it contains the text."""
        told = self.plane.kubectl("describe", kind, name)
        return told if words in told else ""

    def written(self, verb: str, resource: str, begin: str) -> list[Json]:
        """Return audited requests of our account for objects with this name prefix, in order."""
        asked = [json.loads(line) for line in self._audit.read_text().splitlines()]
        return [one for one in asked if one["verb"] == verb and _is_about(one["objectRef"], resource, begin)]

    def answers(self, verb: str, resource: str, begin: str) -> list[int]:
        """Return the response codes."""
        return [one["responseStatus"]["code"] for one in self.written(verb, resource, begin)]


def ended(record: Record) -> list[ProviderId | None]:
    """Return instances recorded as terminated."""
    return [fact.provider_id for fact, _ in record.of(ScalingNodeTerminated)]


def _is_about(reference: Json, resource: str, begin: str) -> bool:
    asked = "/".join(filter(None, (reference["resource"], reference.get("subresource"))))
    return asked == resource and reference.get("name", "").startswith(begin)


@asynccontextmanager
async def deleting(folder: Path) -> AsyncIterator[Deleting]:
    """The whole system on a control plane with an audit log of its writes."""
    audit = folder / "audit.log"
    (folder / "audit.yaml").write_text(AUDIT)
    settings = [f"--audit-log-path={audit}", f"--audit-policy-file={folder / 'audit.yaml'}"]
    policy = POLICY + f"drain_seconds_max = {DRAIN_SECONDS}\nnotice_seconds_default = 10.0\n"
    with running_plane(folder / "plane", EVERYTHING, api_settings=settings) as plane:
        async with real_cluster(folder, plane, account(plane), policy_text=policy) as (cluster, kube):
            yield Deleting(plane, cluster, kube, audit)


async def test_a_node_deleted_by_a_user_is_drained_and_terminated(tmp_path: Path) -> None:
    """A PodDisruptionBudget orders evictions; one that never allows any is overridden at the deadline."""
    async with deleting(tmp_path) as here:
        await within_a_budget(here)
        await under_a_budget_that_never_allows(here)


async def within_a_budget(here: Deleting) -> None:
    """One at a time: the second pod is evicted when the first runs elsewhere."""
    name = await here.runs("spare", replicas=2, budgeted={"minAvailable": 1})
    assert "deleted" in here.plane.kubectl("delete", "node", name, "--wait=false")
    await here.is_over(name)
    of_app = f"{PODS}?labelSelector=app%3Dspare"
    after = placed(await here.kube.until(of_app, lambda answer: len(placed(answer)) == 2, 60.0))
    assert name not in after.values()
    answers = here.answers("create", "pods/eviction", "spare-")
    assert answers.count(201) == 2
    assert 429 in answers[answers.index(201) :], "the second one waited for the budget"
    assert here.written("delete", "pods", "spare-") == []


async def under_a_budget_that_never_allows(here: Deleting) -> None:
    """Blocked until the hard deadline, then deleted with minimal grace; `kubectl describe` shows it."""
    name = await here.runs("guarded", replicas=1, budgeted={"maxUnavailable": 0}, finalizers=[KEPT])
    here.plane.kubectl("delete", "node", name, "--wait=false")
    told = await until(lambda: here.described("node", name, "FailedDraining"), 60.0)
    assert "disruption budget default/guarded allows no disruption" in told
    assert "ScaleDownTriggered" in told
    await here.is_over(name)

    assert set(here.answers("create", "pods/eviction", "guarded-")) == {429}
    (forced,) = here.written("delete", "pods", "guarded-")
    assert forced["requestObject"]["gracePeriodSeconds"] >= 1
    facts = (fact for fact, _ in here.cluster.record.of(ScalingPodEvicted))
    assert [fact.is_forced for fact in facts if fact.pod.startswith("default/guarded-")] == [True]
    waited_for = here.drain_of(name).deadline_at - datetime.fromisoformat(forced["requestReceivedTimestamp"])
    assert waited_for <= timedelta(seconds=GRACE_SECONDS + 1), (
        "forced only when the remaining time equals its grace period"
    )

    evicted = forced["objectRef"]["name"]
    told = await until(lambda: here.described("pod", evicted, "Evicted"), 60.0)
    assert "ScaleUpTriggered" in told
    assert "Deleted, because its eviction was not allowed in time," in told
    assert f"node {name} is removed" in told
    assert "The node object was deleted at " in told
    here.plane.kubectl("patch", "pod", evicted, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')

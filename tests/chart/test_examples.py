"""The files in `examples/`: a real API server accepts each, and our watchers read it as documented."""

import json
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
from tests.chart.charting import ROOT, Json, objects
from tests.controlplane.plane import ControlPlane, running_plane
from tests.support.kube_http import KubeHttp
from tests.support.kube_objects import pod
from tests.support.kube_policies import defined

from gpu_autoscaler.core.demand.sources import group_of
from gpu_autoscaler.core.disruption.protection import can_save
from gpu_autoscaler.core.policy.documents import resolve_documents
from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.kube.protocol import PODS, POLICIES
from gpu_autoscaler.kube.translate.pod import pod_observed
from gpu_autoscaler.kube.translate.policy import document, spec_of
from gpu_autoscaler.model import labels

pytestmark = [pytest.mark.slow, pytest.mark.integration]

EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.yaml"))}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A cluster without nodes: pods stay pending."""
    where = tmp_path_factory.mktemp("plane")
    with running_plane(where, ("kube-controller-manager", "kube-scheduler"), with_service_accounts=True) as plane:
        yield plane


@pytest.fixture
async def kube(plane: ControlPlane) -> AsyncIterator[KubeHttp]:
    """A client of a user."""
    async with aiohttp.ClientSession() as session:
        yield KubeHttp(session, plane.url, plane.admin_token, plane.tls)


async def applied(plane: ControlPlane, kube: KubeHttp, example: str) -> str:
    """Apply an example in a new namespace; return the namespace."""
    plane.kubectl("create", "namespace", example)
    await kube.until(f"/api/v1/namespaces/{example}/serviceaccounts/default", bool)
    told = plane.kubectl("apply", "--validate=strict", "--namespace", example, "--filename", str(EXAMPLES[example]))
    assert len(told.splitlines()) == len(objects(EXAMPLES[example].read_text(encoding="utf-8")))
    return example


async def waiting(kube: KubeHttp, namespace: str, count: int) -> list[tuple[Json, PodObserved]]:
    """Return its pods as objects and as facts, once the scheduler reports all of them unschedulable."""

    def all_wait(answer: Json) -> bool:
        items = answer.get("items", ())
        return len(items) == count and all("conditions" in item["status"] for item in items)

    found = (await kube.until(f"/api/v1/namespaces/{namespace}/pods", all_wait, 60.0))["items"]
    return [(item, pod_observed(PODS.decode(json.dumps(item).encode(), "list"), epoch=1)) for item in found]


def test_each_example_is_documented() -> None:
    """The README names every file, and no other."""
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")} == {
        path.name for path in EXAMPLES.values()
    }


async def test_a_training_job(plane: ControlPlane, kube: KubeHttp) -> None:
    """A pod with eight GPUs of one model, which can save checkpoints, and whose account may annotate it."""
    namespace = await applied(plane, kube, "training-job")
    ((item, seen),) = await waiting(kube, namespace, 1)
    assert seen.unschedulable_since is not None
    assert (seen.requests.gpu_count, seen.gpu_model) == (8, "A100")
    assert can_save(item["metadata"]["annotations"])
    assert dict(seen.annotations)[labels.EVICTION_PRIORITY] == "high"
    may = ("auth", "can-i", "patch", "pods", "--namespace", namespace)
    assert plane.kubectl(*may, f"--as=system:serviceaccount:{namespace}:finetune").strip() == "yes"


async def test_a_gang(plane: ControlPlane, kube: KubeHttp) -> None:
    """Four pods of a group with a minimum, and stable names."""
    namespace = await applied(plane, kube, "gang")
    found = await waiting(kube, namespace, 4)
    assert len({group_of(seen) for _, seen in found}) == 1
    assert all(group_of(seen) for _, seen in found)
    for _, seen in found:
        assert dict(seen.labels)[labels.POD_GROUP_MIN_AVAILABLE[0]] == "4"
        assert dict(seen.annotations)[labels.GANG_WITHIN[0]] == labels.ZONE
    assert {item["spec"]["hostname"] for item, _ in found} == {f"gang-{number}" for number in range(4)}


async def test_inference(plane: ControlPlane, kube: KubeHttp) -> None:
    """At least two replicas, scaled by GPU and CPU utilization, with at most one unavailable."""
    namespace = await applied(plane, kube, "inference")
    found = await waiting(kube, namespace, 2)  # the minimum, without a metric
    assert all(seen.requests.gpu_count == 1 for _, seen in found)
    path = f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers/inference"
    spec = (await kube.read(path))["spec"]
    by_gpu, by_cpu = spec["metrics"]
    assert by_gpu["pods"]["metric"]["name"] == "DCGM_FI_DEV_GPU_UTIL"
    assert by_gpu["pods"]["target"]["averageValue"] == "70"
    assert by_cpu["resource"]["target"]["averageUtilization"] == 50
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 10)


async def test_a_slice(plane: ControlPlane, kube: KubeHttp) -> None:
    """A MIG slice is requested by its resource name, and the interactive pod is protected."""
    namespace = await applied(plane, kube, "mig-pod")
    ((item, seen),) = await waiting(kube, namespace, 1)
    assert dict(seen.requests.slices) == {"nvidia.com/mig-1g.10gb": 1}
    assert seen.requests.gpu_count == 0
    assert item["metadata"]["annotations"][labels.DO_NOT_DISRUPT] == "true"


async def test_a_budget(plane: ControlPlane, kube: KubeHttp) -> None:
    """It selects training pods by label; with two of them, no eviction is allowed."""
    namespace = await applied(plane, kube, "budget")
    for number in range(2):
        one = pod(f"train-{number}", labels={"workload-type": "training"})
        await kube.made(f"/api/v1/namespaces/{namespace}/pods", one)
    path = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets/training"
    counted = await kube.until(path, lambda body: body.get("status", {}).get("expectedPods") == 2)
    assert (counted["status"]["desiredHealthy"], counted["status"]["disruptionsAllowed"]) == (2, 0)


async def test_a_quota(plane: ControlPlane, kube: KubeHttp) -> None:
    """Sixteen GPUs and no more; containers without CPU requests get the default."""
    namespace = await applied(plane, kube, "quota")
    quota = f"/api/v1/namespaces/{namespace}/resourcequotas/gpus"
    await kube.until(quota, lambda body: body.get("status", {}).get("used"))
    pods = f"/api/v1/namespaces/{namespace}/pods"
    gpus = {"limits": {"nvidia.com/gpu": "8"}}
    plain = {"spec": {"containers": [{"name": "main", "image": "registry.example/train:1", "resources": gpus}]}}
    for number in range(2):
        made = await kube.made(pods, {"metadata": {"name": f"eight-{number}"}} | plain)
        assert made["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "4"
    refused = await kube.send("POST", pods, {"metadata": {"name": "eight-2"}} | plain)
    assert refused.status == 403
    assert "exceeded quota: gpus, requested: requests.nvidia.com/gpu=8" in refused.body["message"]


async def test_a_policy(plane: ControlPlane, kube: KubeHttp) -> None:
    """The server's validation accepts it, and ours accepts it with the default policy."""
    defined(plane)
    plane.kubectl("apply", "--validate=strict", "--filename", str(EXAMPLES["autoscaling-policy"]))
    found = POLICIES.decode(json.dumps(await kube.read(POLICIES.path(name="research"))).encode(), "get")
    judgment = resolve_documents([document(found, spec_of(found), 1)], (), DEFAULT_POLICY, "aws")
    assert judgment.rejected == {}
    assert [each.name for each in judgment.accepted] == ["research"]


async def test_a_tenant(plane: ControlPlane, kube: KubeHttp) -> None:
    """Ingress and egress by the label `gpu-tenant`. Enforcement needs a network plugin and is not tested."""
    namespace = await applied(plane, kube, "tenant-network")
    path = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies/tenant-research"
    spec = (await kube.read(path))["spec"]
    assert spec["podSelector"] == {"matchLabels": {"gpu-tenant": "research"}}
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    inside = {"matchLabels": {"gpu-tenant": "research"}}
    assert spec["ingress"][0]["from"] == [{"podSelector": inside}, {"namespaceSelector": inside}]
    assert spec["egress"][0]["to"] == spec["ingress"][0]["from"]

"""Every service under its own account of the chart: the whole scenario, no refusal, and no unused permission."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from tests.chart.charting import NAMESPACE, tool
from tests.controlplane.plane import EVERYTHING, ControlPlane, running_plane
from tests.e2e.test_kubernetes import play, real_cluster
from tests.support.bound_tokens import ACCOUNT, give_account, instance_of, watched_node
from tests.support.idle_workloads import KINDS, announce_and_end
from tests.support.kube_http import KubeHttp
from tests.support.kube_objects import job, node, pod
from tests.support.kube_policies import policy
from tests.support.service_accounts import account, audit_settings, give_accounts, granted, seen

from gpu_autoscaler.core.explain.kube_events import Announcement
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import from_kubeconfig
from gpu_autoscaler.kube.event_recorder import EventRecorder
from gpu_autoscaler.kube.protocol import JOBS, NODES, PODS, POLICIES, NotFound
from gpu_autoscaler.kube.wire import policy as wire_policy
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.labels import ACTION_ID, JOB_ID
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.api_rights import FREEZE
from gpu_autoscaler_services.gateway.access import AccessReviews
from gpu_autoscaler_services.gateway.auth import TokenReviews
from gpu_autoscaler_services.node_gateway.admission import Admission
from gpu_autoscaler_services.registry import services
from gpu_autoscaler_services.scheduler.binder import Binder

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]

PODS_PATH, JOBS_PATH = "/api/v1/namespaces/default/pods", "/apis/batch/v1/namespaces/default/jobs"

# Kinds of other projects that are not installed here.
OTHERS = {
    ("jobsets", "jobset.x-k8s.io"),
    ("pytorchjobs", "kubeflow.org"),
    ("rayjobs", "ray.io"),
    ("jobs", "batch.volcano.sh"),
}
_WATCHED = {("list", wire_policy.PLURAL, wire_policy.GROUP), ("watch", wire_policy.PLURAL, wire_policy.GROUP)}
# Of the ends of idle workloads; a JobSet is not installed here.
_IDLE_WORKLOADS = {
    ("get", "pods", ""),
    ("get", "jobs", "batch"),
    ("delete", "jobs", "batch"),
    ("get", "jobsets", "jobset.x-k8s.io"),
    ("delete", "jobsets", "jobset.x-k8s.io"),
    *((verb, kind, "apps") for verb in ("get", "patch") for kind in ("deployments", "replicasets", "statefulsets")),
}
# Permissions that the scenario does not use. Tests below use them where possible.
NOT_PLAYED = {
    "pod_watcher": {  # of kinds that are not installed here
        ("watch", "podgroups", "scheduling.x-k8s.io"),
        ("watch", "podgroups", "scheduling.volcano.sh"),
        *(("watch", resource, group) for resource, group in OTHERS),
    },
    "announcer": {("get", "events", ""), ("patch", "events", "")},  # a repeated Event
    "policy_watcher": granted("policy_watcher") - _WATCHED,  # the scenario has no AutoscalingPolicy
    "scaler": {  # only at a deadline, and with a mirrored Lease (tests/integration/kube)
        ("delete", "pods", ""),
        ("delete", "nodes", ""),  # only without a cloud controller
        ("list", "nodes", ""),  # only before terminating an instance with an unknown node
        ("patch", "pods/status", ""),
        *_IDLE_WORKLOADS,
        *((verb, "leases", "coordination.k8s.io") for verb in ("create", "get", "patch")),
    },
    "scheduler": {  # preempted jobs, gangs, and kinds of other projects (tests/integration/kube)
        ("delete", "jobs", "batch"),
        ("patch", "pods", ""),
        ("list", "pods", ""),
        ("create", "services", ""),
        ("get", "persistentvolumeclaims", ""),
        ("get", "persistentvolumes", ""),
        ("get", "storageclasses", "storage.k8s.io"),
        *((verb, *kind) for verb in ("create", "get", "patch", "delete") for kind in OTHERS),
    },
    "gateway": granted("gateway"),  # only with token review
    "node_gateway": granted("node_gateway"),  # not in the scenario: no node has a watcher
}
# One call per service that it does not need: method, path, body.
REFUSED = {
    "pod_watcher": ("PATCH", "/api/v1/nodes/n", {"spec": {"unschedulable": True}}),
    "dcgm_ingest": ("GET", "/api/v1/nodes", None),
    "spot_watcher": ("GET", "/api/v1/nodes", None),
    "node_gateway": ("GET", "/api/v1/nodes", None),  # all of them; it reads one at a time
    "scheduler": ("POST", "/apis/batch/v1/namespaces/kube-system/jobs", job("j")),
    "scaler": ("POST", "/api/v1/nodes", node("n")),
    "shadow": ("GET", "/api/v1/namespaces/kube-system", None),
    "announcer": ("DELETE", f"{PODS_PATH}/p", None),
    "policy_watcher": ("DELETE", "/apis/gpu-autoscaler.io/v1alpha1/autoscalingpolicies/p", None),
    "cost_tracker": ("GET", "/api/v1/pods", None),
    "gateway": ("POST", JOBS_PATH, job("j")),
}
SECRETS = "/api/v1/secrets"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The audit log."""
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[ControlPlane]:
    """A control plane with service accounts."""
    tool("helm")
    settings = audit_settings(folder)
    where = tmp_path_factory.mktemp("plane")
    with running_plane(where, EVERYTHING, with_service_accounts=True, api_settings=settings) as plane:
        yield plane


@pytest.fixture(scope="module")
def kubeconfigs(plane: ControlPlane) -> Mapping[str, Path]:
    """The chart's accounts."""
    return give_accounts(plane)


@asynccontextmanager
async def acting_as(kubeconfig: Path) -> AsyncIterator[KubeClient]:
    """A client with a service's account."""
    client = KubeClient(from_kubeconfig(str(kubeconfig)), now=Clock().now)
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def everybody_else(plane: ControlPlane) -> AsyncIterator[KubeHttp]:
    """Users, as the administrator."""
    async with aiohttp.ClientSession() as session:
        yield KubeHttp(session, plane.url, plane.admin_token, plane.tls)


async def test_the_scenario_with_the_permissions_of_the_chart(
    tmp_path: Path, folder: Path, plane: ControlPlane, kubeconfigs: Mapping[str, Path]
) -> None:
    """No call is refused, and no permission is unused."""
    async with real_cluster(tmp_path, plane, kubeconfigs) as (cluster, kube):
        await play(cluster, kube)
    for service in services():
        told = seen(folder, service.name)
        assert told.refused == set(), service.name
        unused = granted(service.name) - told.calls
        assert unused <= NOT_PLAYED.get(service.name, set()), f"{service.name} has rights that it does not use"


async def test_the_scaler_may_delete_pods_late(plane: ControlPlane, kubeconfigs: Mapping[str, Path]) -> None:
    """Annotated, then deleted."""
    async with everybody_else(plane) as users, acting_as(kubeconfigs["scaler"]) as kube:
        await users.made(PODS_PATH, pod("late", nodeName="somewhere"))
        late = PODS.decode((await _raw(users, f"{PODS_PATH}/late")), "get")
        assert await kube.delete_pod(late, grace_seconds=1)


async def test_the_gateway_may_read_logs(plane: ControlPlane, kubeconfigs: Mapping[str, Path]) -> None:
    """It finds the pods of a job, and asks for a log: not refused, but the node that would have it does not exist."""
    async with everybody_else(plane) as users, acting_as(kubeconfigs["gateway"]) as kube:
        await users.made(PODS_PATH, pod("talks", labels={JOB_ID: "j1"}, nodeName="nowhere"))
        (found,) = await kube.list_all(PODS, {"labelSelector": f"{JOB_ID}=j1"})
        assert found.metadata.name == "talks"
        with pytest.raises(NotFound, match="nowhere"):
            await kube.open_log("default", "talks", {}, read_seconds_max=10)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_scaler_may_end_an_idle_workload(
    plane: ControlPlane, kubeconfigs: Mapping[str, Path], kind: str
) -> None:
    """Through its owner, whatever that is."""
    async with everybody_else(plane) as users, acting_as(kubeconfigs["scaler"]) as kube:
        await announce_and_end(users, kube, kind)


async def test_the_scaler_may_remove_a_node(plane: ControlPlane, kubeconfigs: Mapping[str, Path]) -> None:
    """Read, then deleted with its resource version."""
    async with everybody_else(plane) as users, acting_as(kubeconfigs["scaler"]) as kube:
        await users.made("/api/v1/nodes", node("left"))
        async with asyncio.timeout(60):
            while not await kube.delete_node(await kube.get(NODES, "", "left")):  # controllers write it as well
                await asyncio.sleep(0.1)
        await users.until("/api/v1/nodes/left", lambda body: not body)


async def test_the_scaler_may_find_the_node_of_a_released_instance(
    plane: ControlPlane, kubeconfigs: Mapping[str, Path]
) -> None:
    """By the label with the order's action id."""
    async with everybody_else(plane) as users, acting_as(kubeconfigs["scaler"]) as kube:
        await users.made("/api/v1/nodes", node("came-up", labels={ACTION_ID: "a"}))
        assert [one.metadata.name for one in await kube.nodes_labeled(f"{ACTION_ID}=a")] == ["came-up"]


async def test_the_scheduler_may_preempt_a_job(plane: ControlPlane, kubeconfigs: Mapping[str, Path]) -> None:
    """It requests checkpoints of the pods and deletes the Job."""
    async with everybody_else(plane) as users, acting_as(kubeconfigs["scheduler"]) as kube:
        await users.made("/api/v1/nodes", node("there"))
        await users.made(PODS_PATH, pod("work", nodeName="there"))
        (work,) = await kube.pods_on("there")
        assert await kube.annotate_pod(work, {"gpu-autoscaler.io/checkpoint-requested": "now"})
        made = await kube.make(JOBS, "default", job("taken-back"))
        assert await kube.remove(JOBS, made)
        await users.until(f"{JOBS_PATH}/taken-back", lambda body: not body)


async def test_the_scheduler_may_read_the_volumes_of_templates(
    plane: ControlPlane, kubeconfigs: Mapping[str, Path]
) -> None:
    """A bound claim and its volume, an unbound one and its class; claims of other namespaces are refused."""
    zone = {"key": "topology.kubernetes.io/zone", "values": ["zone-a"]}
    storage_class = {
        "metadata": {"name": "late"},
        "provisioner": "disk.example",
        "volumeBindingMode": "WaitForFirstConsumer",
        "allowedTopologies": [{"matchLabelExpressions": [zone]}],
    }
    size = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    volumes = [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in ("bound", "unbound")]
    async with everybody_else(plane) as users, acting_as(kubeconfigs["scheduler"]) as kube:
        await users.made("/apis/storage.k8s.io/v1/storageclasses", storage_class)
        for name, spec in (("bound", {"volumeName": "none"}), ("unbound", {})):
            claim = {"metadata": {"name": name}, "spec": {**size, "storageClassName": "late", **spec}}
            await users.made("/api/v1/namespaces/default/persistentvolumeclaims", claim)
        template = {"spec": {"containers": [], "volumes": volumes}}
        assert (await Binder(kube, "default").volumes(template)).problem.endswith("volume none does not exist")
        ((term,),) = (await Binder(kube, "default").volumes({"spec": {"volumes": volumes[1:]}})).alternatives
        assert term.requirements[0].values == ("zone-a",)
        with pytest.raises(PermanentError, match="403"):
            await Binder(kube, "kube-system").volumes(template)


@pytest.mark.parametrize("service", ["announcer", "policy_watcher"])
async def test_an_event_may_be_repeated(plane: ControlPlane, kubeconfigs: Mapping[str, Path], service: str) -> None:
    """A repeated announcement increments the count of one Event."""
    reason = f"Waits{len(service)}"
    announcement = Announcement(
        kind="Pod", namespace="default", name="p", uid=service, reason=reason, message="still", is_warning=False
    )
    async with everybody_else(plane) as users, acting_as(kubeconfigs[service]) as kube:
        for _ in range(2):
            await EventRecorder(kube).record(announcement, Clock().now())
        events = await users.read(f"/api/v1/namespaces/default/events?fieldSelector=reason%3D{reason}")
    assert [event["count"] for event in events["items"]] == [2]


async def test_the_policy_watcher_may_write_status(plane: ControlPlane, kubeconfigs: Mapping[str, Path]) -> None:
    """It writes the status of a policy and reads only its CRD."""
    plane.kubectl("apply", "--filename", "-", text=json.dumps(policy("answered", enabled=False)))
    path = f"{POLICIES.path(name='answered')}/status"
    async with acting_as(kubeconfigs["policy_watcher"]) as kube:
        assert (await kube.cluster()).installation
        await kube.patch(path, {"status": {"nodes": 3}})
        assert (await kube.read(wire_policy.DEFINITION_PATH))["metadata"]["name"] == wire_policy.DEFINITION
        with pytest.raises(PermanentError, match="403"):
            await kube.read("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/others.example")
        with pytest.raises(PermanentError, match="403"):
            await kube.patch(POLICIES.path(name="answered"), {"spec": {"enabled": True}})
    plane.kubectl("delete", "autoscalingpolicy", "answered")


async def test_the_gateway_may_review_tokens(plane: ControlPlane, kubeconfigs: Mapping[str, Path]) -> None:
    """TokenReview identifies the owner; SubjectAccessReview checks rights, the single right of 0.2 among them."""
    plane.kubectl("create", "serviceaccount", "alice")
    token = plane.kubectl("create", "token", "alice").strip()
    async with acting_as(kubeconfigs["gateway"]) as kube:
        assert (await kube.cluster()).installation
        caller = await TokenReviews(kube).caller(token)
        assert caller is not None
        assert caller.name == "system:serviceaccount:default:alice"
        assert not await AccessReviews(kube).allows(caller, FREEZE, "default"), "nothing was granted yet"
        role = ("--clusterrole=gpu-autoscaler-jobs-edit", "--serviceaccount=default:alice")
        plane.kubectl("create", "clusterrolebinding", "alice", *role)
        async with asyncio.timeout(60):
            while not await AccessReviews(kube).allows(caller, FREEZE, "default"):
                await asyncio.sleep(0.1)


async def test_the_node_gateway_may_find_the_instance_of_a_watcher(
    plane: ControlPlane, kubeconfigs: Mapping[str, Path]
) -> None:
    """It reviews the token of the watcher's pod and reads its node."""
    async with acting_as(plane.kubeconfig()) as admin, acting_as(kubeconfigs["node_gateway"]) as kube:
        await give_account(admin)
        token = await watched_node(admin, "watched")
        assert await Admission(kube, account=ACCOUNT).instance_of(token) == instance_of("watched")


@pytest.mark.parametrize("service", [service.name for service in services()])
async def test_a_service_is_refused_what_it_does_not_need(
    plane: ControlPlane, kubeconfigs: Mapping[str, Path], service: str
) -> None:
    """403 for calls of other services and for secrets."""
    token = plane.kubectl("create", "token", account(service), "--namespace", NAMESPACE).strip()
    assert kubeconfigs[service].is_file()
    async with everybody_else(plane) as users:
        method, path, body = REFUSED[service]
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        refused = await users.send(method, path, body, content_type=kind, token=token)
        assert (refused.status, refused.body["reason"]) == (403, "Forbidden")
        assert (await users.send("GET", SECRETS, token=token)).status == 403


async def _raw(users: KubeHttp, path: str) -> bytes:
    return json.dumps(await users.read(path)).encode()

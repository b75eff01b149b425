"""Projects in namespaces of their own, on a real API server with its controllers, with the accounts of the chart.

The account has no right beyond those of the chart, so each call that it makes here is granted by them.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.chart.charting import NAMESPACE, tool
from tests.controlplane.plane import ControlPlane, Part, needed_programs, running_plane
from tests.support.kube_http import KubeHttp
from tests.support.service_accounts import give_accounts
from tests.support.stories import TimedFact, given, node, policy, record, request

from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished, JobPlaced, JobQueued
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import from_kubeconfig
from gpu_autoscaler.kube.protocol import PODS, QUOTAS
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import JobId, NodeUid
from gpu_autoscaler.model.jobs import GpuRequirements
from gpu_autoscaler.model.reasons.defer import ResourceQuotaExceeded
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.pod_watcher.service import PodWatcher
from gpu_autoscaler_services.scheduler.binder import Binder
from gpu_autoscaler_services.scheduler.service import Scheduler

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]

CONTROLLERS: tuple[Part, ...] = ("kube-controller-manager",)
GPUS = "requests.nvidia.com/gpu"
VALUES = (
    "jobs.namespaceTemplate=gpu-{project}",
    "jobs.projects.mapped.namespace=team-m",
    "jobs.projects.lost.namespace=team-l",
    "jobs.watchQuotas=true",
)


def tenancy(gpus: str = "2") -> ScalingPolicy:
    """The policy of the values, with this many GPUs in each namespace."""
    projects = [
        {"name": "research", "cost_center": "cc-42"},
        {"name": "mapped", "namespace": "team-m"},
        {"name": "lost", "namespace": "team-l"},
    ]
    return policy(
        tenancy={
            "namespace_template": "gpu-{project}",
            "quota": {GPUS: gpus},
            "admitted_namespaces": [NAMESPACE],
            "priority_class_prefix": "gpu-autoscaler",
            "projects": projects,
        }
    )


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A control plane with the controllers of Jobs and quotas, and with service accounts."""
    needed_programs(), tool("helm")
    with (
        tempfile.TemporaryDirectory(prefix="plane-") as folder,
        running_plane(Path(folder), CONTROLLERS, with_service_accounts=True) as running,
    ):
        running.kubectl("create", "namespace", "team-m")
        running.kubectl("create", "namespace", "team-l")  # where the chart makes a Role; deleted below
        running.kubectl("create", "priorityclass", "gpu-autoscaler-medium", "--value=500")
        yield running


@pytest.fixture(scope="module")
def kubeconfigs(plane: ControlPlane) -> Any:  # noqa: ANN401 - a mapping of paths
    """The chart's accounts."""
    return give_accounts(plane, "cluster", *VALUES)


@pytest.fixture
async def outside(plane: ControlPlane) -> AsyncIterator[KubeHttp]:
    """Users, as the administrator."""
    async with aiohttp.ClientSession() as session:
        yield KubeHttp(session, plane.url, plane.admin_token, plane.tls)


class Team:
    """A scheduler with its own account, store and state."""

    def __init__(self, kube: KubeClient, store: SqliteStore) -> None:
        self.view = StateView()
        self.facts: list[TimedFact] = []
        self.scheduler = Scheduler(self.view, tenancy(), store, Binder(kube, "default"), Clock().now)

    async def handle(self, fact: Fact) -> tuple[Fact, ...]:
        """Fold the fact, pass it on, and return what follows."""
        at = Clock().now()
        self.facts.append(TimedFact(fact, at))
        self.view.advance(given(node("n1"), tuple(self.facts), as_of=at), {})
        (recorded,) = record([TimedFact(fact, at)])
        outcome = await self.scheduler.on_fact(recorded)
        return outcome.facts if isinstance(outcome, Outcome) else tuple(outcome)

    async def queue(self, name: str, project: str, *, gpus: int = 1) -> tuple[JobQueued, tuple[Fact, ...]]:
        """Submit a job; return its acceptance, and what follows from that."""
        wanted = GpuRequirements(gpu_count=gpus)
        (queued,) = await self.handle(request(name, project_id=project, gpu_requirements=wanted))
        assert isinstance(queued, JobQueued), queued
        return queued, await self.handle(queued)

    async def release(self, name: str) -> None:
        """Place the job on the node."""
        placed = JobPlaced(
            job_id=JobId(name), attempt=1, node_uids=(NodeUid("uid-n1"),), node_names=("n1",), placed_at=Clock().now()
        )
        assert await self.handle(placed) == ()


@pytest.fixture
async def team(kubeconfigs: Any, tmp_path: Path) -> AsyncIterator[Team]:  # noqa: ANN401 - a mapping of paths
    """A scheduler with the chart's account."""
    kube = KubeClient(from_kubeconfig(str(kubeconfigs["scheduler"])), now=Clock().now)
    store = await SqliteStore.open(tmp_path / "store.db")
    yield Team(kube, store)
    await store.close()
    await kube.close()


def of(namespace: str, resource: str, name: str = "", group: str = "") -> str:
    """A path of the API."""
    api = f"/apis/{group}/v1" if group else "/api/v1"
    return f"{api}/namespaces/{namespace}/{resource}" + (f"/{name}" if name else "")


async def wait_reason(team: Team, kubeconfig: Path, name: str) -> object:
    """Return why the job waits by the facts of a pod watcher, with its own account, about pods and quotas."""
    kube = KubeClient(from_kubeconfig(str(kubeconfig)), now=Clock().now)
    watcher = PodWatcher(kube, await kube.cluster(), are_quotas_watched=True)
    try:
        for kind in (PODS, QUOTAS):
            watch = kube.watch(kind)
            facts = await watcher.on_item(await anext(watch))
            team.facts += [TimedFact(fact, Clock().now()) for fact in facts]
    finally:
        await kube.close()
    now = Clock().now()
    state = given(node("n1"), tuple(team.facts), as_of=now)
    reasons = {entry.subject: entry.reason for entry in schedule(state, tenancy(), now).deferred}
    return reasons[f"job/{name}"]


async def test_a_job_of_a_new_project_lands_in_a_complete_namespace(
    team: Team,
    outside: KubeHttp,
    kubeconfigs: Any,  # noqa: ANN401 - a mapping of paths
) -> None:
    """Namespace, quota, network policy, service account; the Job and its pod with labels and PriorityClass. Then the
    real controller counts the pod, refuses that of a second job, and the schedule knows why."""
    queued, _ = await team.queue("first", "research", gpus=2)
    assert queued.spec.namespace == "gpu-research"
    namespace = await outside.read("/api/v1/namespaces/gpu-research")
    wanted = {labels.PROJECT_ID: "research", "gpu-tenant": "research", "gpu-cost-center": "cc-42"}
    assert wanted.items() <= namespace["metadata"]["labels"].items()
    quota = await outside.read(of("gpu-research", "resourcequotas", "gpu-autoscaler"))
    assert quota["spec"]["hard"] == {GPUS: "2"}
    rules = (await outside.read(of("gpu-research", "networkpolicies", "gpu-autoscaler", "networking.k8s.io")))["spec"]
    admitted = [peer["namespaceSelector"]["matchLabels"] for peer in rules["ingress"][0]["from"]]
    assert admitted == [{"gpu-tenant": "research"}, {"kubernetes.io/metadata.name": NAMESPACE}]
    assert (await outside.read(of("gpu-research", "serviceaccounts", "gpu-jobs")))[
        "automountServiceAccountToken"
    ] is False
    job = await outside.read(of("gpu-research", "jobs", "first", "batch"))
    cost = {"gpu-project": "research", "gpu-cost-center": "cc-42", "gpu-tenant": "research"}
    assert job["spec"]["suspend"] is True
    assert cost.items() <= job["metadata"]["labels"].items()

    await team.release("first")
    pods = await outside.until(of("gpu-research", "pods"), lambda found: found.get("items"))
    (pod,) = pods["items"]
    assert cost.items() <= pod["metadata"]["labels"].items()
    assert (pod["spec"]["priorityClassName"], pod["spec"]["priority"]) == ("gpu-autoscaler-medium", 500)
    assert pod["spec"]["serviceAccountName"] == "gpu-jobs"
    path = of("gpu-research", "resourcequotas", "gpu-autoscaler")
    await outside.until(path, lambda found: found.get("status", {}).get("used") == {GPUS: "2"})

    await team.queue("second", "research")
    assert await wait_reason(team, kubeconfigs["pod_watcher"], "second") == ResourceQuotaExceeded(
        quota="gpu-research/gpu-autoscaler", resource=GPUS, used_milli=2_000, needed_milli=1_000, hard_milli=2_000
    )
    await team.release("second")  # as if the quota were unknown
    await outside.until(of("gpu-research", "events"), lambda found: "exceeded quota: gpu-autoscaler" in str(found))
    names = [
        each["metadata"]["labels"][labels.JOB_ID] for each in (await outside.read(of("gpu-research", "pods")))["items"]
    ]
    assert names == ["first"]

    team.scheduler.use_policy(tenancy(gpus="4"))
    await team.queue("third", "research")
    assert (await outside.read(path))["spec"]["hard"] == {GPUS: "4"}


async def test_a_namespace_of_somebody_else_is_not_used(team: Team, outside: KubeHttp) -> None:
    """It exists without the label of the project: the job ends with the next step, and nothing is created there."""
    await outside.made("/api/v1/namespaces", {"metadata": {"name": "gpu-vision"}})
    _, (end,) = await team.queue("taken", "vision")
    assert isinstance(end, JobFinished)
    assert end.outcome == "failed"
    assert "label it gpu-autoscaler.io/project-id=vision" in end.message
    assert (await outside.read(of("gpu-vision", "resourcequotas")))["items"] == []
    assert (await outside.read(of("gpu-vision", "jobs", group="batch")))["items"] == []

    await outside.patched("/api/v1/namespaces/gpu-vision", {"metadata": {"labels": {labels.PROJECT_ID: "vision"}}})
    assert (await team.queue("given", "vision"))[1] == ()
    assert await outside.read(of("gpu-vision", "jobs", "given", "batch"))


async def test_a_mapped_namespace_is_left_as_it_is(team: Team, outside: KubeHttp) -> None:
    """The Job is created, released and withdrawn there, with the service account of the namespace."""
    queued, ends = await team.queue("there", "mapped")
    assert (queued.spec.namespace, ends) == ("team-m", ())
    assert (await outside.read(of("team-m", "resourcequotas")))["items"] == []
    job = await outside.read(of("team-m", "jobs", "there", "batch"))
    assert "serviceAccountName" not in job["spec"]["template"]["spec"]
    await team.release("there")
    assert (await outside.read(of("team-m", "jobs", "there", "batch")))["spec"]["suspend"] is False
    end = JobFinished(job_id=JobId("there"), outcome="cancelled", finished_at=Clock().now())
    assert await team.handle(end) == ()
    await outside.until(of("team-m", "jobs", "there", "batch"), lambda found: not found)


async def test_a_missing_namespace_is_named(team: Team, plane: ControlPlane) -> None:
    """With the project and the next step."""
    plane.kubectl("delete", "namespace", "team-l")
    _, (end,) = await team.queue("nowhere", "lost")
    assert isinstance(end, JobFinished)
    assert end.message == (
        "namespace team-l of project lost does not exist; create it, or map the project to another one in "
        "tenancy.projects of the policy, then submit the job again"
    )


async def test_a_quota_of_jobs_delays_their_creation(team: Team, outside: KubeHttp) -> None:
    """The API server refuses the Job itself: tried again, not given up."""
    hard = {"spec": {"hard": {"count/jobs.batch": "0"}}, "metadata": {"name": "no-jobs"}}
    await outside.made(of("team-m", "resourcequotas"), hard)
    await outside.until(of("team-m", "resourcequotas", "no-jobs"), lambda found: found["status"].get("used"))
    with pytest.raises(TransientError, match="exceeded quota: no-jobs"):
        await team.queue("later", "mapped")
    answer = await outside.send("DELETE", of("team-m", "resourcequotas", "no-jobs"))
    assert answer.status == 200
    queued = team.view.state.jobs[JobId("later")].queued
    assert queued is not None
    async with asyncio.timeout(30):  # admission reads quotas from a cache
        while True:
            with contextlib.suppress(TransientError):
                assert await team.handle(queued) == ()
                break
            await asyncio.sleep(0.1)


async def test_a_job_without_a_namespace_of_its_project_is_where_all_jobs_are(team: Team, outside: KubeHttp) -> None:
    """Without tenancy: recorded, so that the quotas of that namespace count; and no object is added."""
    team.scheduler.use_policy(policy())
    queued, ends = await team.queue("plain", "research")
    assert (queued.spec.namespace, queued.spec.tenant, ends) == ("default", "", ())
    job = await outside.read(of("default", "jobs", "plain", "batch"))
    assert "gpu-tenant" not in job["metadata"]["labels"]
    assert "priorityClassName" not in job["spec"]["template"]["spec"]

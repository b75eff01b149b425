"""Every write of ours on a real API server, and every answer that it has for an eviction."""

import itertools

import msgspec
import pytest
from tests.controlplane.fixtures import kube, outside, plane
from tests.controlplane.plane import ControlPlane
from tests.support.faulty_proxy import Fault, faulty_proxy
from tests.support.kube_http import MERGE, STRATEGIC, Json, KubeHttp
from tests.support.kube_objects import budget, job, node, pod
from tests.support.stories import T0, given
from tests.support.stories import job as job_story
from tests.support.stories import node as story_node

from gpu_autoscaler.events.job import JobPlaced
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.kube.protocol import JOBS, NODES, PODS, Conflict, NotFound
from gpu_autoscaler.kube.translate.workload_progress import KINDS
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import JobId, NodeUid
from gpu_autoscaler.model.jobs import Runtime
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.scheduler.binder import Binder, NotInstalled

__all__ = ["kube", "outside", "plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]

PATH = "/api/v1/namespaces/default/pods"
BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
_number = itertools.count(1)


async def running(outside: KubeHttp, kube: KubeClient, app: str) -> core.Pod:
    """Create a pod that runs on a node, with the kubelet's status."""
    name = f"{app}-{next(_number)}"
    await outside.made(PATH, pod(name, labels={"app": app}, nodeName="somewhere"))
    ready = [{"type": "Ready", "status": "True"}]
    await outside.patched(f"{PATH}/{name}/status", {"status": {"phase": "Running", "conditions": ready}}, STRATEGIC)
    return await kube.get(PODS, "default", name)


async def counted(outside: KubeHttp, app: str, *, allowed: int) -> None:
    """Create a PodDisruptionBudget over the app and wait until it allows `allowed` disruptions."""
    name = f"{app}-budget"
    made = await outside.made(BUDGETS, budget(name, app))
    status = {
        "observedGeneration": made["metadata"]["generation"],
        "disruptionsAllowed": allowed,
        "currentHealthy": 1 + allowed,
        "desiredHealthy": 1,
        "expectedPods": 1 + allowed,
    }
    await outside.patched(f"{BUDGETS}/{name}/status", {"status": status}, MERGE)


async def test_an_eviction_that_may_be(kube: KubeClient, outside: KubeHttp) -> None:
    """Without a budget, and within one: accepted, and the pod has its grace; a budget is spent by it."""
    free = await running(outside, kube, "free")
    assert (await kube.evict_pod(free)).answer == "accepted"
    assert (await kube.get(PODS, "default", free.metadata.name)).metadata.deletion_timestamp is not None

    await counted(outside, "spare", allowed=1)
    first, second = [await running(outside, kube, "spare") for _ in range(2)]
    assert (await kube.evict_pod(first)).answer == "accepted"
    assert (await kube.evict_pod(second)).answer == "blocked"


async def test_an_eviction_of_what_is_gone(kube: KubeClient, outside: KubeHttp) -> None:
    """404, and 409 where another pod has taken the name: gone either way, and the other one is left alone."""
    first = await running(outside, kube, "same")
    name = first.metadata.name
    await outside.send("DELETE", f"{PATH}/{name}?gracePeriodSeconds=0")
    assert (await kube.evict_pod(first)).answer == "gone"
    await outside.made(PATH, pod(name, nodeName="somewhere"))
    assert (await kube.evict_pod(first)).answer == "gone"
    assert not await kube.annotate_pod(first, {"a": "b"})
    assert not await kube.delete_pod(first, grace_seconds=5)
    assert "deletionTimestamp" not in (await outside.read(f"{PATH}/{name}"))["metadata"]


async def test_an_eviction_that_a_budget_refuses(kube: KubeClient, outside: KubeHttp) -> None:
    """429: blocked, with the budget's words; a Retry-After only where the budget is not counted yet."""
    guarded = await running(outside, kube, "guarded")
    await counted(outside, "guarded", allowed=0)
    blocked = await kube.evict_pod(guarded)
    assert (blocked.answer, blocked.retry_after_seconds) == ("blocked", None)
    assert "guarded-budget needs 1 healthy pods and has 1 currently" in blocked.message

    young = await running(outside, kube, "young")
    await outside.made(BUDGETS, budget("young-budget", "young"))
    blocked = await kube.evict_pod(young)
    assert (blocked.answer, blocked.retry_after_seconds) == ("blocked", 10.0)
    assert "still being processed" in blocked.message


async def test_an_eviction_under_two_budgets(kube: KubeClient, outside: KubeHttp) -> None:
    """The 500 is a final refusal here: reported and not retried."""
    twice = await running(outside, kube, "twice")
    await counted(outside, "twice", allowed=1)
    await outside.made(BUDGETS, budget("twice-too", "twice"))
    refused = await kube.evict_pod(twice)
    assert refused.answer == "refused"
    assert "more than one PodDisruptionBudget" in refused.message


async def test_an_eviction_that_is_not_answered(plane: ControlPlane, kube: KubeClient, outside: KubeHttp) -> None:
    """A throttled or a failing server is no budget: an outage, with the wait that it asked for."""
    busy = await running(outside, kube, "busy")
    async with faulty_proxy(plane.url, plane.admin_token, plane.tls) as (url, proxy):
        through = KubeClient(Connection(base_url=url), now=Clock().now)
        try:
            for status, wait in ((429, 7), (429, None), (500, None), (503, 2)):
                proxy.faults.append(Fault(kind="refused", is_watch=False, status=status, retry_after_seconds=wait))
                with pytest.raises(TransientError, match=f"evict pod default/{busy.metadata.name}: {status}") as told:
                    await through.evict_pod(busy)
                assert told.value.retry_after_seconds == wait
            assert (await through.evict_pod(busy)).answer == "accepted"
        finally:
            await through.close()


async def test_a_forced_deletion_is_marked_and_has_its_grace(kube: KubeClient, outside: KubeHttp) -> None:
    """DisruptionTarget first, so that a Job counts no failure; a grace of 0 becomes 1: never two of one pod."""
    late = await running(outside, kube, "late")
    assert await kube.delete_pod(late, grace_seconds=0)
    item = await outside.read(f"{PATH}/{late.metadata.name}")
    marks = {one["type"]: one for one in item["status"]["conditions"]}
    assert marks["DisruptionTarget"]["status"] == "True"
    assert marks["Ready"]["status"] == "True", "the kubelet's own condition stays"
    assert item["metadata"]["deletionGracePeriodSeconds"] == 1


async def test_a_node_is_patched_without_losing_what_others_wrote(kube: KubeClient, outside: KubeHttp) -> None:
    """Cordon, taints with a version, labels: a conflict where somebody was quicker or the node is another."""
    made = await outside.made("/api/v1/nodes", node("gpu-a"))
    uid, version = made["metadata"]["uid"], made["metadata"]["resourceVersion"]
    cordoned = await kube.patch_node("gpu-a", {"metadata": {"uid": uid}, "spec": {"unschedulable": True}})
    assert cordoned.spec.unschedulable
    taints: list[Json] = [{"key": "gpu-autoscaler.io/draining", "effect": "NoSchedule"}]
    with pytest.raises(Conflict):  # merge patches replace the whole list, so the list must be the one that was read
        await kube.patch_node("gpu-a", {"metadata": {"resourceVersion": version}, "spec": {"taints": taints}})
    read = cordoned.metadata.resource_version
    tainted = await kube.patch_node("gpu-a", {"metadata": {"resourceVersion": read}, "spec": {"taints": taints}})
    assert [taint.key for taint in tainted.spec.taints][:1] == ["gpu-autoscaler.io/draining"]
    with pytest.raises(Conflict):
        await kube.patch_node("gpu-a", {"metadata": {"uid": "another"}, "spec": {"unschedulable": None}})
    with pytest.raises(NotFound, match="gpu-b"):
        await kube.patch_node("gpu-b", {"spec": {"unschedulable": True}})
    assert not (await kube.patch_node("gpu-a", {"spec": {"unschedulable": None}})).spec.unschedulable
    assert (await kube.get(NODES, "", "gpu-a")).metadata.uid == uid


async def test_a_job_is_made_once_released_once_and_deleted(kube: KubeClient, outside: KubeHttp) -> None:
    """A taken name is a conflict, a change of what may not change a permanent refusal, a deletion is of that Job."""
    made = await kube.make(JOBS, "default", job("train", suspend=True))
    assert made.spec.suspend
    with pytest.raises(Conflict, match="already exists"):
        await kube.make(JOBS, "default", job("train"))
    with pytest.raises(PermanentError, match=r"default/bad.*422"):
        await kube.make(JOBS, "default", job("bad", completions=-1))
    released = await kube.change(JOBS, "default", "train", {"spec": {"suspend": False}})
    assert not released.spec.suspend
    with pytest.raises(PermanentError, match="immutable"):
        await kube.change(JOBS, "default", "train", {"spec": {"completionMode": "NonIndexed"}})
    assert await kube.remove(JOBS, made)
    with pytest.raises(NotFound):
        await kube.get(JOBS, "default", "train")
    assert not await kube.remove(JOBS, made)


async def test_pods_of_a_node_are_found_by_the_server(kube: KubeClient, outside: KubeHttp) -> None:
    """Only those bound there, finished ones included."""
    for name, where in (("on-a", "other-a"), ("on-b", "other-b")):
        await outside.made(PATH, pod(name, nodeName=where))
    await outside.patched(f"{PATH}/on-a/status", {"status": {"phase": "Succeeded"}}, STRATEGIC)
    assert [one.metadata.name for one in await kube.pods_on("other-a")] == ["on-a"]
    assert await kube.pods_on("nowhere") == []


@pytest.mark.parametrize("runtime", [each for each in Runtime if each is not Runtime.JOB])
async def test_a_kind_that_is_not_installed_is_named(kube: KubeClient, runtime: Runtime) -> None:
    """Without CustomResourceDefinition nothing is created, and the refusal names the missing one."""
    binder = Binder(kube, "default")
    state = given(story_node("n1"), job_story("absent"))
    queued = state.jobs[JobId("absent")].queued
    assert queued is not None
    spec = msgspec.structs.replace(queued.spec, runtime=runtime, command=("python",))
    placed = JobPlaced(job_id=spec.job_id, attempt=1, node_uids=(NodeUid("n1"),), node_names=("n1",), placed_at=T0)

    assert not await binder.serves(runtime)
    with pytest.raises(NotInstalled, match=KINDS[runtime].crd):
        await binder.release(spec, placed, state)

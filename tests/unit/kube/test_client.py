"""The client against the simulated API server, over HTTP."""

from collections.abc import AsyncIterator

import pytest
from tests.support.cluster import RunningCluster, running_cluster, until
from tests.support.kube_objects import Json, budget, job, pod

from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.kube.protocol import JOBS, NODES, PODS, Conflict, NotFound
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.labels import ACTION_ID
from gpu_autoscaler.simcluster.faults import Refusal


@pytest.fixture
async def here() -> AsyncIterator[RunningCluster]:
    """A fresh cluster."""
    async with running_cluster() as cluster:
        yield cluster


async def running_pod(here: RunningCluster, item: Json) -> core.Pod:
    """Add the pod and return it once it is ready."""
    here.add("pods", item)

    async def ready() -> core.Pod | None:
        seen = await here.kube.get(PODS, "default", item["metadata"]["name"])
        return seen if any(one.type == "Ready" and one.status == "True" for one in seen.status.conditions) else None

    seen: core.Pod = await until(ready)
    return seen


async def test_the_cluster_is_known_by_its_kube_system_namespace(here: RunningCluster) -> None:
    """UID and creation second of the namespace that every cluster has, and keeps."""
    namespace = here.world.api.find(here.world.registry.find("", "v1", "namespaces"), "kube-system")  # type: ignore[arg-type]
    assert namespace is not None
    assert here.cluster.installation == namespace["metadata"]["uid"]
    assert here.cluster.epoch == pytest.approx(here.clock.now().timestamp(), abs=60)


async def test_a_cordon_meets_the_very_node_that_was_meant(here: RunningCluster) -> None:
    """Cordon and uncordon by merge patch; another node of the same name is left alone."""
    uid = here.add_node("gpu-a")["metadata"]["uid"]
    node = await here.kube.patch_node("gpu-a", {"metadata": {"uid": uid}, "spec": {"unschedulable": True}})
    assert node.spec.unschedulable
    node = await here.kube.patch_node("gpu-a", {"metadata": {"uid": uid}, "spec": {"unschedulable": None}})
    assert not node.spec.unschedulable
    with pytest.raises(Conflict):
        await here.kube.patch_node("gpu-a", {"metadata": {"uid": "other"}, "spec": {"unschedulable": True}})
    with pytest.raises(NotFound, match="gpu-b"):
        await here.kube.patch_node("gpu-b", {"spec": {"unschedulable": True}})


async def test_an_eviction_has_four_answers(here: RunningCluster) -> None:
    """Accepted, gone, blocked by a budget, refused because two budgets contradict each other."""
    here.add_node("gpu-a")
    free = await running_pod(here, pod("free"))
    assert (await here.kube.evict_pod(free)).answer == "accepted"
    await until(lambda: not here.item("pods", "free"))
    assert (await here.kube.evict_pod(free)).answer == "gone"

    guarded = await running_pod(here, pod("guarded", labels={"app": "train"}))
    here.add("budgets", budget("one", "train"))
    await until(lambda: here.item("budgets", "one")["status"].get("expectedPods"))
    blocked = await here.kube.evict_pod(guarded)
    assert blocked.answer == "blocked"
    assert "one needs 1 healthy pods" in blocked.message

    here.add("budgets", budget("two", "train"))
    assert (await here.kube.evict_pod(guarded)).answer == "refused"


async def test_another_pod_of_the_same_name_is_never_touched(here: RunningCluster) -> None:
    """The UID is a precondition of eviction, annotation and deletion alike."""
    here.add_node("gpu-a")
    first = await running_pod(here, pod("train-0"))
    await here.kube.delete_pod(first, grace_seconds=1)
    await until(lambda: not here.item("pods", "train-0"))
    second = await running_pod(here, pod("train-0"))
    assert (await here.kube.evict_pod(first)).answer == "gone"
    assert not await here.kube.annotate_pod(first, {"a": "b"})
    assert not await here.kube.delete_pod(first, grace_seconds=1)
    assert here.item("pods", "train-0")["metadata"]["uid"] == second.metadata.uid
    assert await here.kube.annotate_pod(second, {"a": "b"})


async def test_a_forced_deletion_is_no_failure_of_the_job(here: RunningCluster) -> None:
    """The pod is marked as disrupted before it is deleted, with the grace that was asked for."""
    here.add_node("gpu-a")
    one = await running_pod(here, pod("train-0", annotations={"simcluster.gpu-autoscaler.io/stop-seconds": "60"}))
    assert await here.kube.delete_pod(one, grace_seconds=0)
    marked = here.item("pods", "train-0")
    assert marked["metadata"]["deletionGracePeriodSeconds"] == 1
    assert any(each["type"] == "DisruptionTarget" for each in marked["status"]["conditions"])


async def test_pods_are_listed_by_node(here: RunningCluster) -> None:
    """Only those that are bound there."""
    here.add_node("gpu-a")
    await running_pod(here, pod("here"))
    here.add("pods", pod("nowhere", gpus=99))
    assert [one.metadata.name for one in await here.kube.pods_on("gpu-a")] == ["here"]
    assert await here.kube.pods_on("gpu-b") == []


async def test_nodes_are_listed_by_label(here: RunningCluster) -> None:
    """Only those that carry it with this value."""
    for name, action_id in (("gpu-a", "a"), ("gpu-b", "b")):
        here.add_node(name, labels={ACTION_ID: action_id})
    assert [one.metadata.name for one in await here.kube.nodes_labeled(f"{ACTION_ID}=b")] == ["gpu-b"]
    assert await here.kube.nodes_labeled(f"{ACTION_ID}=c") == []


async def test_a_job_is_made_once_and_deleted_with_its_pods(here: RunningCluster) -> None:
    """A second Job of the name is a conflict; the deletion takes the pods along."""
    here.add_node("gpu-a")
    made = await here.kube.make(JOBS, "default", job("train"))
    with pytest.raises(Conflict, match="already exists"):
        await here.kube.make(JOBS, "default", job("train"))
    await until(lambda: here.items("pods"))
    assert await here.kube.remove(JOBS, made)
    await until(lambda: not here.items("pods") and not here.items("jobs"))
    assert not await here.kube.remove(JOBS, made)
    with pytest.raises(NotFound):
        await here.kube.get(JOBS, "default", "train")


async def test_a_retryable_error_is_transient_and_carries_the_delay(here: RunningCluster) -> None:
    """A throttled call carries the server's own wait; a server that is away is transient; a refusal is not."""
    refused = Refusal(method="GET", path_prefix="/api/v1/nodes", status=429, left_count=1, retry_after_seconds=7)
    here.world.faults.refuse(refused)
    with pytest.raises(TransientError, match="get nodes /gpu-a") as throttled:
        await here.kube.get(NODES, "", "gpu-a")
    assert throttled.value.retry_after_seconds == 7
    with pytest.raises(PermanentError, match="default/train"):
        await here.kube.make(JOBS, "default", job("train", completions=-1))
    away = KubeClient(Connection(base_url="http://127.0.0.1:9"), now=here.clock.now)
    with pytest.raises(TransientError, match="does not answer"):
        await away.get(NODES, "", "gpu-a")
    await away.close()

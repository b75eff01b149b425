"""JobSets under their own controller and webhooks, the real scheduler and the real Job controller, on KWOK nodes."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.controlplane.jobset_controller import needed, running
from tests.controlplane.plane import EVERYTHING, ControlPlane, needed_programs, running_plane
from tests.support.kube_http import MERGE, Json, KubeHttp
from tests.support.kube_objects import node as node_json
from tests.support.stories import T0, given, job, node

from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished, JobPlaced, JobQueued, JobStarted
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import from_kubeconfig
from gpu_autoscaler.kube.protocol import Cluster
from gpu_autoscaler.kube.translate.progress import KINDS
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId, NodeUid
from gpu_autoscaler.model.jobs import JobSpec, Runtime
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.pod_watcher.service import PodWatcher
from gpu_autoscaler_services.scheduler.binder import Binder

pytestmark = [pytest.mark.slow, pytest.mark.integration]

PODS = "/api/v1/namespaces/default/pods"
SECONDS_MAX = 60.0
WHERE = ("spot-1", "spot-2", "lasting-1", "lasting-2")


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A whole control plane with JobSet on it."""
    needed_programs(), needed()
    with (
        tempfile.TemporaryDirectory(prefix="plane-") as folder,
        running_plane(Path(folder), EVERYTHING) as plane,
        running(plane),
    ):
        yield plane


@pytest.fixture
async def outside(plane: ControlPlane) -> AsyncIterator[KubeHttp]:
    """Four nodes with GPUs: two of them on spot."""
    async with aiohttp.ClientSession() as session:
        http = KubeHttp(session, plane.url, plane.admin_token, plane.tls)
        for name in WHERE:
            kind = "spot" if name.startswith("spot") else "on-demand"
            body = node_json(name, labels={labels.CAPACITY_TYPE: kind})
            await http.send("POST", "/api/v1/nodes", body)
        yield http
    await asyncio.sleep(0.5)  # connections under TLS close a moment later (aiohttp, "Graceful Shutdown")


@pytest.fixture
async def kube(plane: ControlPlane) -> AsyncIterator[KubeClient]:
    """Our client."""
    client = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
    yield client
    await client.close()


async def until(holds: Callable[[], object]) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(SECONDS_MAX):
        while not (await held if asyncio.iscoroutine(held := holds()) else held):
            await asyncio.sleep(0.1)


def gang(name: str, *, run_seconds: float | None = None) -> tuple[JobSpec, ClusterState]:
    """Two members of eight GPUs each, and a state that knows the nodes."""
    kinds = {name: {labels.CAPACITY_TYPE: "spot" if "spot" in name else "on-demand"} for name in WHERE}
    nodes = (node(each, labels=said) for each, said in kinds.items())
    state = given(*nodes, job(name, members=2, gpus=8))
    queued = state.jobs[JobId(name)].queued
    assert isinstance(queued, JobQueued)
    return msgspec.structs.replace(queued.spec, runtime=Runtime.JOBSET, run_seconds=run_seconds), state


def placed(spec: JobSpec, *names: str, attempt: int = 1) -> JobPlaced:
    """Its place."""
    uids = tuple(NodeUid(name) for name in names)
    return JobPlaced(job_id=spec.job_id, attempt=attempt, node_uids=uids, node_names=names, placed_at=T0)


async def members(outside: KubeHttp, name: str) -> list[Json]:
    """Pods of the job that nobody told to go."""
    found = await outside.read(f"{PODS}?labelSelector=gpu-autoscaler.io/job-id%3D{name}")
    return [pod for pod in found["items"] if "deletionTimestamp" not in pod["metadata"]]


async def test_a_gang_runs_from_its_place_to_its_end(outside: KubeHttp, kube: KubeClient) -> None:
    """No pod before it is let go; all members at once with stable names; start and end are told."""
    binder, facts = Binder(kube, "default"), list[Fact]()
    watcher = PodWatcher(kube, Cluster(installation="i", epoch=7))

    async def follow() -> None:
        async for item in kube.watch(KINDS[Runtime.JOBSET], label_selector=labels.JOB_ID):
            facts.extend(await watcher.on_item(item))

    following = asyncio.create_task(follow())
    try:
        spec, state = gang("whole", run_seconds=2.0)
        await binder.create(spec, state)
        jobs = "/apis/batch/v1/namespaces/default/jobs?labelSelector=gpu-autoscaler.io/job-id%3Dwhole"

        async def is_made() -> bool:
            return bool((await outside.read(jobs))["items"])

        await until(is_made)
        await asyncio.sleep(1.0)
        assert await members(outside, "whole") == []
        await binder.release(spec, placed(spec, "lasting-1", "lasting-2"), state)
        await until(lambda: any(isinstance(each, JobStarted) for each in facts))
        pods = await members(outside, "whole")
        assert sorted(pod["spec"]["hostname"] for pod in pods) == ["whole-gang-0-0", "whole-gang-0-1"]
        await until(lambda: any(isinstance(each, JobFinished) for each in facts))
        (end,) = (each for each in facts if isinstance(each, JobFinished))
        assert (end.job_id, end.outcome) == ("whole", "completed")
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
    await binder.withdraw(spec.job_id, Runtime.JOBSET)


async def test_the_last_attempt_leaves_spot_though_spot_is_free(outside: KubeHttp, kube: KubeClient) -> None:
    """Held until its pods are gone; let go anew it is bound where its place is, and to no spot."""
    binder, (spec, state) = Binder(kube, "default"), gang("worn")

    async def cordon(*names: str, **spec: bool) -> None:
        for name in names:
            await outside.patched(f"/api/v1/nodes/{name}", {"spec": spec}, MERGE)

    async def are_bound() -> bool:
        pods = await members(outside, "worn")
        return len(pods) == 2 and all(pod["spec"].get("nodeName") for pod in pods)

    async def is_held() -> bool:
        return await binder.hold(spec.job_id, Runtime.JOBSET)

    await cordon("lasting-1", "lasting-2", unschedulable=True)
    await binder.create(spec, state)
    await binder.release(spec, placed(spec, "spot-1", "spot-2"), state)
    await until(are_bound)
    assert {pod["spec"]["nodeName"] for pod in await members(outside, "worn")} == {"spot-1", "spot-2"}

    assert not await binder.hold(spec.job_id, Runtime.JOBSET)
    await until(is_held)
    assert await members(outside, "worn") == []
    await cordon("lasting-1", "lasting-2", unschedulable=False)
    lasting = msgspec.structs.replace(spec, is_preemptible=False)
    await binder.release(lasting, placed(spec, "lasting-1", "lasting-2", attempt=2), state)
    await until(are_bound)
    assert {pod["spec"]["nodeName"] for pod in await members(outside, "worn")} == {"lasting-1", "lasting-2"}

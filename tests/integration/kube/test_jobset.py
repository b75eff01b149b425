"""JobSets under their own controller and webhooks, the real scheduler and the real Job controller, on KWOK nodes."""

import asyncio
import contextlib
from collections.abc import Iterator

import msgspec
import pytest
from tests.controlplane.fixtures import kube
from tests.controlplane.jobset_controller import needed, running
from tests.controlplane.plane import ControlPlane
from tests.integration.kube.gangs import gang, members, outside, placed, until, whole_plane
from tests.support.kube_http import MERGE, KubeHttp

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished, JobStarted
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.protocol import Cluster
from gpu_autoscaler.kube.translate.workload_progress import KINDS
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.jobs import Runtime
from gpu_autoscaler_services.pod_watcher.service import PodWatcher
from gpu_autoscaler_services.scheduler.binder import Binder

__all__ = ["kube", "outside"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A whole control plane with JobSet on it."""
    with whole_plane(needed, running) as plane:
        yield plane


async def test_a_gang_runs_from_its_place_to_its_end(outside: KubeHttp, kube: KubeClient) -> None:
    """No pod before the job is resumed; all members at once with stable names; start and end are reported."""
    binder, facts = Binder(kube, "default"), list[Fact]()
    watcher = PodWatcher(kube, Cluster(installation="i", epoch=7))

    async def follow() -> None:
        async for item in kube.watch(KINDS[Runtime.JOBSET], label_selector=labels.JOB_ID):
            facts.extend(await watcher.on_item(item))

    following = asyncio.create_task(follow())
    try:
        # Controllers count who is ready once a second, and on a busy machine later.
        spec, state = gang("whole", Runtime.JOBSET, gpus=8, run_seconds=15.0)
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
    """Suspended until its pods are gone; resumed, it is bound to its placement and not to spot."""
    binder, (spec, state) = Binder(kube, "default"), gang("worn", Runtime.JOBSET, gpus=8)

    async def cordon(*names: str, **spec: bool) -> None:
        for name in names:
            await outside.patched(f"/api/v1/nodes/{name}", {"spec": spec}, MERGE)

    async def are_bound() -> bool:
        pods = await members(outside, "worn")
        return len(pods) == 2 and all(pod["spec"].get("nodeName") for pod in pods)

    async def is_held() -> bool:
        return await binder.suspend(spec.job_id, Runtime.JOBSET)

    await cordon("lasting-1", "lasting-2", unschedulable=True)
    await binder.create(spec, state)
    await binder.release(spec, placed(spec, "spot-1", "spot-2"), state)
    await until(are_bound)
    assert {pod["spec"]["nodeName"] for pod in await members(outside, "worn")} == {"spot-1", "spot-2"}

    assert not await binder.suspend(spec.job_id, Runtime.JOBSET)
    await until(is_held)
    assert await members(outside, "worn") == []
    await cordon("lasting-1", "lasting-2", unschedulable=False)
    lasting = msgspec.structs.replace(spec, is_preemptible=False)
    await binder.release(lasting, placed(spec, "lasting-1", "lasting-2", attempt=2), state)
    await until(are_bound)
    assert {pod["spec"]["nodeName"] for pod in await members(outside, "worn")} == {"lasting-1", "lasting-2"}

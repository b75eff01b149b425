"""Volcano's Jobs under their own controller and the real garbage collector, on KWOK nodes.

Volcano's scheduler does not run here: the test lets the group in and binds its pods, as that would.
"""

from collections.abc import Iterator

import msgspec
import pytest
from tests.controlplane.fixtures import kube
from tests.controlplane.plane import ControlPlane
from tests.controlplane.volcano_controller import needed, running
from tests.integration.kube.gangs import PODS, gang, members, outside, placed, until, whole_plane
from tests.support.kube_http import MERGE, Json, KubeHttp
from tests.support.stories import T0

from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.protocol import Changed, Cluster, Deleted, NotFound
from gpu_autoscaler.kube.translate.workload_progress import KINDS, progress
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.jobs import Runtime
from gpu_autoscaler_services.pod_watcher.service import PodWatcher
from gpu_autoscaler_services.scheduler.binder import Binder

__all__ = ["kube", "outside"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]

GROUPS = "/apis/scheduling.volcano.sh/v1beta1/namespaces/default/podgroups"
VOLCANO = KINDS[Runtime.VOLCANO]


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A whole control plane with Volcano's controllers on it."""
    with whole_plane(needed, running) as plane:
        yield plane


async def bound(outside: KubeHttp, name: str, node_name: str, besides: frozenset[str] = frozenset()) -> list[Json]:
    """Do as Volcano's scheduler would: let the group in, bind its pods; return them once they run."""

    async def are_running() -> bool:
        groups = await outside.read(GROUPS)
        for group in groups["items"]:
            if group.get("status", {}).get("phase") not in ("Inqueue", "Running"):
                path = f"{GROUPS}/{group['metadata']['name']}"
                await outside.send("PATCH", path, {"status": {"phase": "Inqueue"}}, content_type=MERGE)
        new = [pod for pod in await members(outside, name) if pod["metadata"]["uid"] not in besides]
        for pod in new:
            if not pod["spec"].get("nodeName"):
                target = {"target": {"kind": "Node", "name": node_name}, "metadata": {"name": pod["metadata"]["name"]}}
                await outside.send("POST", f"{PODS}/{pod['metadata']['name']}/binding", target)
        return len(new) == 2 and all(pod["status"]["phase"] == "Running" for pod in new)

    await until(are_running)
    return [pod for pod in await members(outside, name) if pod["metadata"]["uid"] not in besides]


async def test_an_evicted_member_restarts_all_members(outside: KubeHttp, kube: KubeClient) -> None:
    """Both pods are new, and the Job continues; the other member's failure without its peer ends nothing."""
    binder, (spec, state) = Binder(kube, "default"), gang("moved", Runtime.VOLCANO, gpus=4)
    await binder.release(spec, placed(spec, "spot-1"), state)
    first = await bound(outside, "moved", "spot-1")
    uids = frozenset(pod["metadata"]["uid"] for pod in first)
    name = first[0]["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    answer = await outside.send("POST", f"{PODS}/{name}/eviction", eviction)
    assert answer.status == 201, answer.body

    again = await bound(outside, "moved", "lasting-1", besides=uids)
    assert {pod["spec"]["nodeName"] for pod in again} == {"lasting-1"}
    thing = await kube.get(VOLCANO, "default", "moved")
    assert progress(thing).end is None
    await binder.withdraw(spec.job_id, Runtime.VOLCANO)


async def test_work_that_fails_ends_the_job(outside: KubeHttp, kube: KubeClient) -> None:
    """Volcano ends the other member and reports the end."""
    binder, (spec, state) = Binder(kube, "default"), gang("broken", Runtime.VOLCANO, gpus=4)
    await binder.release(spec, placed(spec, "spot-1"), state)
    first, *_ = await bound(outside, "broken", "spot-1")
    path = f"{PODS}/{first['metadata']['name']}/status"
    await outside.patched(path, {"status": {"phase": "Failed"}}, MERGE)

    async def is_over() -> bool:
        end = progress(await kube.get(VOLCANO, "default", "broken")).end
        return end is not None and end.outcome == "failed"

    await until(is_over)


async def test_a_job_that_must_leave_spot_is_recreated(outside: KubeHttp, kube: KubeClient) -> None:
    """Gone with its pods, which is not its end; then made with what keeps it off spot."""
    binder, (spec, state) = Binder(kube, "default"), gang("worn", Runtime.VOLCANO, gpus=4)
    watcher = PodWatcher(kube, Cluster(installation="i", epoch=7))
    await binder.release(spec, placed(spec, "spot-1"), state)
    await bound(outside, "worn", "spot-1")

    assert not await binder.suspend(spec.job_id, Runtime.VOLCANO)
    going = await kube.get(VOLCANO, "default", "worn")

    async def is_held() -> bool:
        return await binder.suspend(spec.job_id, Runtime.VOLCANO)

    await until(is_held)
    assert await members(outside, "worn") == []
    with pytest.raises(NotFound):
        await kube.get(VOLCANO, "default", "worn")
    for item in (Changed(kind=VOLCANO, object=going, seen_at=T0), Deleted(kind=VOLCANO, object=going, seen_at=T0)):
        assert await watcher.on_item(item) == []

    lasting = msgspec.structs.replace(spec, is_preemptible=False)
    await binder.release(lasting, placed(spec, "lasting-1", attempt=2), state)
    made = await outside.read(VOLCANO.path("default", "worn"))
    terms = made["spec"]["tasks"][0]["template"]["spec"]["affinity"]["nodeAffinity"]
    required = terms["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    said = [one for term in required for one in term["matchExpressions"] if one["key"] == labels.CAPACITY_TYPE]
    assert said
    assert all("spot" not in one["values"] for one in said)
    await binder.withdraw(spec.job_id, Runtime.VOLCANO)

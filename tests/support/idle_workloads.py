"""A workload with one pod on a real API server, announced as idle and ended by the scaler's steps."""

import asyncio
import contextlib
from datetime import timedelta
from typing import Any

import msgspec
from tests.support.kube_http import KubeHttp
from tests.support.kube_objects import pod

from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.protocol import NotFound
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.decisions import AnnounceIdleWorkload, EndIdleWorkload, OwnerKind, WorkloadPod
from gpu_autoscaler.model.ids import ActionId, PodUid
from gpu_autoscaler.model.labels import IDLE_ENDS_AT
from gpu_autoscaler.model.reasons.upkeep import WorkloadIdle
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.scaler.idle_workloads import IdleWorkloads

KINDS = ("Deployment", "ReplicaSet", "StatefulSet", "Job", "Pod")
_PODS = "/api/v1/namespaces/default/pods"


async def announce_and_end(users: KubeHttp, kube: KubeClient, kind: str) -> None:
    """Create the workload, announce and end it twice, as after a restart; no controller creates its pods again."""
    path, manifest = _workload(kind)
    name = f"idle-{kind.lower()}"
    await users.made(path, {**manifest, "metadata": {"name": name}})
    known = await _pod_of(users, name)
    owner = next(iter(known.metadata.owner_references), None)
    now = Clock().now()
    common: dict[str, Any] = {
        "action_id": ActionId("a"),
        "retry_at": now + timedelta(minutes=1),
        "namespace": "default",
        "pods": (WorkloadPod(name=known.metadata.name, pod_uid=PodUid(known.metadata.uid)),),
        "reason": WorkloadIdle(idle_seconds=1800.0, idle_seconds_max=1800.0, busy_ratio_max=0.05),
    }
    steps, ends_at = IdleWorkloads(kube), now + timedelta(minutes=10)
    await steps.announce(AnnounceIdleWorkload(announced_at=now, ends_at=ends_at, **common))
    assert (await _pod_of(users, name)).metadata.annotations[IDLE_ENDS_AT] == ends_at.isoformat()

    owner_kind = None if owner is None else msgspec.convert(owner.kind, OwnerKind)
    end = EndIdleWorkload(owner_kind=owner_kind, owner_uid="" if owner is None else owner.uid, **common)
    for _ in range(2):
        with contextlib.suppress(NotFound):
            await steps.end(end)
    if kind in ("Job", "Pod"):
        await users.until(f"{path}/{name}", lambda body: not body)
    else:
        await users.until(f"{path}/{name}", lambda body: body["spec"]["replicas"] == 0)
    await users.until(f"{_PODS}/{known.metadata.name}", lambda body: not body)


def _workload(kind: str) -> tuple[str, dict[str, Any]]:
    """Return the path and the manifest of a workload with one pod."""
    labels, spec = {"app": f"idle-{kind.lower()}"}, pod("any")["spec"]
    template = {"metadata": {"labels": labels}, "spec": spec}
    match kind:
        case "Pod":
            return _PODS, {"kind": kind, "apiVersion": "v1", "spec": spec}
        case "Job":
            job = {"template": {"spec": {**spec, "restartPolicy": "Never"}}}
            return "/apis/batch/v1/namespaces/default/jobs", {"kind": kind, "apiVersion": "batch/v1", "spec": job}
        case _:
            scaled = {"selector": {"matchLabels": labels}, "replicas": 1, "template": template}
            path = f"/apis/apps/v1/namespaces/default/{kind.lower()}s"
            return path, {"kind": kind, "apiVersion": "apps/v1", "spec": scaled}


async def _pod_of(users: KubeHttp, name: str) -> core.Pod:
    """Return the pod of the workload, once there is one."""
    async with asyncio.timeout(60):
        while True:
            for item in (await users.read(_PODS))["items"]:
                if item["metadata"]["name"].startswith(name):
                    return msgspec.convert(item, core.Pod)
            await asyncio.sleep(0.1)

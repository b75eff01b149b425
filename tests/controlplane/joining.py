"""Joins the simulated cloud's machines to a real control plane, with KWOK as their kubelets.

The cloud registers its machines at simcluster's own API. Their nodes are copied to the real API server as they change,
and the pods that run on them are copied back, so that the cloud's exporters report busy GPUs and its notices hit busy
machines.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
from tests.support.kube_http import MERGE, STRATEGIC, Json, KubeHttp

from gpu_autoscaler.model.resources import GPU_RESOURCE

NODES, PODS = "/api/v1/nodes", "/api/v1/pods"
KWOK = "kwok.x-k8s.io/node"
OFF = "controlplane.test/off"  # by stages.yaml such a node does not get ready
_LOOK_SECONDS = 0.2
_TAINTS_OF_CONTROLLERS = "node.kubernetes.io/"  # the real ones set their own


class Joining:
    """Copies nodes to the cluster and pods back, repeatedly."""

    def __init__(self, cloud: KubeHttp, cluster: KubeHttp) -> None:
        self._cloud = cloud
        self._cluster = cluster
        self._joined: set[str] = set()  # what was registered there once; deleted by hand it does not come again

    async def run(self) -> None:
        """Copy until canceled. Errors with pods do not delay joining machines."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._again(self._join))
            group.create_task(self._again(self._carry_pods_back))

    async def _again(self, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            await step()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _join(self) -> None:
        """Join new machines."""
        here = {item["metadata"]["name"]: item for item in (await self._cloud.read(NODES))["items"]}
        there = {item["metadata"]["name"]: item for item in (await self._cluster.read(NODES))["items"]}
        await asyncio.gather(*(self._carry(name, machine, there.get(name)) for name, machine in here.items()))
        for name in self._joined & set(there) - set(here):
            await self._cluster.send("DELETE", f"{NODES}/{name}")

    async def _carry(self, name: str, machine: Json, node: Json | None) -> None:
        """Update one machine's node. Machines are independent of each other, as kubelets are."""
        if name not in self._joined:
            self._joined.add(name)
            await self._cluster.made(NODES, _registered(machine))
        elif node is not None:
            await self._update(machine, node)

    async def _update(self, machine: Json, node: Json) -> None:
        path = f"{NODES}/{node['metadata']['name']}"
        is_ready, is_off = _is_ready(machine), OFF in node["metadata"]["annotations"]
        if is_ready == is_off:
            await self._cluster.patched(path, {"metadata": {"annotations": {OFF: None if is_ready else "true"}}})
        if not is_ready and not is_off:  # its kubelet says so, and then nothing more
            off = {"type": "Ready", "status": "False", "reason": "KubeletNotReady", "message": "node is shutting down"}
            await self._cluster.patched(f"{path}/status", {"status": {"conditions": [off]}}, STRATEGIC)
        gpus = machine["status"]["allocatable"].get(GPU_RESOURCE)
        if gpus is not None and GPU_RESOURCE not in node["status"]["allocatable"]:
            amounts = {GPU_RESOURCE: gpus}
            await self._cluster.patched(path, {"metadata": {"labels": machine["metadata"]["labels"]}})
            await self._cluster.patched(
                f"{path}/status", {"status": {"capacity": amounts, "allocatable": amounts}}, MERGE
            )

    async def _carry_pods_back(self) -> None:
        machines = {item["metadata"]["name"] for item in (await self._cloud.read(NODES))["items"]}
        running = {
            _key(item): item
            for item in (await self._cluster.read(f"{PODS}?fieldSelector=status.phase%3DRunning"))["items"]
            if item["spec"].get("nodeName") in machines and "deletionTimestamp" not in item["metadata"]
        }
        known = {_key(item) for item in (await self._cloud.read(PODS))["items"]}
        for key in running.keys() - known:
            spec = {field: running[key]["spec"][field] for field in ("nodeName", "containers")}
            namespace, name = key
            await self._cloud.send(
                "POST", f"/api/v1/namespaces/{namespace}/pods", {"metadata": {"name": name}, "spec": spec}
            )
        for namespace, name in known - running.keys():
            path = f"/api/v1/namespaces/{namespace}/pods/{name}"
            await self._cloud.send("DELETE", path, {"gracePeriodSeconds": 0})


def _registered(machine: Json) -> Json:
    """Return the node as its kubelet registers it: not ready, without GPUs, without our labels."""
    spec = machine["spec"]
    own = [taint for taint in spec.get("taints") or () if not taint["key"].startswith(_TAINTS_OF_CONTROLLERS)]
    return {
        "metadata": {
            "name": machine["metadata"]["name"],
            "labels": machine["metadata"]["labels"],
            "annotations": {KWOK: "fake", OFF: "true"},
        },
        "spec": {"providerID": spec["providerID"], "taints": own},
        "status": {key: machine["status"][key] for key in ("capacity", "allocatable", "addresses")},
    }


def _is_ready(node: Json) -> bool:
    conditions = node["status"].get("conditions") or ()
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _key(item: Json) -> tuple[str, str]:
    return item["metadata"]["namespace"], item["metadata"]["name"]


@contextlib.asynccontextmanager
async def joined(cloud_url: str, cluster: KubeHttp) -> AsyncIterator[None]:
    """Join machines of this cloud to that cluster while the context is open. Errors fail the test."""
    async with aiohttp.ClientSession() as session:
        carrying = asyncio.create_task(Joining(KubeHttp(session, cloud_url), cluster).run())
        try:
            yield
            if carrying.done():
                await carrying
        finally:
            carrying.cancel()
            await asyncio.gather(carrying, return_exceptions=True)

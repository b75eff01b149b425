"""The cluster at the start of the soak: nodes that run, and Kubernetes Jobs whose pods keep them busy.

They exist before the first service starts, as when the system is installed again on a cluster that it made: the cloud
lists the instances with our tag, but no stream and no table knows of them. So ten minutes suffice for a full size.
"""

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.simcluster.offers import ZONES, InstanceType

NODE_TYPE, CHURN_TYPE = "g6.48xlarge", "g5.12xlarge"
GPUS_PER_NODE = 8
PODS_PER_NODE = 10  # eight with a GPU, two without
SPOT_EVERY = 10  # every tenth node: these can be reclaimed
PODS_PER_JOB = 100
CALLS_AT_ONCE = 16
FILLING_SECONDS_MAX = 240.0
JOBS_PATH = "/apis/batch/v1/namespaces/default/jobs"

# Boot times are shorter than those of real machines, so that nodes come and go within minutes.
CATALOG = (
    InstanceType(
        name=NODE_TYPE, vcpu_count=192, memory_gib=768, gpu_count=GPUS_PER_NODE, gpu_model="L4", gpu_memory_gib=24,
        price_usd_per_hour=17.60, boot_seconds=20.0,
    ),
    InstanceType(
        name=CHURN_TYPE, vcpu_count=48, memory_gib=192, gpu_count=4, gpu_model="A10G", gpu_memory_gib=24,
        boot_seconds=15.0,
    ),
    InstanceType(name="m5.4xlarge", vcpu_count=16, memory_gib=64, boot_seconds=10.0),
)  # fmt: skip


def write_catalog(path: Path) -> Path:
    """Write what the simulated cloud sells; return the path."""
    path.write_bytes(msgspec.json.encode(CATALOG))
    return path


class SimApi:
    """Calls simcluster's Kubernetes, cloud and admin APIs, as users and the cloud do."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def call(self, method: str, path: str, body: bytes | None = None) -> Any:  # noqa: ANN401 - JSON
        """Return the answer. Raises AssertionError for a refusal: nothing here may be refused."""
        headers = {"Content-Type": "application/json"}
        async with self._session.request(method, self._url + path, data=body, headers=headers) as response:
            content = await response.read()
        assert response.status < 400, f"{method} {path}: {response.status} {content[:300]!r}"
        return msgspec.json.decode(content)

    async def items(self, path: str) -> list[dict[str, Any]]:
        """Return all objects of a kind."""
        items: list[dict[str, Any]] = (await self.call("GET", path))["items"]
        return items

    async def create_job(self, manifest: dict[str, Any]) -> None:
        """Create a Kubernetes Job."""
        await self.call("POST", JOBS_PATH, json.dumps(manifest).encode())

    async def delete_job(self, name: str) -> None:
        """Delete a Kubernetes Job and its pods."""
        await self.call("DELETE", f"{JOBS_PATH}/{name}?propagationPolicy=Background")


async def fill(url: str, *, nodes_count: int, pods_count: int) -> None:
    """Launch the nodes, create the Jobs, and wait until every pod runs."""
    api = SimApi(url)
    try:
        async with asyncio.timeout(FILLING_SECONDS_MAX):
            await _launch(api, nodes_count)
            await _until_ready(api, nodes_count)
            gpu_pods = min(nodes_count * GPUS_PER_NODE, pods_count * GPUS_PER_NODE // PODS_PER_NODE)
            for kind, count in (("gpu", gpu_pods), ("cpu", pods_count - gpu_pods)):
                for number, size in enumerate(_parts(count)):
                    await api.create_job(job(f"base-{kind}-{number}", size, gpus=int(kind == "gpu")))
            while await _running_count(api) < pods_count:
                await asyncio.sleep(2.0)
    finally:
        await api.close()


def _parts(count: int) -> Iterable[int]:
    return [min(PODS_PER_JOB, count - start) for start in range(0, count, PODS_PER_JOB)]


async def _launch(api: SimApi, count: int) -> None:
    installation = (await api.call("GET", "/api/v1/namespaces/kube-system"))["metadata"]["uid"]
    offers = msgspec.convert(await api.call("GET", "/cloud/offers"), list[Offer])
    by_key = {offer.key: offer for offer in offers}
    turns = asyncio.Semaphore(CALLS_AT_ONCE)

    async def launch(number: int) -> None:
        capacity_type = CapacityType.ON_DEMAND if number % SPOT_EVERY else CapacityType.SPOT
        order = Order(
            action_id=ActionId(f"soak-{number}"),
            installation=installation,
            pool="default",
            offer=by_key[f"{NODE_TYPE}/{ZONES[number % len(ZONES)]}/{capacity_type}"],
            labels=(),
            taints=(),
        )
        async with turns:
            await api.call("POST", "/cloud/instances", msgspec.json.encode(order))

    await asyncio.gather(*map(launch, range(count)))


async def _until_ready(api: SimApi, count: int) -> None:
    while True:
        nodes = await api.items("/api/v1/nodes")
        if sum("nvidia.com/gpu" in node["status"]["allocatable"] for node in nodes) >= count:
            return
        await asyncio.sleep(1.0)


async def _running_count(api: SimApi) -> int:
    jobs = await api.items(JOBS_PATH)
    return sum(int(item.get("status", {}).get("ready") or 0) for item in jobs)


def job(name: str, size: int, *, gpus: int, run_seconds: float | None = None) -> dict[str, Any]:
    """Return a Kubernetes Job of this many pods, which are replaced whenever they are evicted."""
    requests = {"cpu": "10", "memory": "40Gi"} if gpus else {"cpu": "2", "memory": "8Gi"}
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    annotations = {} if run_seconds is None else {"simcluster.gpu-autoscaler.io/run-seconds": str(run_seconds)}
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "parallelism": size,
            "completions": size,
            "backoffLimit": 1_000_000,
            "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": disrupted}]},
            "template": {
                "metadata": {"annotations": annotations},
                "spec": {
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": 5,
                    "containers": [
                        {"name": "work", "image": "soak:1", "resources": {"requests": requests, "limits": limits}}
                    ],
                },
            },
        },
    }

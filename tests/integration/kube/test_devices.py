"""Device claims and slices on a real API server: the pod watcher's facts of pods and nodes with them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import pytest
from tests.controlplane.fixtures import outside, plane
from tests.controlplane.plane import ControlPlane
from tests.support.kube_http import Json, KubeHttp
from tests.support.kube_objects import node, pod

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import from_kubeconfig
from gpu_autoscaler.kube.protocol import WatchItem
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.pod_watcher.service import PodWatcher

__all__ = ["outside", "plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]

DEVICES = "/apis/resource.k8s.io/v1"
DEFAULT = f"{DEVICES}/namespaces/default"
SECONDS_MAX = 60.0


class WatchedFacts:
    """All facts of the watcher, from its own watches."""

    def __init__(self, watcher: PodWatcher) -> None:
        self.facts: list[Fact] = []
        self._watcher = watcher
        self._tasks = [asyncio.create_task(self._follow(source)) for source in watcher.sources()]

    async def _follow(self, source: AsyncIterator[WatchItem]) -> None:
        assert isinstance(source, AsyncGenerator)
        async with contextlib.aclosing(source) as items:  # with its connection
            async for item in items:
                self.facts += await self._watcher.on_item(item)

    async def until(self, is_said: Callable[[Fact], bool]) -> None:
        """Wait for a fact."""
        async with asyncio.timeout(SECONDS_MAX):
            while not any(map(is_said, self.facts)):
                await asyncio.sleep(0.05)

    async def end(self) -> None:
        """Stop watching."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def told(plane: ControlPlane) -> AsyncIterator[WatchedFacts]:
    """The watcher at work."""
    kube = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
    told = WatchedFacts(PodWatcher(kube, await kube.cluster()))
    yield told
    await told.end()
    await kube.close()
    await asyncio.sleep(0.5)  # connections under TLS close a moment later (aiohttp, "Graceful Shutdown")


def template(name: str, **exactly: object) -> Json:
    """A ResourceClaimTemplate with one request."""
    requests = [{"name": "gpus", "exactly": {"deviceClassName": "gpu.nvidia.com", **exactly}}]
    return {"metadata": {"name": name}, "spec": {"spec": {"devices": {"requests": requests}}}}


def claiming(name: str, of: str) -> Json:
    """A pod that claims by a template."""
    return pod(name, resourceClaims=[{"name": "gpus", "resourceClaimTemplateName": of}])


async def test_a_pod_that_claims_gpus_asks_for_them(outside: KubeHttp, told: WatchedFacts) -> None:
    """Reported with what is missing, then with count and model once class and template exist; others with a reason."""
    pods = "/api/v1/namespaces/default/pods"
    await outside.made(pods, claiming("plain", "four"))
    await told.until(lambda fact: isinstance(fact, PodObserved) and "does not exist" in fact.device_trouble)
    product = 'device.attributes["gpu.nvidia.com"].productName == "NVIDIA H100 80GB HBM3"'
    await outside.made(f"{DEVICES}/deviceclasses", {"metadata": {"name": "gpu.nvidia.com"}, "spec": {}})
    await outside.made(
        f"{DEFAULT}/resourceclaimtemplates",
        template("four", allocationMode="ExactCount", count=4, selectors=[{"cel": {"expression": product}}]),
    )
    await outside.made(f"{DEFAULT}/resourceclaimtemplates", template("every", allocationMode="All"))
    await outside.made(pods, claiming("greedy", "every"))

    await told.until(
        lambda fact: (
            isinstance(fact, PodObserved)
            and (fact.name, fact.requests.gpu_count, fact.gpu_model, fact.device_trouble) == ("plain", 4, "H100", "")
        )
    )
    await told.until(lambda fact: isinstance(fact, PodObserved) and "allocationMode: All" in fact.device_trouble)


async def test_a_node_has_the_gpus_that_its_driver_offers(outside: KubeHttp, told: WatchedFacts) -> None:
    """No device plugin counts them; they appear late, and disappear with their slice."""
    bare = node("dra", gpus=0)
    await outside.made("/api/v1/nodes", bare)
    await told.until(lambda fact: isinstance(fact, NodeObserved) and fact.name == "dra")
    devices = [
        {
            "name": f"gpu-{number}",
            "attributes": {"type": {"string": "gpu"}, "productName": {"string": "NVIDIA H100 80GB HBM3"}},
        }
        for number in range(8)
    ]
    pool = {"name": "dra", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "gpu.nvidia.com", "nodeName": "dra", "pool": pool, "devices": devices}
    await outside.made(f"{DEVICES}/resourceslices", {"metadata": {"name": "dra-gpus"}, "spec": spec})
    await told.until(
        lambda fact: (
            isinstance(fact, NodeObserved)
            and (fact.name, fact.allocatable.gpu_count, fact.gpu_model) == ("dra", 8, "H100")
        )
    )
    told.facts.clear()
    await outside.send("DELETE", f"{DEVICES}/resourceslices/dra-gpus")
    await told.until(
        lambda fact: isinstance(fact, NodeObserved) and (fact.name, fact.allocatable.gpu_count) == ("dra", 0)
    )


async def test_of_pods_that_share_a_claim_one_asks_for_all(outside: KubeHttp, told: WatchedFacts) -> None:
    """With the models that have the memory; the other names the pod it shares with, until that one is gone."""
    large = "device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('100Gi')) >= 0"
    await outside.send("POST", f"{DEVICES}/deviceclasses", {"metadata": {"name": "gpu.nvidia.com"}, "spec": {}})
    claim = template("shared", count=2, selectors=[{"cel": {"expression": large}}])
    await outside.made(f"{DEFAULT}/resourceclaims", {"metadata": claim["metadata"], "spec": claim["spec"]["spec"]})
    pods = "/api/v1/namespaces/default/pods"
    for name in ("first", "second"):
        await outside.made(pods, pod(name, resourceClaims=[{"name": "gpus", "resourceClaimName": "shared"}]))

    def now() -> dict[str, PodObserved]:
        return {fact.name: fact for fact in told.facts if isinstance(fact, PodObserved)}

    def asking() -> list[str]:
        """Return the pods that request all of it, as last reported."""
        wanted = (2, ("B200", "H200"), "")
        return [
            name
            for name, fact in now().items()
            if (fact.requests.gpu_count, fact.gpu_models, fact.device_trouble) == wanted
        ]

    def follower() -> str | None:
        """Who follows the one that asks."""
        (one, *more) = asking() or [""]
        words = f"default/shared is shared with pod {one}"
        return None if more else next((name for name, fact in now().items() if words in fact.device_trouble), None)

    # Instants of Kubernetes are whole seconds: of two in one of them either may be the first, also when it came later.
    await told.until(lambda _: follower() is not None)
    second = follower()
    (first,) = asking()
    await outside.send("DELETE", f"{pods}/{first}?gracePeriodSeconds=0")
    await told.until(lambda _: second in asking())

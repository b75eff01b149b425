"""Very many pods that go at once on a real API server: what the watcher's own watch makes of it."""

import asyncio
import contextlib
import resource
import time
from collections import Counter

import aiohttp
import pytest
from tests.controlplane.fixtures import plane
from tests.controlplane.plane import ControlPlane
from tests.support.kube_http import KubeHttp
from tests.support.kube_objects import node, pod

from gpu_autoscaler.events.pod import PodGone, PodListed, PodObserved
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import from_kubeconfig
from gpu_autoscaler.kube.protocol import PODS, Cluster
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.pod_watcher.service import PodWatcher

__all__ = ["plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.sweep, pytest.mark.timeout(600)]

PODS_COUNT = 2_000  # 10,000: `make bench CASE=HELD`
PATH = "/api/v1/namespaces/default/pods"
AT_ONCE_COUNT = 32
SECONDS_MAX = 300.0


def used_seconds() -> float:
    """CPU time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def test_pods_deleted_at_once_are_each_reported_once(
    plane: ControlPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pods deleted by one call of a user: none is missed, none is reported twice, and nothing of them is kept."""
    kube = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
    watcher = PodWatcher(kube, Cluster(installation="i", epoch=7))
    told: Counter[str] = Counter()
    seen: set[str] = set()

    async def follow() -> None:
        async for item in kube.watch(PODS):
            for fact in await watcher.on_item(item):
                if isinstance(fact, PodGone):
                    told[fact.pod_uid] += 1
                elif isinstance(fact, PodObserved):
                    seen.add(fact.pod_uid)
                elif isinstance(fact, PodListed):  # whoever is not in it is gone as well
                    told.update(seen - set(fact.pod_uids) - told.keys())

    turns = asyncio.Semaphore(AT_ONCE_COUNT)
    async with aiohttp.ClientSession() as session:
        outside = KubeHttp(session, plane.url, plane.admin_token, plane.tls)
        await outside.made("/api/v1/nodes", node("full"))

        async def one(number: int) -> None:
            async with turns:
                await outside.made(PATH, pod(f"p{number}", gpus=1, nodeName="full"))

        following = asyncio.create_task(follow())
        try:
            await asyncio.gather(*(one(number) for number in range(PODS_COUNT)))
            async with asyncio.timeout(SECONDS_MAX):
                while len(seen) < PODS_COUNT:
                    await asyncio.sleep(0.1)
            began, used = time.monotonic(), used_seconds()
            deleting = asyncio.create_task(outside.send("DELETE", f"{PATH}?gracePeriodSeconds=0"))
            async with asyncio.timeout(SECONDS_MAX):
                while told.total() < PODS_COUNT:
                    await asyncio.sleep(0.05)
            took, used = time.monotonic() - began, used_seconds() - used
            with capsys.disabled():
                memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
                print(f" {PODS_COUNT} pods gone: {took:.1f} s, {used:.2f} s of CPU, at most {memory_mib} MiB")  # noqa: T201
            assert (await deleting).status == 200
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
    await kube.close()
    assert set(told) == seen
    assert set(told.values()) == {1}

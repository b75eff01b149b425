"""Idle workloads on a real API server with its controllers: announced on the pod, ended through the owner."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from tests.controlplane.fixtures import kube, outside
from tests.controlplane.plane import EVERYTHING, ControlPlane, running_plane
from tests.support.idle_workloads import KINDS, announce_and_end
from tests.support.kube_http import KubeHttp

from gpu_autoscaler.events.pod import PodListed
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.protocol import NAMESPACES, PODS, Bookmark, Cluster, Listed
from gpu_autoscaler.model.labels import END_IDLE_WORKLOADS
from gpu_autoscaler_services.pod_watcher.service import PodWatcher

__all__ = ["kube", "outside"]
pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with the controllers of Deployments, StatefulSets and Jobs."""
    with running_plane(tmp_path_factory.mktemp("plane"), EVERYTHING) as running:
        yield running


async def test_a_namespace_opts_in_by_its_label(outside: KubeHttp, kube: KubeClient) -> None:
    """Others are not even sent; without the label it is out again."""
    watcher = PodWatcher(kube, Cluster(installation="i", epoch=7), are_namespaces_watched=True)
    items = list[str]()

    async def opted_in() -> tuple[str, ...] | None:
        """Take the next change, and return what a list of the pods publishes then."""
        item = await anext(watch)
        while isinstance(item, Bookmark):
            item = await anext(watch)
        assert await watcher.on_item(item) == []
        items.append(type(item).__name__)
        (fact,) = await watcher.on_item(Listed(kind=PODS, objects=(), version=len(items), seen_at=item.seen_at))
        assert isinstance(fact, PodListed)
        return fact.opted_in_namespaces

    source = kube.watch(NAMESPACES, label_selector=END_IDLE_WORKLOADS)
    async with asyncio.timeout(60), contextlib.aclosing(source) as watch:  # type: ignore[type-var]  # it is a generator
        assert await opted_in() == ()
        await outside.made("/api/v1/namespaces", {"metadata": {"name": "unlabeled"}})
        named = {"name": "notebooks", "labels": {END_IDLE_WORKLOADS: "true"}}
        await outside.made("/api/v1/namespaces", {"metadata": named})
        assert await opted_in() == ("notebooks",)
        await outside.patched("/api/v1/namespaces/notebooks", {"metadata": {"labels": {END_IDLE_WORKLOADS: None}}})
        assert await opted_in() == ()
    assert items == ["Listed", "Changed", "Deleted"]
    await kube.close()
    await asyncio.sleep(0.5)  # connections under TLS close a moment later (aiohttp, "Graceful Shutdown")


@pytest.mark.parametrize("kind", KINDS)
async def test_an_idle_workload_ends_through_its_owner(outside: KubeHttp, kube: KubeClient, kind: str) -> None:
    """Scaled to zero or deleted, so that no controller creates its pods again; a pod alone is deleted."""
    await announce_and_end(outside, kube, kind)

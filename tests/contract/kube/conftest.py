"""The clusters that the contract is checked against: simcluster, and a real control plane. Tests see HTTP alone."""

import contextlib
import functools
import itertools
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import aiohttp
import pytest
from tests.controlplane.served import Served, real_kubernetes
from tests.support.kube_http import KubeHttp
from tests.support.kube_objects import READY, Json, node

_number = itertools.count(1)

# Cluster time twice as fast: long enough before a node without a lease counts as dead, short enough to wait for.
_CLOCK_FACTOR = "2"


@contextlib.contextmanager
def simcluster() -> Iterator[Served]:
    """Run simcluster as a separate process."""
    command = [sys.executable, "-m", "gpu_autoscaler.simcluster", "--clock-factor", _CLOCK_FACTOR]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Served(url=process.stdout.readline().strip())
        finally:
            process.terminate()


CLUSTERS: dict[str, Callable[[], contextlib.AbstractContextManager[Served]]] = {
    "simcluster": simcluster,
    "kubernetes": real_kubernetes,
}


@pytest.fixture(scope="session")
def clusters() -> Iterator[Callable[[str], Served]]:
    """Starts a cluster at its first use; all of them run until the last test. A fixture with parameters would stop the
    one for the other in every module, and start it again."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda name: stack.enter_context(CLUSTERS[name]()))


@pytest.fixture(scope="session", params=CLUSTERS)
def served(request: pytest.FixtureRequest, clusters: Callable[[str], Served]) -> Served:
    """A running cluster."""
    return clusters(request.param)


@pytest.fixture(params=CLUSTERS)
async def fresh_kube(request: pytest.FixtureRequest) -> AsyncIterator[KubeHttp]:
    """A client of a cluster in which nothing has happened yet."""
    with CLUSTERS[request.param]() as cluster:
        async with aiohttp.ClientSession() as session:
            yield KubeHttp(session, cluster.url, cluster.token, cluster.tls)


@pytest.fixture
async def kube(served: Served) -> AsyncIterator[KubeHttp]:
    """A client of the cluster that may do everything."""
    async with aiohttp.ClientSession() as session:
        yield KubeHttp(session, served.url, served.token, served.tls)


@pytest.fixture
async def namespace(kube: KubeHttp) -> AsyncIterator[str]:
    """A namespace of the test's own, gone afterwards."""
    name = f"contract-{os.getpid()}-{next(_number)}"
    await kube.made("/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    await kube.send("DELETE", f"/api/v1/namespaces/{name}")


class Nodes:
    """Makes nodes for one test."""

    def __init__(self, kube: KubeHttp) -> None:
        self._kube = kube
        self.names: list[str] = []

    async def ready(self, *, gpus: int = 8, labels: Json | None = None) -> str:
        """Register a node, report it ready, and return its name once pods may land on it."""
        name = f"node-{os.getpid()}-{next(_number)}"
        await self._kube.made("/api/v1/nodes", node(name, gpus=gpus, labels=labels))
        self.names.append(name)
        path = f"/api/v1/nodes/{name}"
        await self._kube.patched(f"{path}/status", READY, "application/strategic-merge-patch+json")
        await self._kube.until(path, lambda item: not item["spec"].get("taints"))
        return name


@pytest.fixture
async def nodes(kube: KubeHttp) -> AsyncIterator[Nodes]:
    """A maker of nodes; what it made is gone afterwards."""
    maker = Nodes(kube)
    yield maker
    for name in maker.names:
        await kube.send("DELETE", f"/api/v1/nodes/{name}")

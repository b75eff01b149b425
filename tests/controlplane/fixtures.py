"""Control planes and those who speak to them, as fixtures. A test module imports what it needs."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from tests.controlplane.plane import ControlPlane, running_plane
from tests.support.kube_http import KubeHttp

from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import from_kubeconfig
from gpu_autoscaler.runtime.clock import Clock


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """An API server with its etcd, for the module: nothing acts on its objects but the tests."""
    with tempfile.TemporaryDirectory(prefix="plane-") as folder, running_plane(Path(folder)) as running:
        yield running


@pytest.fixture
async def outside(plane: ControlPlane) -> AsyncIterator[KubeHttp]:
    """Everybody else: users, and the kubelets, drivers and controllers that a plane does not have."""
    async with aiohttp.ClientSession() as session:
        yield KubeHttp(session, plane.url, plane.admin_token, plane.tls)


@pytest.fixture
async def kube(plane: ControlPlane) -> AsyncIterator[KubeClient]:
    """Our client."""
    client = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
    yield client
    await client.close()

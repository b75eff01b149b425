"""Fixtures of control planes and their clients. Test modules import the ones that they need."""

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
    """An API server with etcd for the module, without controllers."""
    with tempfile.TemporaryDirectory(prefix="plane-") as folder, running_plane(Path(folder)) as running:
        yield running


@pytest.fixture
async def outside(plane: ControlPlane) -> AsyncIterator[KubeHttp]:
    """Client for users, kubelets, drivers and controllers that the plane lacks."""
    async with aiohttp.ClientSession() as session:
        yield KubeHttp(session, plane.url, plane.admin_token, plane.tls)


@pytest.fixture
async def kube(plane: ControlPlane) -> AsyncIterator[KubeClient]:
    """Client under test."""
    client = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
    yield client
    await client.close()

"""Idle workloads on a real API server with its controllers: announced on the pod, ended through the owner."""

from collections.abc import Iterator

import pytest
from tests.controlplane.fixtures import kube, outside
from tests.controlplane.plane import EVERYTHING, ControlPlane, running_plane
from tests.support.idle_workloads import KINDS, announce_and_end
from tests.support.kube_http import KubeHttp

from gpu_autoscaler.kube.client import KubeClient

__all__ = ["kube", "outside"]
pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with the controllers of Deployments, StatefulSets and Jobs."""
    with running_plane(tmp_path_factory.mktemp("plane"), EVERYTHING) as running:
        yield running


@pytest.mark.parametrize("kind", KINDS)
async def test_an_idle_workload_ends_through_its_owner(outside: KubeHttp, kube: KubeClient, kind: str) -> None:
    """Scaled to zero or deleted, so that no controller creates its pods again; a pod alone is deleted."""
    await announce_and_end(outside, kube, kind)

"""NodeOverlays on a real API server with their published definition, compared with real Karpenter."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.bench.peers import real
from tests.controlplane.fixtures import plane
from tests.controlplane.plane import ControlPlane, running_plane
from tests.support.karpenter import needed_karpenter, options_in, sold
from tests.support.runners import until

from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import from_kubeconfig
from gpu_autoscaler.providers.karpenter.catalog import Catalog
from gpu_autoscaler.providers.karpenter.overlays import NO_POOL, Overlays, OverlayStatus, apply_overlays

__all__ = ["plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]

TYPE, ZONE = "node.kubernetes.io/instance-type", "topology.kubernetes.io/zone"
CAPACITY, POOL = "karpenter.sh/capacity-type", "karpenter.sh/nodepool"
USD = 1_000_000
OVERLAYS: Mapping[str, dict[str, Any]] = {
    "spot-is-risky": {"requirements": [(CAPACITY, "In", ["spot"])], "priceAdjustment": "+50%", "weight": 5},
    "zone-b-is-far": {"requirements": [(ZONE, "In", ["zone-b"])], "priceAdjustment": "+0.5", "weight": 2},
    "agreed": {"requirements": [(TYPE, "In", ["gpu-4x"])], "price": "1.5", "weight": 9},
    "agreed-too": {"requirements": [(TYPE, "NotIn", ["gpu-1x"])], "price": "1.2", "weight": 9},
    "shared": {"requirements": [(TYPE, "In", ["gpu-1x"])], "capacity": {"nvidia.com/gpu.shared": 4}},
    "of-a-pool": {"requirements": [(POOL, "In", ["default"])], "priceAdjustment": "-100%", "weight": 50},
}


def manifest(name: str) -> str:
    """As `kubectl apply` takes it."""
    spec = dict(OVERLAYS[name])
    asked = [{"key": key, "operator": operator, "values": values} for key, operator, values in spec["requirements"]]
    item = {"apiVersion": "karpenter.sh/v1alpha1", "kind": "NodeOverlay", "metadata": {"name": name}}
    return json.dumps(item | {"spec": spec | {"requirements": asked}})


def reader(plane: ControlPlane) -> KubeClient:
    """A client of this plane."""
    return KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=lambda: datetime.now(UTC))


async def test_where_there_are_none_the_file_alone_is_heard(plane: ControlPlane, tmp_path: Path) -> None:
    """The definition is not installed: nothing is wrong with that."""
    kube, catalog = reader(plane), Catalog(str(options_in(tmp_path).offers_path))
    assert list(await Overlays(kube).apply_to(catalog, NO_POOL)) == sold(options_in(tmp_path))
    await kube.close()


@pytest.fixture(scope="module")
def served() -> Iterator[ControlPlane]:
    """Karpenter with a pool that may buy nothing, and with its overlays switched on."""
    needed_karpenter()
    with tempfile.TemporaryDirectory(prefix="overlays-") as name, running_plane(Path(name) / "plane") as running:
        offers = sold(options_in(Path(name)))
        with real.running(running, offers, {"nvidia.com/gpu": "0"}, gates="NodeOverlay=true"):
            for one in OVERLAYS:
                running.kubectl("apply", "--validate=strict", "-f", "-", text=manifest(one))
            yield running


async def test_ours_and_karpenters_opinions_are_the_same(served: ControlPlane, tmp_path: Path) -> None:
    """Which are in conflict; what it refuses is not heeded; prices and resources are as they say."""
    kube, catalog = reader(served), Catalog(str(options_in(tmp_path).offers_path))

    async def judged() -> bool:
        return all(any(c.type == "ValidationSucceeded" for c in one.status.conditions) for one in await overlays.read())

    overlays = Overlays(kube)
    await until(judged)
    read = await overlays.read()
    refused = {one.metadata.name for one in read if one.is_refused}
    unjudged = [msgspec.structs.replace(one, status=OverlayStatus()) for one in read]
    ours = apply_overlays(catalog.offers(), unjudged, catalog.labels(), {POOL: "default"}).ignored
    assert refused == set(ours) == {"agreed"}

    found = await overlays.look(catalog, NO_POOL)
    assert {one.key: (one.price_micro_usd_per_hour or 0) / USD for one in found.offers} == {
        "gpu-1x/zone-a/on-demand": 1.0,
        "gpu-1x/zone-b/on-demand": 1.5,
        "gpu-1x/zone-a/spot": 0.6,
        "gpu-1x/zone-b/spot": 0.6,  # the heavier one has spoken
        "gpu-4x/zone-a/on-demand": 1.2,
    }
    assert {one.instance_type: one.resources.slices for one in found.offers} == {
        "gpu-1x": (("nvidia.com/gpu.shared", 4),),
        "gpu-4x": (),
    }
    assert set(found.ignored) == refused
    await kube.close()

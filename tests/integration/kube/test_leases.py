"""Who leads, shown as a Lease on a real API server."""

import asyncio
from datetime import timedelta

import pytest
from tests.controlplane.fixtures import kube, plane
from tests.support.stories import T0

from gpu_autoscaler.kube import leases
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.leases import LeaseMirror, mirroring
from gpu_autoscaler.kube.protocol import NotFound
from gpu_autoscaler.runtime.clock import Clock

__all__ = ["kube", "plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]

PATH = "/apis/coordination.k8s.io/v1/namespaces/default/leases"


class OnTheBus:
    """The lease that decides."""

    holder = "a/1"
    is_held = False


async def test_whoever_leads_is_seen_and_how_often_that_changed(kube: KubeClient) -> None:
    """Made once, renewed by the same holder, taken over by the next."""
    shown = LeaseMirror(kube, "default", "leader")
    await shown.write("a/1", T0)
    await shown.write("a/1", T0 + timedelta(seconds=5))
    first = (await kube.read(f"{PATH}/leader"))["spec"]
    await shown.write("b/2", T0 + timedelta(seconds=30))
    second = (await kube.read(f"{PATH}/leader"))["spec"]

    assert (first["holderIdentity"], first["leaseTransitions"]) == ("a/1", 0)
    assert first["acquireTime"] < first["renewTime"]
    assert (second["holderIdentity"], second["leaseTransitions"]) == ("b/2", 1)
    assert second["acquireTime"] == second["renewTime"] > first["renewTime"]


async def test_only_what_is_held_on_the_bus_is_shown(kube: KubeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby writes nothing; once it holds the bus lease, the Lease object shows it."""
    monkeypatch.setattr(leases, "RENEWAL_SECONDS", 0.05)
    bus = OnTheBus()
    async with mirroring(LeaseMirror(kube, "default", "standby"), bus, Clock().now):
        await asyncio.sleep(0.5)
        with pytest.raises(NotFound):
            await kube.read(f"{PATH}/standby")
        bus.is_held = True
        async with asyncio.timeout(60):
            while (await _holder(kube)) != "a/1":
                await asyncio.sleep(0.05)


async def _holder(kube: KubeClient) -> str | None:
    try:
        return str((await kube.read(f"{PATH}/standby"))["spec"]["holderIdentity"])
    except NotFound:
        return None

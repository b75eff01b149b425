"""Provider contract of the Karpenter driver in mode limits: it writes limits of NodePools, Karpenter makes the claims.

Runs real Karpenter with pending pods on a real API server.
"""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.bench.peers import real
from tests.contract.provider.contract import OURS, THEIRS, ProviderContract, Rig, order, shown
from tests.contract.provider.test_karpenter import CLAIMS, Cluster, KarpenterRig
from tests.controlplane.plane import running_plane
from tests.support.karpenter import needed_karpenter, options_in, sold
from tests.support.karpenter_pools import GPU, POOLS, apply_pools, node_pool
from tests.support.kube_http import MERGE, Json, KubeHttp
from tests.support.kube_objects import pod
from tests.support.kube_proxy import proxied

from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.providers.karpenter.limits_mode import LimitsModeCapacity
from gpu_autoscaler.providers.karpenter.node_pools import ORDERS, OWNER, WRITTEN
from gpu_autoscaler.providers.karpenter.options import KarpenterOptions
from gpu_autoscaler.providers.protocol import LaunchRefused, RefusalKind

# `test_karpenter.py` has the same contract with claims of our own.
pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.sweep, pytest.mark.timeout(300)]

PODS = "/api/v1/namespaces/default/pods"
ZONES = ("zone-a", "zone-b")
NAMES = {OURS: ("ours-a", "ours-b"), THEIRS: ("theirs-a",)}
WAITING_COUNT = 4  # pods in each zone: more than a test buys
NUDGE_SECONDS = 0.5


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Nothing acts on it but Karpenter: its nodes never get ready, and pods wait for ever."""
    needed_karpenter()
    with tempfile.TemporaryDirectory(prefix="limits-") as name, running_plane(Path(name) / "plane") as plane:
        options = options_in(Path(name))
        with real.running(plane, sold(options), None) as process:
            apply_pools(
                plane,
                node_pool("ours-a", "gpu-1x", "zone-a"),
                node_pool("ours-b", "gpu-1x", "zone-b"),
                node_pool("theirs-a", "gpu-1x", "zone-a"),
            )
            yield Cluster(plane, options, process.pid)


class LimitsRig(KarpenterRig):
    """Two pools that are ours and one of another installation, and pods that any of them could take."""

    capacity_code = "NoPendingPod"
    ours: LimitsModeCapacity
    theirs: LimitsModeCapacity

    def provider(self, installation: str, options: KarpenterOptions | None = None) -> LimitsModeCapacity:
        """A driver that writes to the pools of its installation."""
        limited = msgspec.structs.replace(options or self.options, mode="limits", node_pools=NAMES[installation])
        return LimitsModeCapacity(limited, Connection(base_url=self.proxy.url), installation=installation, now=self.now)

    async def refuse(self, pattern: str, kind: RefusalKind = "capacity") -> None:
        """No pod waits for it; or somebody has written to its pool."""
        for name, zone in zip(NAMES[OURS], ZONES, strict=True):
            if fnmatchcase(f"gpu-1x/{zone}/on-demand", pattern):
                if kind == "capacity":
                    await self._no_pods(zone)
                else:
                    await self.allow(name, 7)

    async def refuse_nothing(self) -> None:
        """Pods wait."""
        for zone in ZONES:
            await self.pods(zone)

    async def pods(self, zone: str, count: int = WAITING_COUNT) -> None:
        """Create `count` unschedulable pods."""
        for number in range(count):
            item = pod(f"{zone}-{number}", gpus=1, nodeSelector={"topology.kubernetes.io/zone": zone})
            item["spec"]["tolerations"] = [{"operator": "Exists"}]
            if (await self.kube.send("POST", PODS, item)).status == 201:
                waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                await self.kube.patched(f"{PODS}/{zone}-{number}/status", {"status": {"conditions": [waits]}})

    async def _no_pods(self, zone: str) -> None:
        for number in range(WAITING_COUNT):
            await self.kube.send("DELETE", f"{PODS}/{zone}-{number}", {"gracePeriodSeconds": 0})

    async def nudge(self) -> None:
        """Karpenter looks at a pod that waits every ten seconds, and whenever it changes."""
        for number in range(10**9):
            for zone in ZONES:
                note = {"metadata": {"annotations": {"example.com/nudge": str(number)}}}
                await self.kube.send("PATCH", f"{PODS}/{zone}-0", note, content_type=MERGE)
            await asyncio.sleep(NUDGE_SECONDS)

    async def allow(self, name: str, gpus: int) -> None:
        """Somebody writes a limit."""
        await self.kube.patched(f"{POOLS}/{name}", {"spec": {"limits": {GPU: str(gpus)}}})

    async def allowed(self, name: str = "ours-a") -> int:
        """What the pool may have."""
        return int((await self.kube.read(f"{POOLS}/{name}"))["spec"]["limits"][GPU])

    async def claims(self, name: str = "ours-a") -> list[Json]:
        """What the pool has."""
        found: list[Json] = (await self.kube.read(f"{CLAIMS}?labelSelector=karpenter.sh/nodepool={name}"))["items"]
        return found

    async def clear(self) -> None:
        """Hand the pools back, then as ever."""
        notes: dict[str, Any] = {"metadata": {"annotations": dict.fromkeys((OWNER, WRITTEN, ORDERS))}}
        for name in (*NAMES[OURS], *NAMES[THEIRS]):
            await self.kube.patched(f"{POOLS}/{name}", notes | {"spec": {"limits": {GPU: "0"}}})
        await super().clear()


@pytest.fixture
async def rig(cluster: Cluster) -> AsyncIterator[LimitsRig]:
    """Pods that wait, and nothing else that the test before left."""
    async with aiohttp.ClientSession() as session, proxied(cluster.plane) as proxy:
        kube = KubeHttp(session, cluster.plane.url, cluster.plane.admin_token, cluster.plane.tls)
        made = LimitsRig(cluster, proxy, kube)
        await made.refuse_nothing()
        nudging = asyncio.create_task(made.nudge())
        yield made
        nudging.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await nudging
        await made.clear()
        await made.ours.close()
        await made.theirs.close()


@pytest.mark.cloud("karpenter", calls=("get NodePool", "patch NodePool"), errors=())
class TestKarpenterLimitsMode(ProviderContract):
    """The inherited promises; the fixture is the module's."""

    async def test_a_large_fleet_is_listed_completely(self, rig: Rig) -> None:
        """Over two pages."""
        await rig.stock(await order(rig), 600)
        assert len({instance.provider_id for instance in await rig.ours.instances(OURS)}) == 600

    async def test_an_instance_listed_late_is_not_launched_again(self, rig: Rig) -> None:
        """Nothing shows up late in an API server: what is launched is listed at once."""
        made = await rig.ours.launch(await order(rig))
        assert (await shown(rig, made.provider_id)).action_id == "a1"

    @pytest.mark.parametrize("kind", ["capacity", "configuration"])
    async def test_a_refusal_has_its_kind(self, rig: Rig, kind: RefusalKind) -> None:
        """No pending pod, or another writer. The cloud's refusals appear in the claim only."""
        await super().test_a_refusal_has_its_kind(rig, kind)


# ---- what this mode promises beside


async def test_the_limit_is_claims_plus_pending_orders(rig: LimitsRig) -> None:
    """Raised by each order; lowered before each deletion, so that pending pods get no replacement."""
    orders = [await order(rig, f"a{number}") for number in range(3)]
    made = await asyncio.gather(*map(rig.ours.launch, orders))
    assert (await rig.allowed(), len(await rig.claims())) == (3, 3)
    assert sorted(str(instance.action_id) for instance in await rig.ours.instances(OURS)) == ["a0", "a1", "a2"]
    rig.proxy.changes.clear()
    await rig.ours.terminate(made[0].provider_id, now=rig.now())
    tried = [(method, path.rpartition("/")[0]) for method, path, _ in rig.proxy.changes]
    done = [change for change, _ in groupby(tried)]  # repeated if Karpenter changes the object at the same time
    assert done == [("PATCH", POOLS), ("PATCH", CLAIMS), ("DELETE", CLAIMS)]
    assert json.loads(rig.proxy.changes[0][2])["spec"]["limits"] == {GPU: "2"}
    assert "uid" in json.loads(rig.proxy.changes[-1][2])["preconditions"]
    await rig.wait(5)
    assert await rig.allowed() == 2
    ended = {instance.action_id: instance.state == "terminated" for instance in await rig.ours.instances(OURS)}
    assert ended == {"a0": True, "a1": False, "a2": False}


async def test_karpenter_s_own_replacement_becomes_an_order(rig: LimitsRig) -> None:
    """Within our limit: an order of its own, in our list; the first token launches nothing more."""
    made = await rig.ours.launch(await order(rig))
    await rig.end_unexpectedly(made.provider_id)

    async def replaced() -> bool:
        return any(
            has_machine(claim) and claim["status"]["providerID"] != made.provider_id for claim in await rig.claims()
        )

    await until_true(replaced)
    listed = {instance.provider_id: instance for instance in await rig.ours.instances(OURS)}
    (successor,) = listed.keys() - {made.provider_id}
    assert listed[successor].action_id not in (None, "a1")
    assert listed[successor].price_micro_usd_per_hour == made.price_micro_usd_per_hour
    assert await rig.allowed() == 1
    again = await rig.ours.launch(await order(rig))
    assert again.provider_id == made.provider_id


def has_machine(claim: Json) -> bool:
    """Karpenter has launched it."""
    return "providerID" in claim.get("status", {})


async def test_the_limit_of_a_shrunken_pool_is_lowered(rig: LimitsRig) -> None:
    """At the next list."""
    made = await rig.ours.launch(await order(rig))
    await rig.refuse("*")
    await rig.end_unexpectedly(made.provider_id)
    await rig.wait(1)

    async def lowered() -> bool:
        await rig.ours.instances(OURS)
        return await rig.allowed() == 0

    await until_true(lowered)


async def test_a_limit_changed_by_others_is_not_overwritten(rig: LimitsRig) -> None:
    """Refused by name; existing nodes can be terminated. Restored, it is used again."""
    made = await rig.ours.launch(await order(rig))
    await rig.allow("ours-a", 1000)
    wanted = await order(rig, "a2")
    with pytest.raises(LaunchRefused, match="we wrote 1: somebody else writes it") as refused:
        await rig.ours.launch(wanted)
    assert (refused.value.code, refused.value.kind) == ("LimitsChanged", "configuration")
    await rig.ours.instances(OURS)
    await rig.ours.terminate(made.provider_id, now=rig.now())
    assert await rig.allowed() == 1000


async def test_a_pool_is_handed_over_with_its_current_size_as_limit(rig: LimitsRig) -> None:
    """More would be launched for any pod, and not for our orders."""
    await rig.refuse("*", "configuration")
    with pytest.raises(LaunchRefused, match=r"to hand its limits over, set spec\.limits"):
        await rig.ours.launch(await order(rig))


async def test_a_pool_has_one_writer(rig: LimitsRig) -> None:
    """Another installation that names the same pool is refused with the first one's name."""
    await rig.ours.launch(await order(rig))
    limited = msgspec.structs.replace(rig.options, mode="limits", node_pools=("ours-a",))
    other = LimitsModeCapacity(limited, Connection(base_url=rig.proxy.url), installation=THEIRS, now=rig.now)
    with pytest.raises(LaunchRefused, match=f"are written by installation {OURS}"):
        await other.launch(await order(rig, "b1", installation=THEIRS))
    await other.close()
    assert await rig.allowed() == 1


async def test_a_restart_finds_pending_orders(rig: LimitsRig) -> None:
    """The order is in the pool, written with the limit: another process launches once."""
    wanted = await order(rig)
    await rig.lose_next_answer()
    with pytest.raises(TransientError):
        await rig.ours.launch(wanted)
    assert await rig.allowed() == 1
    another = rig.provider(OURS)
    made = await another.launch(wanted)
    assert [instance.provider_id for instance in await another.instances(OURS)] == [made.provider_id]
    assert (await rig.allowed(), len(await rig.claims())) == (1, 1)
    await another.close()


async def test_a_launched_claim_is_found_without_a_pending_pod(rig: LimitsRig) -> None:
    """The answer was lost, the machine was launched and the pod runs there: the order has its instance."""
    wanted = await order(rig)
    await rig.lose_next_answer()
    with pytest.raises(TransientError):
        await rig.ours.launch(wanted)

    async def made() -> bool:
        return any(map(has_machine, await rig.claims()))

    await until_true(made)
    await rig.refuse("*")
    assert (await rig.ours.launch(wanted)).action_id == wanted.action_id
    assert (await rig.allowed(), len(await rig.claims())) == (1, 1)


async def test_an_order_that_karpenter_ignores_is_withdrawn(rig: LimitsRig) -> None:
    """The pending pod does not fit after all: the limit is lowered and read back before the refusal."""
    await rig.refuse("*")
    item = pod("elsewhere", gpus=1, nodeSelector={"example.com/rack": "7"})
    await rig.kube.made(PODS, item)
    hasty = rig.provider(OURS, msgspec.structs.replace(rig.options, launch_seconds_max=2.0))
    with pytest.raises(LaunchRefused) as refused:
        await hasty.launch(await order(rig))
    await hasty.close()
    await rig.kube.send("DELETE", f"{PODS}/elsewhere", {"gracePeriodSeconds": 0})
    assert refused.value.code == "NothingLaunched"
    assert (await rig.allowed(), await rig.claims()) == (0, [])
    notes = (await rig.kube.read(f"{POOLS}/ours-a"))["metadata"]["annotations"]
    assert (notes[ORDERS], notes[WRITTEN]) == ("", "0")


async def test_a_pool_must_have_the_order_s_labels(rig: LimitsRig) -> None:
    """A label that its template lacks is named, and nothing is written."""
    wanted = msgspec.structs.replace(await order(rig), labels=(("team", "language"),))
    with pytest.raises(LaunchRefused, match="nodes of NodePool ours-a lack label team=language"):
        await rig.ours.launch(wanted)
    assert await rig.allowed() == 0


async def until_true(probe: Any) -> None:  # noqa: ANN401 - a coroutine function
    """Wait for it, for a minute at the most."""
    async with asyncio.timeout(60):
        while not await probe():
            await asyncio.sleep(0.2)

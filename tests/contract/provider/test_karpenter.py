"""Provider contract of the Karpenter driver, with real Karpenter and API server behind a proxy with faults."""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.bench.peers import real
from tests.contract.provider.contract import OURS, THEIRS, ProviderContract, Rig, Trouble, order, shown
from tests.controlplane.plane import ControlPlane, running_plane
from tests.support.karpenter import needed_karpenter, options_in, sold
from tests.support.kube_http import MERGE, Json, KubeHttp
from tests.support.kube_proxy import KubeProxy, proxied

from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.scheduling import Taint
from gpu_autoscaler.providers.karpenter.capacity import KarpenterCapacity
from gpu_autoscaler.providers.karpenter.options import KarpenterOptions, node_class_of
from gpu_autoscaler.providers.karpenter.translate import FINALIZER, OFFER, claim_of, name_of
from gpu_autoscaler.providers.protocol import LaunchRefused, Order, RefusalKind

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]

CLAIMS, NODES = "/apis/karpenter.sh/v1/nodeclaims", "/api/v1/nodes"
CLASS = "/apis/karpenter.kwok.sh/v1alpha1/kwoknodeclasses/default"
KARPENTERS = "karpenter.sh/termination"
TROUBLE: dict[Trouble, int] = {"throttled": 429, "down": 503, "expired": 401}
_SECONDS_MAX = 60.0
_AT_ONCE_COUNT = 32


class Cluster(msgspec.Struct, frozen=True):
    """A control plane on which Karpenter runs, and the settings of who buys there."""

    plane: ControlPlane
    options: KarpenterOptions
    karpenter_pid: int


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Nothing acts on it but Karpenter: its nodes never get ready."""
    needed_karpenter()
    with tempfile.TemporaryDirectory(prefix="karpenter-") as name, running_plane(Path(name) / "plane") as plane:
        options = options_in(Path(name))
        with real.running(plane, sold(options), None) as process:
            yield Cluster(plane, options, process.pid)


class KarpenterRig(Rig):
    """One Karpenter, two installations. Its time is the server's, and what `wait` adds to it."""

    def __init__(self, cluster: Cluster, proxy: KubeProxy, kube: KubeHttp) -> None:
        self.options = cluster.options
        self.proxy = proxy
        self.kube = kube
        self.added = timedelta(0)
        self.ours = self.provider(OURS)
        self.theirs = self.provider(THEIRS)

    def provider(self, installation: str, options: KarpenterOptions | None = None) -> KarpenterCapacity:
        """A driver that asks through the proxy."""
        there = Connection(base_url=self.proxy.url)
        return KarpenterCapacity(options or self.options, there, installation=installation, now=self.now)

    def now(self) -> datetime:
        """The server's time, and what was waited for."""
        return datetime.now(UTC) + self.added

    async def refuse(self, pattern: str, kind: RefusalKind = "capacity") -> None:
        """By claims for what Karpenter cannot make: of a class that is gone it says what it says of a cloud without
        capacity, of a type that it does not know what it says of any other failure. The words are a cloud's."""
        of_class = {"capacity": "InsufficientInstanceCapacity", "quota": "VcpuLimitExceeded"}
        of_type = {"permission": "UnauthorizedOperation", "configuration": "no-such-type"}

        def rewritten(_path: str, body: Json) -> Json:
            if body["kind"] == "NodeClaim" and fnmatchcase(body["metadata"]["annotations"][OFFER], pattern):
                if kind in of_class:
                    body["spec"]["nodeClassRef"]["name"] = of_class[kind]
                else:
                    body["spec"]["requirements"][0]["values"] = [of_type[kind]]
            return body

        self.proxy.rewrite = rewritten

    async def refuse_nothing(self) -> None:
        """As it is asked for."""
        self.proxy.rewrite = lambda _path, body: body

    async def lose_next_answer(self) -> None:
        """Of the next call that changes something."""
        self.proxy.is_next_answer_lost = True

    async def trouble(self, kind: Trouble) -> None:
        """Of the API server."""
        self.proxy.status = TROUBLE[kind]

    async def calm(self) -> None:
        """It works again."""
        self.proxy.status = None

    async def show_after(self, seconds: float) -> None:
        """Nothing is listed late by an API server."""
        raise AssertionError(f"an API server lists what it has at once, not after {seconds:g} s")

    async def end_unexpectedly(self, provider_id: ProviderId) -> None:
        """Somebody deletes the node."""
        node = provider_id.removeprefix("kwok://")
        await self.kube.until(
            f"{NODES}/{node}", lambda seen: KARPENTERS in seen.get("metadata", {}).get("finalizers", ())
        )
        await self.kube.send("DELETE", f"{NODES}/{node}")

    async def stock(self, wanted: Order, count: int) -> None:
        """Claims of a class that this Karpenter leaves alone, as if another had launched them."""
        turns = asyncio.Semaphore(_AT_ONCE_COUNT)

        async def one(number: int) -> None:
            each = msgspec.structs.replace(wanted, action_id=ActionId(f"stock-{number}"))
            claim = claim_of(each, node_class_of(self.options))
            claim["spec"]["nodeClassRef"] = {"group": "elsewhere.example", "kind": "Other", "name": "other"}
            status = {"providerID": f"kwok://stock-{number}", "conditions": [launched(self.now())]}
            async with turns:
                await self.kube.made(CLAIMS, claim)
                await self.kube.patched(f"{CLAIMS}/{name_of(each)}/status", {"status": status})

        await asyncio.gather(*(one(number) for number in range(count)))

    async def stranger(self, wanted: Order) -> ProviderId:
        """A claim that somebody wrote by hand."""
        claim = claim_of(wanted, node_class_of(self.options))
        claim["metadata"] = {"name": "by-hand"}
        await self.kube.made(CLAIMS, claim)
        made = await self.kube.until(
            f"{CLAIMS}/by-hand", lambda seen: seen.get("status", {}).get("providerID"), _SECONDS_MAX
        )
        return ProviderId(made["status"]["providerID"])

    async def wait(self, seconds: float) -> None:
        """Added to the server's time; what Karpenter has begun to end has its end meanwhile."""
        self.added += timedelta(seconds=seconds)
        await asyncio.sleep(1.0)  # instants of Kubernetes are whole seconds
        await self.kube.until(CLAIMS, lambda seen: not any(map(is_ending, seen["items"])), _SECONDS_MAX)

    async def clear(self) -> None:
        """Take away whatever a test left, without asking whose it is."""
        turns = asyncio.Semaphore(_AT_ONCE_COUNT)

        async def one(where: str) -> None:
            async with turns:
                await self.kube.send("DELETE", where)
                await self.kube.send("PATCH", where, {"metadata": {"finalizers": None}}, content_type=MERGE)

        for path in (CLAIMS, NODES):
            items = (await self.kube.read(path))["items"]
            await asyncio.gather(*(one(f"{path}/{item['metadata']['name']}") for item in items))
        await self.kube.until(CLAIMS, lambda seen: seen["items"] == [], _SECONDS_MAX)


def is_ending(claim: Json) -> bool:
    """Karpenter is at it."""
    return "deletionTimestamp" in claim["metadata"] and KARPENTERS in claim["metadata"].get("finalizers", ())


def launched(at: datetime) -> Json:
    """The condition."""
    return {
        "type": "Launched",
        "status": "True",
        "reason": "Launched",
        "message": "",
        "lastTransitionTime": at.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


@pytest.fixture
async def rig(cluster: Cluster) -> AsyncIterator[KarpenterRig]:
    """Two installations, and nothing that the test before left."""
    async with aiohttp.ClientSession() as session, proxied(cluster.plane) as proxy:
        kube = KubeHttp(session, cluster.plane.url, cluster.plane.admin_token, cluster.plane.tls)
        made = KarpenterRig(cluster, proxy, kube)
        yield made
        await made.clear()
        await made.ours.close()
        await made.theirs.close()


@pytest.mark.cloud(
    "karpenter",
    calls=("create NodeClaim", "delete NodeClaim", "get NodeClaim", "list NodeClaims", "patch NodeClaim"),
    errors=("InsufficientInstanceCapacity", "UnauthorizedOperation", "VcpuLimitExceeded"),
)
class TestKarpenter(ProviderContract):
    """The inherited promises; the fixture is the module's."""

    async def test_a_large_fleet_is_listed_completely(self, rig: Rig) -> None:
        """Each once, over two pages."""
        await rig.stock(await order(rig), 600)
        listed = [instance.provider_id for instance in await rig.ours.instances(OURS)]
        assert len(listed) == len(set(listed)) == 600

    async def test_an_instance_listed_late_is_not_launched_again(self, rig: Rig) -> None:
        """Nothing shows up late in an API server: what is launched is listed at once."""
        made = await rig.ours.launch(await order(rig))
        assert (await shown(rig, made.provider_id)).action_id == "a1"


# ---- what this driver promises beside


async def test_a_claim_leaves_karpenter_no_choice(rig: KarpenterRig) -> None:
    """One type, zone and capacity type; owner and purpose; no annotation that would protect it from us."""
    wanted = await order(rig)
    await rig.ours.launch(wanted)
    (claim,) = (await rig.kube.read(CLAIMS))["items"]
    asked = {requirement["key"]: requirement["values"] for requirement in claim["spec"]["requirements"]}
    assert asked == {
        "node.kubernetes.io/instance-type": [wanted.offer.instance_type],
        "topology.kubernetes.io/zone": [wanted.offer.zone],
        "karpenter.sh/capacity-type": [wanted.offer.capacity_type.value],
    }
    marks = claim["metadata"]["labels"]
    assert (marks["gpu-autoscaler.io/installation"], marks["gpu-autoscaler.io/action-id"]) == (OURS, "a1")
    assert (marks["gpu-autoscaler.io/pool"], marks["team"]) == ("default", "vision")
    assert "karpenter.sh/nodepool" not in marks
    assert "karpenter.sh/do-not-disrupt" not in claim["metadata"]["annotations"]
    assert claim["spec"]["taints"] == [{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}]
    assert claim["spec"]["expireAfter"] == "Never"


async def test_an_unusable_node_class_is_refused_before_a_claim(rig: KarpenterRig) -> None:
    """A class that is not ready, or missing: refused with its own message, and no claim is created."""
    ready = launched(rig.now()) | {"type": "Ready", "reason": "SubnetsNotFound", "message": "no subnets"}
    await rig.kube.patched(f"{CLASS}/status", {"status": {"conditions": [ready | {"status": "False"}]}})
    try:
        with pytest.raises(LaunchRefused, match="SubnetsNotFound: no subnets") as not_ready:
            await rig.ours.launch(await order(rig))
    finally:
        await rig.kube.patched(f"{CLASS}/status", {"status": {"conditions": [ready | {"status": "True"}]}})
    other = rig.provider(OURS, msgspec.structs.replace(rig.options, node_class="karpenter.kwok.sh/KWOKNodeClass/gpus"))
    with pytest.raises(LaunchRefused, match="node class karpenter") as not_there:
        await other.launch(await order(rig))
    await other.close()
    assert (not_ready.value.kind, not_ready.value.code) == ("configuration", "NodeClassNotReady")
    assert (not_there.value.kind, not_there.value.code) == ("configuration", "NodeClassNotFound")
    assert (await rig.kube.read(CLAIMS))["items"] == []


async def test_an_absent_karpenter_does_not_use_up_a_token(rig: KarpenterRig, cluster: Cluster) -> None:
    """The claim is deleted, and the same token launches once Karpenter is back."""
    hasty = rig.provider(OURS, msgspec.structs.replace(rig.options, launch_seconds_max=1.0))
    os.kill(cluster.karpenter_pid, signal.SIGSTOP)
    try:
        with pytest.raises(TransientError, match="no response from Karpenter in 1 s; check that it runs"):
            await hasty.launch(await order(rig))
        assert (await rig.kube.read(CLAIMS))["items"] == []
    finally:
        os.kill(cluster.karpenter_pid, signal.SIGCONT)
    made = await rig.ours.launch(await order(rig))
    await hasty.close()
    assert [instance.provider_id for instance in await rig.ours.instances(OURS)] == [made.provider_id]


async def test_an_abandoned_claim_is_deleted(rig: KarpenterRig, cluster: Cluster) -> None:
    """Its order's process ended while Karpenter was down: it is not launched later."""
    os.kill(cluster.karpenter_pid, signal.SIGSTOP)
    try:
        await rig.kube.made(CLAIMS, claim_of(await order(rig), node_class_of(rig.options)))
        assert await rig.ours.instances(OURS) == []
        assert len((await rig.kube.read(CLAIMS))["items"]) == 1
        rig.added += timedelta(minutes=11)
        for _ in range(2):  # deleted, and finalizer removed
            assert await rig.ours.instances(OURS) == []
        assert (await rig.kube.read(CLAIMS))["items"] == []
    finally:
        os.kill(cluster.karpenter_pid, signal.SIGCONT)


async def test_other_finalizers_stay_when_ours_is_removed(rig: KarpenterRig) -> None:
    """After the hour only ours is removed."""
    made = await rig.ours.launch(await order(rig))
    (claim,) = (await rig.kube.read(CLAIMS))["items"]
    where = f"{CLAIMS}/{claim['metadata']['name']}"
    await rig.kube.patched(where, {"metadata": {"finalizers": [*claim["metadata"]["finalizers"], "example.com/audit"]}})
    await rig.ours.terminate(made.provider_id, now=rig.now())
    await rig.wait(4000)
    assert await rig.ours.instances(OURS) == []
    kept = await rig.kube.read(where)
    assert FINALIZER not in kept["metadata"]["finalizers"]
    assert "example.com/audit" in kept["metadata"]["finalizers"]


async def test_missing_permissions_fail_launches_only(rig: KarpenterRig) -> None:
    """Everything else is retried; offers are known without them."""
    made = await rig.ours.launch(await order(rig))
    rig.proxy.status = 403
    with pytest.raises(LaunchRefused) as refused:
        await rig.ours.launch(await order(rig, "a2"))
    assert (refused.value.kind, refused.value.scope, refused.value.code) == ("permission", "region", "Forbidden")
    for attempt in (rig.ours.instances(OURS), rig.ours.terminate(made.provider_id, now=rig.now())):
        with pytest.raises(TransientError, match="403"):
            await attempt
    assert await rig.ours.offers()
    await rig.calm()
    assert (await rig.ours.launch(await order(rig, "a2"))).action_id == "a2"


async def test_a_claim_rejected_by_the_api_server_is_refused(rig: KarpenterRig) -> None:
    """With the server's message."""
    wanted = msgspec.structs.replace(await order(rig), taints=(Taint("nvidia.com/gpu", "Sometimes"),))  # type: ignore[arg-type]
    with pytest.raises(LaunchRefused, match=r"spec\.taints") as refused:
        await rig.ours.launch(wanted)
    assert (refused.value.kind, refused.value.code) == ("configuration", "Invalid")


async def test_a_terminated_node_is_not_drained_again(rig: KarpenterRig) -> None:
    """Karpenter's termination timestamp is now: the drain was before."""
    made = await rig.ours.launch(await order(rig))
    now = rig.now()
    await rig.ours.terminate(made.provider_id, now=now)
    (claim,) = (await rig.kube.read(CLAIMS))["items"]
    told = claim["metadata"]["annotations"]["karpenter.sh/nodeclaim-termination-timestamp"]
    assert told == now.strftime("%Y-%m-%dT%H:%M:%SZ")


async def test_a_manually_deleted_claim_is_released_early(rig: KarpenterRig) -> None:
    """Reported as ended, then released once no order can retry it. One that we deleted is kept for the hour."""
    made = await rig.ours.launch(await order(rig))
    (claim,) = (await rig.kube.read(CLAIMS))["items"]
    where = f"{CLAIMS}/{claim['metadata']['name']}"
    await rig.kube.until(where, lambda seen: seen.get("status", {}).get("nodeName"))
    await rig.kube.send("DELETE", where)
    await rig.wait(0)
    await rig.ours.instances(OURS)
    assert (await shown(rig, made.provider_id)).state == "terminated"
    await rig.wait(120)
    assert (await shown(rig, made.provider_id)).state == "terminated"  # its order may still be under way
    await rig.wait(600)
    await rig.ours.instances(OURS)
    assert (await rig.kube.read(CLAIMS))["items"] == []

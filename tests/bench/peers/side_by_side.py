"""P1: real Karpenter and ours in turn on the same control plane: same pods, same types, same prices.

Each run has a plane of its own (API server, scheduler, controllers, KWOK's kubelets) and begins without a node.
Machines come at once on both sides: what is compared is deciding, ordering and getting work bound, not booting.
"""

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from tests.bench.line import Line
from tests.bench.peers import real
from tests.controlplane.joining import joined
from tests.controlplane.plane import EVERYTHING, ControlPlane, running_plane
from tests.controlplane.programs import CONTROL_PLANE
from tests.support.kube_http import KubeHttp
from tests.support.kube_objects import pod
from tests.support.running import started

from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import from_kubeconfig
from gpu_autoscaler.kube.protocol import PODS, Changed, Listed
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.simcluster.offers import load_catalog, offers_of
from gpu_autoscaler_services.local.system import ExternalSystems

COUNTS = (1, 200, 1000)
LIMIT_GPUS = 16
BURST_PODS, BURST_SECONDS = 40, 10.0
GANG_MEMBERS, GANG_GPUS = 4, 8
SOONER_ORDER, SOONER_BOUND = 3.0, 1.5  # targets: DESIGN, P1
_AT_ONCE_COUNT = 48
_BOUND_SECONDS_MAX = 300.0
_LOOK_SECONDS = 0.05
_CALM_SECONDS = 15.0
_PODS, _NODES = "/api/v1/namespaces/default/pods", "/api/v1/nodes"
_CLAIMS = "/apis/karpenter.sh/v1/nodeclaims"
_TYPE = "node.kubernetes.io/instance-type"
# Three sizes of one GPU at one price a GPU, so that both sides may buy the same fleet; what a choice among real types
# costs is V5's question. Sizes are what pods get on both sides.
_TYPES = (
    ("gpu-1x", 8, 32, 1, "A10G", 24, 1.0),
    ("gpu-4x", 32, 128, 4, "A10G", 24, 4.0),
    ("gpu-8x", 64, 256, 8, "A10G", 24, 8.0),
)
_POLICY = """
nodes_count_max = 2000
{limit}
[[pools]]
name = "default"
capacity_types = ["on-demand"]
"""

Bought = Callable[[], Awaitable[Sequence[str]]]  # the instance type of each node that was ordered so far


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """What came of some pods."""

    order_seconds: float  # from the first pod to the first order
    bound_seconds: float  # ... to the last pod's binding
    nodes_count: int
    usd_per_hour: float


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two, running on a plane."""

    plane: ControlPlane
    kube: KubeHttp
    bought: Bought


def measure() -> list[Line]:
    """Both on all counts, the gang and the burst; nothing where a part is not built."""
    reason = missing()
    if reason is not None:
        return [Line(case="P1", value=0.0, unit="-", against=reason)]
    return asyncio.run(_measure())


def missing() -> str | None:
    """Return what is not built and how to; None: both are there."""
    for recipe, command in ((CONTROL_PLANE, "make controlplane"), (real.KARPENTER, "make peers")):
        if not recipe.folder().is_dir():
            return f"no {recipe.words}: `{command}`"
    return None


async def _measure() -> list[Line]:
    lines: list[Line] = []
    for count in COUNTS:
        lines += _compared(count, await _fleet(_karpenter, count), await _fleet(_ours, count))
    theirs, ours = await _gang(_karpenter), await _gang(_ours)
    lines.append(
        Line(
            case="P1 gang, GPUs in vain", value=ours, unit="GPUs",
            against=f"Karpenter {theirs}: {GANG_MEMBERS} pods of {GANG_GPUS} GPUs, limit {LIMIT_GPUS}",
            target="0", met=ours == 0,
        )
    )  # fmt: skip
    theirs, ours = await _burst(_karpenter), await _burst(_ours)
    lines.append(
        Line(
            case="P1 burst, GPUs at most", value=ours, unit="GPUs",
            against=f"Karpenter {theirs}: {BURST_PODS} pods in {BURST_SECONDS:g} s",
            target=f"<= {LIMIT_GPUS}", met=ours <= LIMIT_GPUS,
        )
    )  # fmt: skip
    return lines


def _compared(count: int, theirs: Fleet, ours: Fleet) -> list[Line]:
    case = f"P1 {count:,} pods"
    order, bound = theirs.order_seconds / ours.order_seconds, theirs.bound_seconds / ours.bound_seconds
    return [
        Line(
            case=f"{case}, first order", value=order, unit="x sooner",
            against=f"{ours.order_seconds:.2f} s, Karpenter {theirs.order_seconds:.2f} s",
            target=f">= {SOONER_ORDER:g}", met=order >= SOONER_ORDER,
        ),
        Line(
            case=f"{case}, all bound", value=bound, unit="x sooner",
            against=f"{ours.bound_seconds:.2f} s, Karpenter {theirs.bound_seconds:.2f} s",
            target=f">= {SOONER_BOUND:g}", met=bound >= SOONER_BOUND,
        ),
        Line(
            case=f"{case}, fleet", value=ours.usd_per_hour, unit="USD/h",
            against=f"Karpenter {theirs.usd_per_hour:.2f} USD/h",
            target="not dearer", met=ours.usd_per_hour <= theirs.usd_per_hour + 1e-6,
        ),
        Line(
            case=f"{case}, nodes", value=ours.nodes_count, unit="nodes",
            against=f"Karpenter {theirs.nodes_count}",
            target="no more", met=ours.nodes_count <= theirs.nodes_count,
        ),
    ]  # fmt: skip


# ---- the two


def _catalogue(folder: Path) -> tuple[Path, tuple[Offer, ...]]:
    """The file that our cloud sells from, and the on-demand offers in it."""
    names = ("name", "vcpu_count", "memory_gib", "gpu_count", "gpu_model", "gpu_memory_gib", "price_usd_per_hour")
    rows = [dict(zip(names, row, strict=True)) for row in _TYPES]
    path = folder / "offers.json"
    path.write_text(json.dumps([row | {"is_allocatable": True, "boot_seconds": 0.01} for row in rows]))
    sold = offers_of(load_catalog(path))
    return path, tuple(offer for offer in sold if offer.capacity_type is CapacityType.ON_DEMAND)


@contextlib.asynccontextmanager
async def _karpenter(limit_gpus: int | None) -> AsyncIterator[Peer]:
    with tempfile.TemporaryDirectory(prefix="karpenter-") as folder, running_plane(Path(folder), EVERYTHING) as plane:
        _, offers = _catalogue(Path(folder))
        limits = {} if limit_gpus is None else {GPU_RESOURCE: str(limit_gpus)}
        async with _http(plane) as kube:
            with real.running(plane, offers, limits):

                async def bought() -> list[str]:
                    claims = (await kube.read(_CLAIMS))["items"]
                    return [claim["metadata"]["labels"].get(_TYPE, "") for claim in claims]

                yield Peer(plane=plane, kube=kube, bought=bought)


@contextlib.asynccontextmanager
async def _ours(limit_gpus: int | None) -> AsyncIterator[Peer]:
    with tempfile.TemporaryDirectory(prefix="ours-") as name, running_plane(Path(name) / "p", EVERYTHING) as plane:
        folder = Path(name)
        catalog, _ = _catalogue(folder)
        policy = folder / "policy.toml"
        policy.write_text(_POLICY.format(limit="" if limit_gpus is None else f"gpu_count_max = {limit_gpus}"))
        there = ExternalSystems(kubeconfig=plane.kubeconfig())
        async with (
            _http(plane) as kube,
            started(folder, clock_factor=1.0, policy=policy, offers=catalog, external=there) as system,
            joined(system.simcluster_url, kube),
            aiohttp.ClientSession() as session,
        ):

            async def bought() -> list[str]:
                async with session.get(f"{system.simcluster_url}/admin/instances") as answer:
                    shown = [one["instance"] for one in await answer.json()]
                    return [one["instance_type"] for one in shown if one["state"] != "terminated"]

            yield Peer(plane=plane, kube=kube, bought=bought)


@contextlib.asynccontextmanager
async def _http(plane: ControlPlane) -> AsyncIterator[KubeHttp]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=_AT_ONCE_COUNT)) as session:
        yield KubeHttp(session, plane.url, plane.admin_token, plane.tls)


# ---- the stories


async def _fleet(open_peer: Any, count: int) -> Fleet:  # noqa: ANN401 - one of the two above
    """Create `count` pods of one GPU at once and wait until all are bound."""
    async with open_peer(None) as peer:
        began = time.monotonic()
        bound = asyncio.create_task(_bound(peer.plane, count))
        order = asyncio.create_task(_first_order(peer.bought))
        await _make(peer.kube, [_pod(f"p-{number}", 1) for number in range(count)])
        bound_at, order_at = await asyncio.gather(bound, order)
        types = [node["metadata"]["labels"][_TYPE] for node in (await peer.kube.read(_NODES))["items"]]
    prices = {row[0]: row[-1] for row in _TYPES}
    return Fleet(
        order_seconds=order_at - began,
        bound_seconds=bound_at - began,
        nodes_count=len(types),
        usd_per_hour=sum(prices[name] for name in types),
    )


async def _gang(open_peer: Any) -> int:  # noqa: ANN401 - one of the two above
    """GPUs bought for a gang that the limit can never let start."""
    group = {
        "scheduling.x-k8s.io/pod-group": "ring",
        "pod-group.scheduling.sigs.k8s.io/min-available": str(GANG_MEMBERS),
    }
    async with open_peer(LIMIT_GPUS) as peer:
        await _make(peer.kube, [_pod(f"g-{number}", GANG_GPUS, group) for number in range(GANG_MEMBERS)])
        return await _most(peer.bought, _CALM_SECONDS)


async def _burst(open_peer: Any) -> int:  # noqa: ANN401 - one of the two above
    """The most GPUs that there ever were under the limit, while pods come one after the other."""
    async with open_peer(LIMIT_GPUS) as peer:
        most = asyncio.create_task(_most(peer.bought, BURST_SECONDS + _CALM_SECONDS))
        for number in range(BURST_PODS):
            await _make(peer.kube, [_pod(f"b-{number}", 1)])
            await asyncio.sleep(BURST_SECONDS / BURST_PODS)
        return await most


def _pod(name: str, gpus: int, labels: dict[str, str] | None = None) -> dict[str, Any]:
    tolerations = [{"key": GPU_RESOURCE, "operator": "Exists"}]
    return pod(name, gpus=gpus, labels=labels, tolerations=tolerations)


async def _make(kube: KubeHttp, pods: Sequence[dict[str, Any]]) -> None:
    await asyncio.gather(*(kube.made(_PODS, each) for each in pods))


async def _bound(plane: ControlPlane, count: int) -> float:
    """Return when the last of `count` pods was bound."""
    client = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
    bound: set[str] = set()
    try:
        async with asyncio.timeout(_BOUND_SECONDS_MAX):
            async for item in client.watch(PODS):
                seen = item.objects if isinstance(item, Listed) else (item.object,) if isinstance(item, Changed) else ()
                bound |= {each.metadata.uid for each in seen if isinstance(each, core.Pod) and each.spec.node_name}
                if len(bound) >= count:
                    return time.monotonic()
    finally:
        await client.close()
    raise AssertionError("a watch does not end")


async def _first_order(bought: Bought) -> float:
    async with asyncio.timeout(_BOUND_SECONDS_MAX):
        while not await bought():
            await asyncio.sleep(_LOOK_SECONDS)
    return time.monotonic()


async def _most(bought: Bought, seconds: float) -> int:
    gpus = {row[0]: row[3] for row in _TYPES}
    most, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        # A claim that is not launched yet has no type: it is counted once it has.
        most = max(most, sum(gpus.get(name, 0) for name in await bought()))
        await asyncio.sleep(_LOOK_SECONDS)
    return most

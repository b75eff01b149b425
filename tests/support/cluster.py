"""A simulated cluster with its cloud in the test's own process, and the client that services use."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from tests.support.kube_objects import Json, node

from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.kube.protocol import Cluster
from gpu_autoscaler.providers.sim.capacity import SimCapacity
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.simcluster.cloud import Cloud
from gpu_autoscaler.simcluster.cloud_http import attach_cloud
from gpu_autoscaler.simcluster.kinds import ATTACHMENTS, BUDGETS, EVENTS, JOBS, NODES, PODS
from gpu_autoscaler.simcluster.kinds import Kind as ServedKind
from gpu_autoscaler.simcluster.objects import set_condition
from gpu_autoscaler.simcluster.server import start
from gpu_autoscaler.simcluster.world import TICK_SECONDS, World

_SERVED: dict[str, ServedKind] = {
    "pods": PODS,
    "nodes": NODES,
    "jobs": JOBS,
    "budgets": BUDGETS,
    "attachments": ATTACHMENTS,
    "events": EVENTS,
}
_CLUSTERS = frozenset({"nodes", "attachments"})  # of no namespace


@dataclass
class RunningCluster:
    """A cluster under test: its state (`world`, `cloud`) and its clients (`kube`, `provider`)."""

    world: World
    cloud: Cloud
    clock: Clock
    kube: KubeClient
    provider: SimCapacity
    cluster: Cluster
    url: str

    def add(self, kind: str, item: Json, namespace: str | None = "default") -> Json:
        """Create an object behind the API's back, as somebody else would."""
        return dict(self.world.api.create(_SERVED[kind], None if kind in _CLUSTERS else namespace, item).object)

    def add_node(self, name: str, **how: Any) -> Json:  # noqa: ANN401 - as `kube_objects.node`
        """Add a ready node without a cloud instance."""
        self.add("nodes", node(name, **how))

        def ready(item: Json) -> None:
            set_condition(item, self.clock.now(), "Ready", status="True", reason="KubeletReady", message="ok")

        self.world.api.modify(NODES, name, ready)
        return self.item("nodes", name)

    def item(self, kind: str, name: str, namespace: str = "default") -> Json:
        """Return an object as it is now; {} where there is none."""
        key = name if kind in _CLUSTERS else f"{namespace}/{name}"
        return dict(self.world.api.find(_SERVED[kind], key) or {})

    def items(self, kind: str) -> list[Json]:
        """Return all objects of a kind."""
        return [dict(item) for item in self.world.api.objects(_SERVED[kind], None)]


@contextlib.asynccontextmanager
async def running_cluster(*, clock_factor: float = 20.0, **world_options: Any) -> AsyncIterator[RunningCluster]:  # noqa: ANN401 - as `World`
    """Serve a fresh cluster on a free port of the loopback; everything is closed afterwards."""
    clock = Clock(clock_factor)
    world = World(clock, tick_seconds=TICK_SECONDS * clock_factor, seed=1, **world_options)
    cloud, routes = attach_cloud(world)
    runner, url = await start(world, extensions=[routes])
    kube = KubeClient(Connection(base_url=url), now=clock.now)
    try:
        cluster = await kube.cluster()
        provider = SimCapacity(url, installation=cluster.installation)
        try:
            yield RunningCluster(world, cloud, clock, kube, provider, cluster, url)
        finally:
            await provider.close()
    finally:
        await kube.close()
        await runner.cleanup()


async def until(probe: Callable[[], Any], seconds_max: float = 60.0) -> Any:  # noqa: ANN401 - as the probe says
    """Ask, and await where the answer has to be, until it is something; return it."""
    async with asyncio.timeout(seconds_max):
        while True:
            answer = probe()
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer:
                return answer
            await asyncio.sleep(0.02)

"""Notices while launches are in flight: a real scaler that plans and executes, a simulated cluster, any provider.

Nodes and pods are objects of the cluster; their facts are published once. The launches are those of a plan that is
published from outside, as if an earlier scaler had decided it.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import ClassVar
from unittest import mock

import msgspec
from tests.support.cluster import RunningCluster, running_cluster, until
from tests.support.kube_objects import pod as pod_object
from tests.support.purchases import planned, purchase
from tests.support.stories import Story, TimedFact, node, on_sale, pod, policy, synced
from tests.support.upkeep import steps_of

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.bus.streams import Lane
from gpu_autoscaler.events.envelope import Envelope, encode
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.kube.checkpoint_hooks import CheckpointHooks
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.model.ids import FactId, NodeUid, PodUid, ProviderId
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.providers.protocol import CapacityProvider
from gpu_autoscaler.runtime import slots
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.runner import Runner
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.scaler.drains import Drains
from gpu_autoscaler_services.scaler.executor import Executor
from gpu_autoscaler_services.scaler.inventory import InstancesListed
from gpu_autoscaler_services.scaler.purchases import Purchases
from gpu_autoscaler_services.scaler.recovery import DecisionRecovery
from gpu_autoscaler_services.scaler.service import Digests, Scaler

NOTICE_SECONDS = 120.0
SECONDS_MAX = 120.0  # until every node is cordoned and its pod evicted
Connect = Callable[[type[Scaler]], Awaitable[Bus]]
POLICY = policy(
    nodes_count_max=1_000_000,
    watch_age_seconds_max=3600.0,
    idle_seconds_max=3600.0,
    removal={"waiting_micro_usd_per_hour": 1_000_000_000_000},
)


class OneLane(Scaler):
    """The scaler as it was before its facts had lanes: all of them share one consumer and sixteen slots."""

    lanes: ClassVar[tuple[Lane, ...]] = ()
    concurrency_max: ClassVar[int] = 16


@contextlib.contextmanager
def slots_kept_while_waiting() -> Iterator[None]:
    """Keep a launch's slot while it waits for its API rate limit, as before."""
    unread: ContextVar[object] = ContextVar("unread")
    with mock.patch.object(slots, "while_waiting", unread):
        yield


class Seconds(msgspec.Struct, frozen=True, kw_only=True):
    """How long after its notice was stored each node was cordoned, and its pod evicted; sorted."""

    cordoned: tuple[float, ...]
    evicted: tuple[float, ...]
    launched_count: int  # of the orders, at the end: the others are in flight


async def _never() -> AsyncIterator[InstancesListed]:
    await asyncio.Event().wait()
    yield  # type: ignore[misc]


class Storm:
    """A scaler at work on a cluster of nodes that will be reclaimed."""

    def __init__(self, here: RunningCluster, bus: Bus) -> None:
        self.here = here
        self.bus = bus
        self.noticed: dict[str, float] = {}  # by node
        self.cordoned: dict[str, float] = {}
        self.evicted: dict[str, float] = {}

    async def say(self, fact: Fact) -> None:
        """Publish a fact as somebody else."""
        fact_id = FactId(fact.condition() or f"storm/{fact.type_name()}/{len(msgspec.json.encode(fact))}")
        envelope = Envelope(id=fact_id, source="/test", time=self.here.clock.now(), fact=fact)
        await self.bus.publish(fact.subject(), encode(envelope), message_id=fact_id)

    async def add_nodes(self, names: list[str], offer: Offer) -> None:
        """Have nodes with a running pod each, known to the scaler."""
        now = self.here.clock.now()
        story: list[TimedFact] = []
        for name in names:
            self.here.add_node(name)
            self.here.add("pods", pod_object(f"on-{name}", nodeName=name))
            story += self._known(name, offer)
        for timed in (*on_sale(offer, at=now), *story, *synced(story, as_of=now)):
            await self.say(timed.fact)

    def _known(self, name: str, offer: Offer) -> Story:
        uid = self.here.item("nodes", name)["metadata"]["uid"]
        pod_uid = self.here.item("pods", f"on-{name}")["metadata"]["uid"]
        facts: list[TimedFact] = []
        now = self.here.clock.now()
        for timed in (*node(name, offer, at=now), *pod(f"on-{name}", on=name, at=now)):
            fact = timed.fact
            if isinstance(fact, NodeObserved):
                fact = msgspec.structs.replace(fact, node_uid=NodeUid(uid))
            elif isinstance(fact, PodObserved):
                fact = msgspec.structs.replace(fact, pod_uid=PodUid(pod_uid), gpu_model=None)
            facts.append(TimedFact(fact, timed.at))
        return tuple(facts)

    async def order(self, offer: Offer, count: int) -> None:
        """Publish a plan with this many purchases."""
        now = self.here.clock.now()
        decisions = [purchase(f"storm-{number}", offer, at=now) for number in range(count)]
        for timed in planned(*decisions, plan_id="plan-storm", at=now):
            await self.say(timed.fact)

    async def watch(self) -> None:
        """Look at nodes and pods, for ever."""
        while True:
            now = time.monotonic()
            for item in self.here.items("nodes"):
                if item["spec"].get("unschedulable"):
                    self.cordoned.setdefault(item["metadata"]["name"], now)
            present = {
                item["spec"]["nodeName"]
                for item in self.here.items("pods")
                if not item["metadata"].get("deletionTimestamp")
            }
            for name in self.noticed.keys() - present:
                self.evicted.setdefault(name, now)
            await asyncio.sleep(0.02)

    async def notices(self, names: list[str], spread_seconds: float) -> None:
        """Publish a notice for each node, evenly over this time."""
        for name in names:
            now = self.here.clock.now()
            self.noticed[name] = time.monotonic()
            await self.say(
                SpotNoticeReceived(
                    provider_id=ProviderId(f"sim:///zone-a/i-buy-{name}"),
                    kind="terminate",
                    provider_event="1",
                    reclaim_at=now + timedelta(seconds=NOTICE_SECONDS),
                    node_name=name,
                    received_at=now,
                )
            )
            await asyncio.sleep(spread_seconds / len(names))


async def measure(
    connect: Connect,
    provider: CapacityProvider,
    offer: Offer,
    folder: Path,
    *,
    launches_count: int,
    notices_count: int,
    spread_seconds: float,
    kind: type[Scaler] = Scaler,
    seconds_max: float = SECONDS_MAX,
    launched: Callable[[], int] = int,
) -> Seconds:
    """Run the storm; raise TimeoutError if a node is not cordoned or its pod not evicted in time.

    `launched`: returns how many instances the provider has launched.
    """
    names = [f"n{number}" for number in range(notices_count)]
    async with running_cluster(clock_factor=1.0) as here, contextlib.AsyncExitStack() as closing:
        store = await SqliteStore.open(folder / "store.db")
        closing.push_async_callback(store.close)
        view, bus = StateView(), await connect(kind)
        closing.push_async_callback(bus.close)
        storm = Storm(here, bus)
        await storm.add_nodes(names, offer)
        service = scaler_of(kind, view, here, provider=provider, store=store)
        runner = Runner(service, bus, view=view, clock=here.clock)
        running = asyncio.create_task(runner.run())
        closing.push_async_callback(end, running)
        await until(lambda: len(view.state.nodes) == notices_count)
        await storm.order(offer, launches_count)
        if launches_count:
            await until(
                lambda: sum(order.ordered is not None for order in view.state.orders.values()) >= launches_count
            )
            await asyncio.sleep(1.0)  # the slots are taken
        watching = asyncio.create_task(storm.watch())
        closing.push_async_callback(end, watching)
        await storm.notices(names, spread_seconds)
        await until(lambda: set(names) <= storm.cordoned.keys() & storm.evicted.keys(), seconds_max)
        return Seconds(
            cordoned=tuple(sorted(storm.cordoned[name] - storm.noticed[name] for name in names)),
            evicted=tuple(sorted(storm.evicted[name] - storm.noticed[name] for name in names)),
            launched_count=launched(),
        )


async def end(task: asyncio.Task[None]) -> None:
    """Cancel the task and wait for its end: what it uses is closed next."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def scaler_of(
    kind: type[Scaler],
    view: StateView,
    here: RunningCluster,
    *,
    provider: CapacityProvider,
    store: SqliteStore,
    kube: KubeClient | None = None,
    hooks: CheckpointHooks | None = None,
) -> Scaler:
    """A scaler on this cluster, by its own client or another."""
    installation, kube = here.cluster.installation, kube or here.kube
    executor = Executor(
        Purchases(view, provider, installation, here.clock.now),
        Drains(view, kube, here.clock, hooks),
        store,
        steps_of(here.kube, here.provider, here.clock.now),
    )
    return kind(
        view,
        POLICY,
        executor,
        DecisionRecovery(store, POLICY),
        _never(),
        digests=Digests(policy="test", core="test"),
        metrics=Metrics("scaler"),
    )

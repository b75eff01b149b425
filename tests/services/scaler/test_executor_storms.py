"""Many nodes leave by one plan: they begin together, silent pods delay none, a crash in the middle repeats nothing."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.support.cluster import RunningCluster, running_cluster, until
from tests.support.fake_capacity import FakeCapacity
from tests.support.kube_objects import Json, pod
from tests.support.launch_storm import scaler_of
from tests.support.memory_bus import MemoryBus
from tests.support.stories import TimedFact, bought, drained, given, offer, planned, provider_id, purchase
from tests.unit.kube.test_checkpoint_hooks import HOOK, listening

from gpu_autoscaler.bus.memory_broker import MemoryBroker
from gpu_autoscaler.bus.streams import BUCKETS, BusDeclaration, streams
from gpu_autoscaler.events.envelope import Envelope, encode
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.scaling import ScalingCheckpointRequested, ScalingDrainStarted, ScalingNodeDrained
from gpu_autoscaler.kube.checkpoint_hooks import CheckpointHooks
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.kube.wire.core import Node
from gpu_autoscaler.model.decisions import DrainNode
from gpu_autoscaler.model.ids import ActionId, FactId, NodeUid, PlanId
from gpu_autoscaler.model.reasons.drain import SpotReclaim
from gpu_autoscaler.runtime.decode import decode_message
from gpu_autoscaler.runtime.loop_context import Limits
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.runner import Runner
from gpu_autoscaler.runtime.service import consumers_of
from gpu_autoscaler.simcluster.kinds import PODS as SERVED_PODS
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.scaler.drains import Drains
from gpu_autoscaler_services.scaler.executor import NODES_CONCURRENT_MAX
from gpu_autoscaler_services.scaler.purchases import Purchases
from gpu_autoscaler_services.scaler.service import Scaler

NODES_COUNT = 110
STARTED_SECONDS_MAX = 5.0
SILENT_SECONDS = 5.0  # longer than a hook has
KILLED = Limits(shutdown_seconds_max=0.0)  # no message in hand is finished
TOLERATED_TIMES = 3.0  # the machine is shared


class Executing(Scaler):
    """A scaler that executes plans of others."""

    tick_seconds: ClassVar[float | None] = None


class SlowKube(KubeClient):
    """Counts the changes of nodes, each of which takes a while."""

    def __init__(self, here: RunningCluster, seconds: float) -> None:
        super().__init__(Connection(base_url=here.url), now=here.clock.now)
        self.patches: Counter[str] = Counter()
        self.concurrent_count = self.concurrent_count_max = 0
        self._seconds = seconds

    async def patch_node(self, name: str, patch: Mapping[str, Any]) -> Node:
        self.patches[name] += 1
        self.concurrent_count += 1
        self.concurrent_count_max = max(self.concurrent_count_max, self.concurrent_count)
        try:
            await asyncio.sleep(self._seconds)
            return await super().patch_node(name, patch)
        finally:
            self.concurrent_count -= 1


def wall_now() -> datetime:
    """What the broker stamps messages with."""
    return datetime.now(UTC)


class Storm:
    """A broker, a cluster whose nodes have a pod each, and scalers that a test starts and kills."""

    def __init__(self, here: RunningCluster, store: SqliteStore) -> None:
        self.here = here
        self.hooks = CheckpointHooks()
        self._broker, self._store = MemoryBroker(), store
        self._bus = MemoryBus(self._broker, BusDeclaration(streams=streams()), now=wall_now)

    def add_nodes(self, port: int | None) -> None:
        """Add the nodes; with `port` each pod has a hook there."""
        for number in range(NODES_COUNT):
            name = f"n{number}"
            self.here.add_node(name)
            item = pod(f"on-{name}", nodeName=name)
            if port is not None:
                item["metadata"]["annotations"] = {HOOK: f":{port}/save"}
            self.here.add("pods", item)
            self.here.world.api.modify(SERVED_PODS, f"default/on-{name}", _runs)

    async def plan(self) -> None:
        """Publish a plan that drains every node."""
        now = self.here.clock.now()
        decisions = [
            DrainNode(
                action_id=ActionId(f"drain-{item['metadata']['name']}"),
                node_uid=NodeUid(item["metadata"]["uid"]),
                node_name=item["metadata"]["name"],
                provider_id=None,
                is_voluntary=False,
                deadline_at=now + timedelta(seconds=120),
                reason=SpotReclaim(notice_id="n", kind="terminate", reclaim_at=None),
            )
            for item in self.here.items("nodes")
        ]
        (made,) = planned(*decisions, plan_id="plan-storm", at=now)
        envelope = Envelope(id=FactId("plan-storm"), source="/test", time=now, fact=made.fact)
        await self._bus.publish(made.fact.subject(), encode(envelope), message_id="plan-storm")

    async def published(self, kind: type[Fact]) -> list[Fact]:
        """Return the published facts of this type."""
        facts = []
        for sequence in range(1, await self._bus.last_sequence("SCALING") + 1):
            message = await self._bus.message_at("SCALING", sequence)
            if message is not None and message.subject == kind.subject_root():
                facts.append(decode_message(message, self.here.clock).fact)
        return facts

    async def started(self) -> list[str]:
        """Return the nodes whose drains have started, as published."""
        return [
            fact.node_name
            for fact in await self.published(ScalingDrainStarted)
            if isinstance(fact, ScalingDrainStarted)
        ]

    @contextlib.asynccontextmanager
    async def scaler(self, kube: KubeClient) -> AsyncIterator[None]:
        """Run a scaler; kill it at the end."""
        view = StateView()
        cloud = FakeCapacity([offer()], installation="uid", now=self.here.clock.now)
        service = scaler_of(Executing, view, self.here, provider=cloud, store=self._store, kube=kube, hooks=self.hooks)
        declared = BusDeclaration(streams=streams(), consumers=consumers_of(Executing), buckets=BUCKETS)
        bus = MemoryBus(self._broker, declared, now=wall_now)
        await bus.ensure()
        running = asyncio.create_task(Runner(service, bus, view=view, clock=self.here.clock, limits=KILLED).run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await kube.close()


def _runs(item: Json) -> None:
    item["status"] |= {"phase": "Running", "podIP": "127.0.0.1"}


@pytest.fixture
async def storm(tmp_path: Path) -> AsyncIterator[Storm]:
    """A storm on a cluster without nodes."""
    async with running_cluster(clock_factor=1.0) as here:
        store = await SqliteStore.open(tmp_path / "store.db")
        made = Storm(here, store)
        yield made
        await made.hooks.close()
        await store.close()


async def test_silent_hooks_delay_no_drain(storm: Storm) -> None:
    """110 nodes whose hooks do not answer are cordoned and drain within seconds, and every pod was asked to save."""
    async with listening(seconds=SILENT_SECONDS) as (port, _):
        storm.add_nodes(port)
        async with storm.scaler(SlowKube(storm.here, 0.0)):
            began = time.monotonic()
            await storm.plan()
            async with asyncio.timeout(60):
                while len(await storm.started()) < NODES_COUNT:
                    await asyncio.sleep(0.05)
            took = time.monotonic() - began
        await storm.hooks.close()
    assert took < TOLERATED_TIMES * STARTED_SECONDS_MAX
    assert len(await storm.published(ScalingCheckpointRequested)) == NODES_COUNT


async def test_facts_are_published_as_nodes_begin(storm: Storm) -> None:
    """The first drains are known while later nodes of the plan wait for their turn; a limited number begins at once."""
    storm.add_nodes(None)
    kube = SlowKube(storm.here, 1.0)
    async with storm.scaler(kube):
        await storm.plan()
        first = await until(storm.started)
    assert len(first) < NODES_COUNT
    assert kube.concurrent_count_max == NODES_CONCURRENT_MAX


async def test_a_killed_scaler_repeats_nothing_published(storm: Storm) -> None:
    """The next one continues with the nodes that had not begun."""
    storm.add_nodes(None)
    async with storm.scaler(SlowKube(storm.here, 0.5)):
        await storm.plan()
        await until(storm.started)
    before = await storm.started()
    assert 0 < len(before) < NODES_COUNT
    kube = SlowKube(storm.here, 0.0)
    async with storm.scaler(kube):
        async with asyncio.timeout(60):
            while len(await storm.started()) < NODES_COUNT:
                await asyncio.sleep(0.05)
    assert max(Counter(await storm.started()).values()) == 1
    assert not kube.patches.keys() & set(before), "their cordons are not repeated"
    assert len(kube.patches) == NODES_COUNT - len(before)


async def test_passes_and_polls_are_paced_over_all_nodes(storm: Storm) -> None:
    """A thousand drains are looked at every five seconds, so that a new one has its first pass at once."""
    here, now = storm.here, storm.here.clock.now()
    stories = [drained(f"other-{number}", at=now, is_voluntary=False) for number in range(1000)]
    view = StateView()
    here.add_node("gpu-a")
    here.add("pods", pod("p", nodeName="gpu-a", terminationGracePeriodSeconds=60))
    started = ScalingDrainStarted(
        action_id=ActionId("drain-a"),
        plan_id=PlanId("plan"),
        node_uid=NodeUid(here.item("nodes", "gpu-a")["metadata"]["uid"]),
        node_name="gpu-a",
        provider_id=None,
        is_voluntary=False,
        deadline_at=now + timedelta(seconds=120),
        started_at=now,
    )
    view.advance(given(*stories, is_synced=False), {})
    outcome = await Drains(view, here.kube, here.clock).proceed(started)
    assert outcome.redeliver_after_seconds == pytest.approx(1000 / 200)

    ends = [
        TimedFact(
            ScalingNodeDrained(
                action_id=ActionId(f"drain-other-{number}"), plan_id=PlanId("plan"), node_uid=NodeUid("uid"),
                node_name="other", provider_id=provider_id("buy-late"), drained_at=now,
            ),
            now,
        )
        for number in range(1000)
    ]  # fmt: skip
    launched = bought(purchase("buy-late", at=now), at=now)  # so new that the cloud does not know it yet
    view.advance(given(*stories, tuple(ends), launched, is_synced=False), {})
    cloud = FakeCapacity([offer()], installation="uid", now=here.clock.now)
    fact = ends[0].fact
    assert isinstance(fact, ScalingNodeDrained)
    outcome = await Purchases(view, cloud, "uid", here.clock.now).terminate(fact)
    assert outcome.redeliver_after_seconds == pytest.approx(1000 / 5)

"""Each service that folds starts from the scaler's snapshot: composed as its process does, on a real broker."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path

import msgspec
import pytest
from tests.support.cluster import RunningCluster, running_cluster, until
from tests.support.kube_objects import Json
from tests.support.nats import nats_store, server
from tests.support.stories import HOUR, MINUTE, Story, node, on_sale, pod, synced
from tests.support.timed_facts import TimedFact, record

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.protocol import Publication
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import BusDeclaration, streams
from gpu_autoscaler.core.deferred_groups import grouped
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.envelope import Recorded, encode
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.events.shadow import ShadowPlanMade
from gpu_autoscaler.model.decisions import Cut, Difference
from gpu_autoscaler.model.ids import FactId, PlanId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.config import (
    GatewaySettings,
    KubeSettings,
    NatsSettings,
    PolicySettings,
    ProviderSettings,
    SensingSettings,
    Settings,
    StoreSettings,
)
from gpu_autoscaler.runtime.health import Readiness
from gpu_autoscaler.runtime.history import History
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.policy_reload import PolicyFile
from gpu_autoscaler.runtime.process import ProcessContext
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.runner import Runner
from gpu_autoscaler.runtime.service import MemoryInput, Service
from gpu_autoscaler.runtime.snapshots import Snapshots
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.local.child import free_port
from gpu_autoscaler_services.registry import specs
from gpu_autoscaler_services.scaler.service import Scaler
from gpu_autoscaler_services.service_spec import Process, ServiceSpec
from gpu_autoscaler_services.shadow.service import REAL_PLAN_AGE_MAX

__all__ = ["nats_store", "server"]  # fixtures

pytestmark = pytest.mark.integration

VERSIONS_COUNT = 5
# Those that start from the scaler's snapshot; the cost tracker has its own.
STARTING = [
    (spec, process)
    for spec in specs()
    for process in spec.processes
    if spec.service.folds and not issubclass(spec.service, MemoryInput)
]
WITHOUT_STORE = [(spec, process) for spec, process in STARTING if "store" not in process.uses]
SPECS = {spec.name: spec for spec in specs()}
REMOVALS = "disruption_ratio_max = 1.0\n[removal]\nwaiting_micro_usd_per_hour = 1_000_000_000_000\n"
POLICIES = {
    "policy.toml": f"idle_seconds_max = 600.0\n{REMOVALS}",
    "shadow.toml": f"idle_seconds_max = 7200.0\n{REMOVALS}",
}


class PastClock(Clock):
    """Shows the time of some time ago."""

    def __init__(self, ago: timedelta) -> None:
        self._ago = ago  # first: the constructor reads the time
        super().__init__()

    def wall_now(self) -> datetime:  # type: ignore[override]
        return Clock.wall_now() - self._ago


class Desk:
    """A broker and a store with history, and processes that are composed over them."""

    def __init__(self, folder: Path, nats: NatsServer, cluster: RunningCluster, bus: NatsBus) -> None:
        self.folder, self.nats, self.cluster, self.bus = folder, nats, cluster, bus
        self.store_path = folder / "store.db"
        self._published_count = 0
        for name, text in POLICIES.items():
            (folder / name).write_text(text, encoding="utf-8")

    async def publish(self, *facts: Fact) -> None:
        """Store the facts as published now."""
        await self.tell(TimedFact(fact, datetime.now(UTC)) for fact in facts)

    async def tell(self, story: Iterable[TimedFact]) -> None:
        """Store the facts as published at their time."""
        publications = []
        for entry in record(story):
            self._published_count += 1
            envelope = msgspec.structs.replace(entry.envelope, id=FactId(f"fact-{self._published_count}"))
            publications.append(
                Publication(subject=envelope.fact.subject(), payload=encode(envelope), message_id=envelope.id)
            )
        await self.bus.publish_many(publications)

    async def history(self, folds: Sequence[type[Fact]]) -> list[Recorded]:
        """All stored facts of these types."""
        history = History(self.bus, Clock())
        names = sorted({fact.stream() for fact in folds})
        read = [
            await history.facts(name, [fact for fact in folds if fact.stream() == name], sys.maxsize) for name in names
        ]
        return list(chain.from_iterable(read))

    async def ends(self) -> dict[str, int]:
        """The last sequence of each stream that the scaler folds."""
        return {name: await self.bus.last_sequence(name) for name in {fact.stream() for fact in Scaler.folds}}

    async def save_snapshot(self, ago: timedelta = timedelta()) -> dict[str, int]:
        """Save the scaler's snapshot of all facts so far, as if some time ago; return its last sequences."""
        store, view, metrics = await SqliteStore.open(self.store_path), StateView(), Metrics("scaler")
        clock, streams = PastClock(ago), History(self.bus, Clock())
        snapshots = Snapshots(Scaler, view, store, streams, clock=clock, metrics=metrics, core_digest="older")
        await snapshots.resume()
        ends = await self.ends()
        view.advance(fold(EMPTY_STATE, await self.history(Scaler.folds)), ends)
        await snapshots.save()
        await store.close()
        return ends

    async def plan_made(self, plan_id: str, policy_name: str = "policy.toml") -> ScalingPlanMade:
        """The plan of all facts so far."""
        state, ends = fold(EMPTY_STATE, await self.history(Scaler.folds)), await self.ends()
        now = datetime.now(UTC)
        return ScalingPlanMade(
            plan_id=PlanId(plan_id),
            plan=grouped(plan(state, PolicyFile(self.folder / policy_name).now, now), state),
            cut=Cut(last_sequences=tuple(sorted(ends.items()))),
            policy_digest="policy",
            core_digest="core",
            service_version="0",
        )

    def events_of(self, name: str) -> list[Json]:
        """The Kubernetes Events about this object."""
        return [event for event in self.cluster.items("events") if event["involvedObject"]["name"] == name]

    async def shadow_plan(self) -> ShadowPlanMade | None:
        """What the shadow publishes with its first tick."""
        stream = ShadowPlanMade.stream()
        before = await self.bus.last_sequence(stream)
        async with self.composed(SPECS["shadow"]) as (service, bus, context), running(service, bus, context):
            await until(context.metrics.ticks.labels("done")._value.get)
        published = [item for item in await self.history([ShadowPlanMade]) if item.sequence > before]
        if not published:
            return None
        assert isinstance(published[0].fact, ShadowPlanMade)
        return published[0].fact

    @asynccontextmanager
    async def composed(
        self, spec: ServiceSpec, process: Process | None = None, store_url: str = ""
    ) -> AsyncIterator[tuple[Service, NatsBus, ProcessContext]]:
        """A service as its process composes it."""
        settings = Settings(
            nats=NatsSettings(url=self.nats.url),
            kube=KubeSettings(url=self.cluster.url),
            provider=ProviderSettings(name="sim", url=self.cluster.url),
            store=StoreSettings(url=store_url or f"sqlite:///{self.store_path}"),
            gateway=GatewaySettings(port=free_port()),
            policy=PolicySettings(path=str(self.folder / "policy.toml"), shadow_path=str(self.folder / "shadow.toml")),
            sensing=SensingSettings(
                role=(process and process.role) or "central", metadata_url=f"{self.cluster.url}/nodes/{{node_name}}"
            ),
        )
        async with AsyncExitStack() as closing:
            context = ProcessContext(
                settings=settings,
                clock=Clock(),
                view=StateView(),
                metrics=Metrics(spec.name, role=settings.sensing.role),
                readiness=Readiness(),
                closing=closing,
                lost=asyncio.Event(),
            )
            composed = await spec.compose(context)
            assert isinstance(composed, tuple)
            service, bus = composed
            assert isinstance(bus, NatsBus)
            yield service, bus, context


@pytest.fixture
async def desk(server: NatsServer, tmp_path: Path) -> AsyncIterator[Desk]:
    """A broker with nodes, pods and their history, and a cluster and cloud that services can reach."""
    async with running_cluster() as cluster:
        bus = await NatsBus.connect(server.url, name="desk", declared=BusDeclaration(streams=streams()))
        try:
            await bus.ensure()
            desk = Desk(tmp_path, server, cluster, bus)
            story = _story(datetime.now(UTC))
            await desk.tell(story)
            for version in range(2, VERSIONS_COUNT):
                await desk.tell(_changed(story, version))
            await desk.publish(await desk.plan_made("plan", "shadow.toml"))  # decides nothing
            yield desk
        finally:
            await bus.close()


def _story(now: datetime) -> Story:
    """An idle node of ours, a pod that fits no offer, and complete lists."""
    told = (
        *on_sale(at=now - HOUR),
        *node("n1", at=now - HOUR),
        *node("n2", is_ours=False, at=now - HOUR),
        *pod("waiting", gpus=64, unschedulable_since=now - MINUTE, at=now - MINUTE),
    )
    return (*told, *synced(told, as_of=now))


def _changed(story: Story, version: int) -> list[TimedFact]:
    return [
        TimedFact(msgspec.structs.replace(told.fact, version=version), told.at)
        for told in story
        if isinstance(told.fact, NodeObserved | PodObserved)
    ]


def _decided(difference: Difference) -> tuple[str, ...]:
    """What a difference says, without sentences: they name the second of their plan."""
    made, other = difference.made, difference.other
    return (difference.subject, made.what, made.reason, other.what, other.reason)


def streams_of(service: Service) -> set[str]:
    """The streams that a service folds."""
    return {fact.stream() for fact in service.folds}


@asynccontextmanager
async def running(service: Service, bus: NatsBus, context: ProcessContext) -> AsyncIterator[None]:
    """The service at work."""
    runner = Runner(service, bus, view=context.view, clock=context.clock, metrics=context.metrics)
    run = asyncio.create_task(runner.run())
    try:
        yield
    finally:
        runner.stop()
        await run


@pytest.mark.parametrize(("spec", "process"), STARTING, ids=[process.name for _, process in STARTING])
async def test_a_start_from_a_snapshot_reads_no_history(desk: Desk, spec: ServiceSpec, process: Process) -> None:
    """The state is that of the service's facts up to the snapshot, and reading goes on behind it."""
    ends = await desk.save_snapshot()
    facts = await desk.history(spec.service.folds)

    async with desk.composed(spec, process) as (service, _, context):
        assert all(context.view.last_sequence(name) == ends.get(name, 0) for name in streams_of(service))
        assert context.view.state == fold(EMPTY_STATE, facts)


@pytest.mark.parametrize(("spec", "process"), WITHOUT_STORE, ids=[process.name for _, process in WITHOUT_STORE])
@pytest.mark.parametrize("store_url", ["", "postgresql://nobody@127.0.0.1:1/none"], ids=["missing", "unreachable"])
async def test_a_start_without_a_store_reads_history(
    desk: Desk, spec: ServiceSpec, process: Process, store_url: str
) -> None:
    """A service that needs the store for nothing else does not wait for it, and does not create it."""
    async with desk.composed(spec, process, store_url) as (service, bus, context):
        assert context.view.state == EMPTY_STATE
        async with running(service, bus, context):
            ends = {name: end for name, end in (await desk.ends()).items() if name in streams_of(service)}
            await until(lambda: all(context.view.last_sequence(name) >= end for name, end in ends.items()))
        assert set(context.view.state.nodes) == {"uid-n1", "uid-n2"}
    assert not desk.store_path.exists()


async def test_a_start_changes_nothing_in_the_store(desk: Desk) -> None:
    """It is opened read-only, also after its last writer has closed it."""
    await desk.save_snapshot()
    before = desk.store_path.read_bytes()

    for spec, process in WITHOUT_STORE:
        async with desk.composed(spec, process):
            pass

    assert desk.store_path.read_bytes() == before


async def test_the_announcer_knows_a_plan_that_is_older_than_the_snapshot(desk: Desk) -> None:
    """Only the plan says why a pod waits; it is not part of the state, and none is made after the start."""
    await desk.save_snapshot()

    async with desk.composed(SPECS["announcer"]) as (service, bus, context), running(service, bus, context):
        await until(lambda: [event["reason"] for event in desk.events_of("waiting")])


async def test_the_shadow_continues_its_chain_without_reading_it(desk: Desk) -> None:
    """Differences that are published already are not published again, and the next plan follows the last one."""
    await desk.save_snapshot()
    first = await desk.shadow_plan()
    assert first is not None
    assert first.differences
    assert await desk.shadow_plan() is None
    await desk.publish(msgspec.structs.replace(first, plan_id=PlanId("second"), differences=()))

    again = await desk.shadow_plan()

    assert again is not None
    assert again.parent_sequence == 2
    assert [_decided(each) for each in again.differences] == [_decided(each) for each in first.differences]


async def test_the_shadow_compares_plans_that_were_made_while_it_was_stopped(desk: Desk) -> None:
    """Also if the scaler has saved a snapshot since: the shadow starts from an earlier one. The comparison of a plan is
    published once."""
    await desk.save_snapshot(2 * REAL_PLAN_AGE_MAX)
    await desk.publish(await desk.plan_made("real"))
    await desk.save_snapshot()

    first = await desk.shadow_plan()

    assert first is not None
    assert first.real_plan_id == "real"
    await desk.publish(msgspec.structs.replace(first, plan_id=PlanId("second"), differences=()))
    assert await desk.shadow_plan() is None

"""A cost tracker that is killed and restarted after the streams discarded everything charges what it would have charged
without the restart.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from tests.support.money import USD
from tests.support.runners import Place, running, until
from tests.support.stories import instance, job, node, offer, pod, provider_id, purchase
from tests.support.timed_facts import EPOCH, HOUR, MINUTE, Story, TimedFact

from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.job import JobQueued
from gpu_autoscaler.events.node import NodeInstanceListed, NodeObserved
from gpu_autoscaler.events.pod import PodGone, PodObserved
from gpu_autoscaler.model.ids import PodUid
from gpu_autoscaler.model.labels import PROJECT_ID
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.history import History
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.snapshots import Snapshots
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.cost_tracker.service import CostTracker

RETENTION = timedelta(days=60)  # of every stream, and more


class World:
    """One instance with pods, on a broker of its own, and the tracker that charges it."""

    def __init__(self, store: SqliteStore, launched_at: datetime) -> None:
        self.store = store
        self.launched_at = launched_at
        self.place = Place()
        self._process = AsyncExitStack()
        self._living: list[TimedFact] = []

    def at(self, minutes: float) -> datetime:
        """So long after the launch."""
        return self.launched_at + minutes * MINUTE

    async def start(self, core_digest: str = "core") -> None:
        """Start a new process, composed as the service is."""
        self.view, metrics = StateView(), Metrics("cost_tracker")
        view = self.view
        tracker = CostTracker(view, self.store, instances_without_price=metrics.instances_without_price)
        bus = await self.place.bus(CostTracker)
        self.snapshots = Snapshots(
            CostTracker, view, self.store, History(bus, Clock()),
            clock=Clock(), metrics=metrics, core_digest=core_digest, memory=tracker,
        )  # fmt: skip
        await self.snapshots.resume()
        runner = await self._process.enter_async_context(running(self.place, tracker, bus=bus, view=view))
        await until(lambda: runner.readiness.is_ready)

    async def kill(self) -> None:
        """End the process; it saves nothing."""
        await self._process.aclose()

    async def record(self, *stories: Story) -> None:
        """Publish facts."""
        for fact, at in ((told.fact, told.at) for story in stories for told in story):
            await self.place.say(fact, at=at)

    async def republish(self, *stories: Story) -> None:
        """Publish again what lives, as its publishers do before it ages out; the launch is not among it."""
        await self.record(
            tuple(
                told
                for story in stories
                for told in story
                if isinstance(told.fact, NodeObserved | PodObserved | JobQueued)
            )
        )

    async def charge(self, minutes: float) -> None:
        """The cloud's list has the instance; it is charged until then."""
        seen_at = self.at(minutes)
        listing = NodeInstanceListed(provider_ids=(provider_id("buy-n"),), listed_at=seen_at)
        await self.record((TimedFact(listing, seen_at),))
        await until(lambda: self.is_charged(seen_at), 20.0)

    async def is_charged(self, until_at: datetime) -> bool:
        """The ledger has charged until then, and the stream has it all."""
        rows = (await self.store.ledger()).rows
        return bool(rows) and rows[0].to_at >= until_at and not await self.store.unconfirmed_charges(1)

    async def save(self) -> None:
        """Save a snapshot of all that is published; the process saves one every few minutes."""
        bus = await self.place.bus()
        for stream in sorted({fact.stream() for fact in CostTracker.folds}):
            last = await bus.last_sequence(stream)
            await until(lambda stream=stream, last=last: self.view.last_sequence(stream) == last)
        await self.snapshots.save()

    def discard(self) -> None:
        """Every stream reaches its age limit: nothing is left that was published before."""
        self.place.passed += RETENTION


def living(world: World) -> tuple[Story, ...]:
    """The node, its job, and two pods that stay."""
    begin = world.launched_at
    return (
        node("n", offer(usd_per_hour=10.000001), pool="gpu", labels={PROJECT_ID: "speech"}, at=begin),
        job("train", at=begin),
        pod("train-0", on="n", gpus=4, job_id="train", owner_kind="Job", at=world.at(2)),
        pod("web", on="n", gpus=1, namespace="serving", labels={PROJECT_ID: "web"}, at=world.at(3)),
    )


def ended(name: str, at: datetime) -> Story:
    """A pod is deleted."""
    gone = PodGone(epoch=EPOCH, version=9, pod_uid=PodUid(f"uid-{name}"), namespace="default", name=name)
    return (TimedFact(gone, at),)


async def life(world: World, start: str) -> tuple[CostAccrued, ...]:
    """The instance from launch to end. In its middle the tracker is killed, everything is discarded, and it starts
    again (`start`: from what), unless that is `alive`.
    """
    everything = living(world)
    await world.start()
    await world.record(*everything, pod("short", on="n", gpus=2, at=world.at(4)))
    await world.charge(10)
    await world.save()
    if start != "alive":
        await world.kill()
        world.discard()
        for row in await world.store.snapshots("cost_tracker") if start == "streams" else ():
            await world.store.delete_snapshots([row.number])
    # While nobody charges one pod ends and another one is bound.
    if start in ("streams", "other core"):
        await world.republish(*everything, pod("short", on="n", gpus=2, at=world.at(4)))
    await world.record(ended("short", world.at(11)), pod("late", on="n", gpus=3, at=world.at(12)))
    if start != "alive":
        await world.start("core" if start == "snapshot" else "another core")
    await world.charge(15)
    await world.record(ended("train-0", world.at(17)))
    await world.charge(20)
    decision = purchase("buy-n", offer(usd_per_hour=10.000001))
    (seen,) = instance(decision, state="terminated", at=world.launched_at)
    end = world.at(25.5)
    assert seen.fact is not None
    await world.record((TimedFact(msgspec.structs.replace(seen.fact, terminated_at=end), end),))
    await until(lambda: world.is_charged(end), 20.0)
    await world.kill()
    return tuple(reversed((await world.store.ledger()).rows))


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[list[SqliteStore]]:
    """Two stores."""
    opened = [await SqliteStore.open(tmp_path / name) for name in ("a.db", "b.db")]
    yield opened
    for store in opened:
        await store.close()


@pytest.mark.parametrize("start", ["snapshot", "other core", "streams"])
async def test_a_restart_changes_no_bill(
    stores: list[SqliteStore], start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its snapshot; from one of an older release and from none, with what lives published again: each time the
    same spans, shares and owners, which add up to the invoice."""
    monkeypatch.setattr(CostTracker, "tick_seconds", 0.2)
    launched_at = datetime.now(UTC).replace(hour=1, minute=0, second=0, microsecond=0) - 24 * HOUR
    worlds = [World(store, launched_at) for store in stores]
    expected, spans = await asyncio.gather(life(worlds[0], "alive"), life(worlds[1], start))

    assert spans == expected
    assert sum(span.total_micro_usd for span in spans) == cost_micro_usd(10 * USD + 1, 25.5 * MINUTE)
    assert {(span.pool, span.bought_for, span.node_name) for span in spans} == {("gpu", "speech", "n")}
    jobs = {share.job_id for span in spans for share in span.shares}
    assert jobs == {"train", None}
    assert [span.is_final for span in spans] == [False] * (len(spans) - 1) + [True]
    (charge,) = (await stores[1].last_charges([spans[0].provider_id])).values()
    assert charge.total_micro_usd == sum(span.total_micro_usd for span in spans)

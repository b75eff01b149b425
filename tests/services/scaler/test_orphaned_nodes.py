"""Nodes of ended instances are deleted after a second confirmation by the cloud; other nodes are not."""

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta

import pytest
from tests.support.cluster import RunningCluster, running_cluster
from tests.support.fake_capacity import FakeCapacity
from tests.support.kube_objects import Json
from tests.support.stories import Story, TimedFact, given, offer, policy, purchase
from tests.support.upkeep import PlannedUpkeep

from gpu_autoscaler.core.disruption.orphaned_nodes import ORPHANED_SECONDS
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.node import NodeInstanceObserved
from gpu_autoscaler.events.scaling import ScalingNodeRemoved
from gpu_autoscaler.kube.protocol import NODES
from gpu_autoscaler.kube.translate.node import node_observed
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.labels import ACTION_ID, TERMINATION_FINALIZER
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.simcluster.kinds import NODES as SERVED_NODES
from gpu_autoscaler.simcluster.objects import set_condition
from gpu_autoscaler_services.scaler.orphaned_nodes import ASKED_AGAIN_SECONDS

NAME, OURS = "gpu-a", "uid"
LATER, LONG = timedelta(seconds=ASKED_AGAIN_SECONDS), timedelta(minutes=10)


class Bench:
    """A node of ours that is not ready and whose instance has ended."""

    def __init__(self, here: RunningCluster) -> None:
        self.here = here
        self.cloud = FakeCapacity([offer()], installation=OURS, now=here.clock.now)
        self.upkeep = PlannedUpkeep(here.kube, self.cloud)
        self.provider_id = ProviderId("fake:///zone-a/i-never")
        self.at = here.clock.now()
        self.state = ClusterState()

    async def begin(self, *, installation: str = OURS, is_made: bool = True) -> None:
        """Launch the instance and let it die; its node remains and is not ready."""
        if is_made:
            decision = purchase("buy-1", offer())
            wanted = Order(
                action_id=decision.action_id, installation=installation, pool="default", offer=offer(), labels=(),
                taints=(),
            )  # fmt: skip
            self.provider_id = (await self.cloud.launch(wanted)).provider_id
            self.cloud.end_unexpectedly(self.provider_id)
        self.here.add_node(NAME, labels={ACTION_ID: "buy-1"})
        self.change(lambda item: item["spec"].update(providerID=self.provider_id))
        self.change(lambda item: item["metadata"].update(finalizers=["example.com/theirs", TERMINATION_FINALIZER]))
        self.set_ready(is_ready=False)
        await self.observe()

    def change(self, how: object) -> None:
        """Change the node; its taints follow at once, as a node that changes later is kept for now."""
        self.here.world.api.modify(SERVED_NODES, NAME, how)  # type: ignore[arg-type]
        self.here.world.step()

    def set_ready(self, *, is_ready: bool) -> None:
        """Set the node's Ready condition."""
        now = self.here.clock.now()

        def write(item: Json) -> None:
            status = "True" if is_ready else "Unknown"
            set_condition(item, now, "Ready", status=status, reason="r", message="m")

        self.change(write)

    async def observe(self) -> None:
        """Fold the node as it is now, and the end of its instance some time ago."""
        self.at = self.here.clock.now()
        ended_at = self.at - timedelta(seconds=ORPHANED_SECONDS)
        seen = node_observed(await self.here.kube.get(NODES, "", NAME), epoch=1)
        self.state = given((TimedFact(seen, ended_at), *self.ended(ended_at)), as_of=self.at)

    def ended(self, ended_at: datetime) -> Story:
        """Return the story in which the cloud listed the instance as ended then."""
        fact = NodeInstanceObserved(
            epoch=0, version=4, provider_id=self.provider_id, action_id=None, state="terminated",
            instance_type="t", zone="z", capacity_type=offer().capacity_type, price_micro_usd_per_hour=1,
            launched_at=ended_at, terminated_at=ended_at,
        )  # fmt: skip
        return (TimedFact(fact, ended_at),)

    async def remove(self, after: timedelta = timedelta(0)) -> list[ScalingNodeRemoved]:
        """Remove what a plan decides at the last observation plus `after`."""
        facts = await self.upkeep.take(self.state, policy(watch_age_seconds_max=86_400), self.at + after)
        return [fact for fact in facts if isinstance(fact, ScalingNodeRemoved)]

    @property
    def node(self) -> Json:
        """The node as it is now; {} if it is gone."""
        return self.here.item("nodes", NAME)

    @property
    def is_kept(self) -> bool:
        """True while the node is not deleted and has our finalizer."""
        return bool(self.node) and TERMINATION_FINALIZER in self.node["metadata"]["finalizers"]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """Return a new bench."""
    async with running_cluster(clock_factor=1.0) as here:
        yield Bench(here)


async def test_node_is_deleted_after_second_confirmation(bench: Bench) -> None:
    """Our finalizer is removed first, those of others stay; the removal is published once."""
    await bench.begin()
    assert await bench.remove() == []
    assert await bench.remove(LATER / 2) == []
    assert bench.is_kept

    (removed,) = await bench.remove(LATER)
    assert (removed.node_name, removed.provider_id) == (NAME, bench.provider_id)
    assert (removed.asked_at, removed.removed_at) == (bench.at, bench.at + LATER)
    assert "deletionTimestamp" in bench.node["metadata"]
    assert bench.node["metadata"]["finalizers"] == ["example.com/theirs"]
    assert await bench.remove(LONG) == [], "somebody deletes it already"


async def test_instance_unknown_to_the_cloud_counts_as_gone(bench: Bench) -> None:
    """Some clouds do not show ended instances."""
    await bench.begin(is_made=False)
    bench.change(lambda item: item["metadata"].pop("finalizers"))
    assert await bench.remove() == []
    assert len(await bench.remove(LATER)) == 1
    assert bench.node == {}


async def test_node_of_running_instance_is_kept(bench: Bench) -> None:
    """The record was wrong; and a confirmation before it was seen running does not count."""
    await bench.begin()
    ended = bench.provider_id
    living = await bench.cloud.launch(
        Order(
            action_id=purchase("buy-2", offer()).action_id, installation=OURS, pool="default", offer=offer(),
            labels=(), taints=(),
        )
    )  # fmt: skip
    bench.provider_id = living.provider_id
    bench.change(lambda item: item["spec"].update(providerID=living.provider_id))
    await bench.observe()
    assert await bench.remove() == []
    assert await bench.remove(LATER) == []
    assert bench.is_kept

    bench.cloud.end_unexpectedly(living.provider_id)
    assert await bench.remove(2 * LATER) == [], "the first word"
    assert len(await bench.remove(3 * LATER)) == 1
    assert ended != living.provider_id


async def test_failed_lookup_is_retried_with_the_next_attempt(bench: Bench) -> None:
    """It confirms neither presence nor absence."""
    await bench.begin()
    assert await bench.remove() == []
    bench.cloud.failure = "throttled"
    assert await bench.remove(LATER) == []
    assert bench.is_kept
    bench.cloud.failure = None
    assert len(await bench.remove(LATER + timedelta(seconds=5))) == 1


async def test_slow_lookup_is_abandoned(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is abandoned within seconds and confirms nothing."""

    async def never(_: ProviderId) -> None:
        await asyncio.Event().wait()

    await bench.begin()
    assert await bench.remove() == []
    monkeypatch.setattr(bench.cloud, "instance", never)
    async with asyncio.timeout(60):
        assert await bench.remove(LATER) == []
    assert bench.is_kept


async def test_node_of_foreign_instance_is_kept(bench: Bench) -> None:
    """The instance's tags name another installation; it is looked up rarely."""
    await bench.begin(installation="another")
    for after in (timedelta(0), LATER, 2 * LATER, LONG, LONG + LATER):
        assert await bench.remove(after) == []
    assert bench.is_kept


async def test_node_that_is_ready_again_is_kept(bench: Bench) -> None:
    """The node itself is read last."""
    await bench.begin()
    assert await bench.remove() == []
    bench.set_ready(is_ready=True)
    assert await bench.remove(LATER) == []
    assert bench.is_kept


async def test_recreated_node_is_kept(bench: Bench) -> None:
    """On another instance, or on the same one."""
    await bench.begin()
    assert await bench.remove() == []
    bench.change(lambda item: item["spec"].update(providerID="fake:///zone-a/i-other"))
    assert await bench.remove(LATER) == []
    bench.change(lambda item: item["metadata"].pop("finalizers"))
    bench.here.world.api.delete(SERVED_NODES, NAME)
    bench.here.add_node(NAME, labels={ACTION_ID: "buy-1"})
    bench.change(lambda item: item["spec"].update(providerID=bench.provider_id))
    bench.set_ready(is_ready=False)
    assert await bench.remove(2 * LATER) == []
    assert "deletionTimestamp" not in bench.node["metadata"]


async def test_changed_node_is_not_deleted(bench: Bench) -> None:
    """The resource version is a precondition of the deletion."""
    await bench.begin()
    seen = await bench.here.kube.get(NODES, "", NAME)
    bench.set_ready(is_ready=True)
    assert not await bench.here.kube.delete_node(seen)
    assert "deletionTimestamp" not in bench.node["metadata"]
    assert await bench.here.kube.delete_node(await bench.here.kube.get(NODES, "", NAME))


async def test_provider_without_instance_lookup_removes_nothing(bench: Bench) -> None:
    """Karpenter removes its nodes itself."""
    await bench.begin()
    bench.upkeep = PlannedUpkeep(bench.here.kube, _Blind())  # type: ignore[arg-type]
    for after in (timedelta(0), LATER):
        assert await bench.remove(after) == []
    assert bench.is_kept


class _Blind:
    name = "blind"


async def test_restart_repeats_first_confirmation(bench: Bench) -> None:
    """The first confirmation is not remembered across restarts."""
    await bench.begin()
    assert await bench.remove() == []
    bench.upkeep = PlannedUpkeep(bench.here.kube, bench.cloud)
    assert await bench.remove(LATER) == []
    assert bench.is_kept
    assert len(await bench.remove(2 * LATER)) == 1

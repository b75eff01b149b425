"""Node objects that are left of ended instances are deleted: after a second word of the cloud, and nothing else is."""

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta

import msgspec
import pytest
from tests.support.cluster import RunningCluster, running_cluster
from tests.support.kube_objects import Json
from tests.support.stories import Story, Told, given, offer, policy, purchase

from gpu_autoscaler.core.disruption.orphaned_nodes import ORPHANED_SECONDS
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.node import NodeInstanceObserved
from gpu_autoscaler.events.scaling import ScalingNodeRemoved
from gpu_autoscaler.kube.protocol import NODES
from gpu_autoscaler.kube.translate.node import node_observed
from gpu_autoscaler.model.ids import NodeUid, ProviderId
from gpu_autoscaler.model.labels import ACTION_ID, TERMINATION_FINALIZER
from gpu_autoscaler.providers.fake import FakeCapacity
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.simcluster.kinds import NODES as SERVED_NODES
from gpu_autoscaler.simcluster.objects import set_condition
from gpu_autoscaler_services.scaler.orphaned_nodes import (
    ASKED_AGAIN_SECONDS,
    NODES_PER_TICK_MAX,
    REFUSED_SECONDS,
    OrphanedNodes,
)

NAME, OURS = "gpu-a", "uid"
LATER, LONG = timedelta(seconds=ASKED_AGAIN_SECONDS), timedelta(seconds=REFUSED_SECONDS)


class Bench:
    """A silent node of ours whose instance has ended, as the record says, and who may delete it."""

    def __init__(self, here: RunningCluster) -> None:
        self.here = here
        self.cloud = FakeCapacity([offer()], installation=OURS, now=here.clock.now)
        self.orphaned_nodes = OrphanedNodes(here.kube, self.cloud)
        self.provider_id = ProviderId("fake:///zone-a/i-never")
        self.at = here.clock.now()
        self.state = ClusterState()

    async def begin(self, *, installation: str = OURS, is_made: bool = True) -> None:
        """Make the instance and let it die; the node that it had is there, and silent."""
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
        self.say(is_ready=False)
        await self.look()

    def change(self, how: object) -> None:
        """Change the node."""
        self.here.world.api.modify(SERVED_NODES, NAME, how)  # type: ignore[arg-type]

    def say(self, *, is_ready: bool) -> None:
        """Its kubelet reports, or is found to be silent."""
        now = self.here.clock.now()

        def write(item: Json) -> None:
            status = "True" if is_ready else "Unknown"
            set_condition(item, now, "Ready", status=status, reason="r", message="m")

        self.change(write)

    async def look(self) -> None:
        """Let the record know the node as it is now, and that its instance ended some time ago."""
        self.at = self.here.clock.now()
        ended_at = self.at - timedelta(seconds=ORPHANED_SECONDS)
        seen = node_observed(await self.here.kube.get(NODES, "", NAME), epoch=1)
        self.state = given((Told(seen, ended_at), *self.over(ended_at)), as_of=self.at)

    def over(self, ended_at: datetime) -> Story:
        """The cloud's list showed the instance as ended then."""
        fact = NodeInstanceObserved(
            epoch=0, version=4, provider_id=self.provider_id, action_id=None, state="terminated",
            instance_type="t", zone="z", capacity_type=offer().capacity_type, price_micro_usd_per_hour=1,
            launched_at=ended_at, terminated_at=ended_at,
        )  # fmt: skip
        return (Told(fact, ended_at),)

    async def remove(self, after: timedelta = timedelta(0)) -> list[ScalingNodeRemoved]:
        """What is deleted so long after the first look."""
        return await self.orphaned_nodes.remove(self.state, policy(watch_age_seconds_max=86_400), self.at + after)

    @property
    def node(self) -> Json:
        """As it is now; {} where it is gone."""
        return self.here.item("nodes", NAME)

    @property
    def is_kept(self) -> bool:
        """True while nobody has deleted it and our finalizer is there as before."""
        return bool(self.node) and TERMINATION_FINALIZER in self.node["metadata"]["finalizers"]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """A fresh one."""
    async with running_cluster(clock_factor=1.0) as here:
        yield Bench(here)


async def test_it_goes_when_the_cloud_says_so_a_second_time(bench: Bench) -> None:
    """Others' finalizers stay and are theirs to take away; ours is taken off first. It is told once."""
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


async def test_an_instance_that_the_cloud_does_not_know_is_gone(bench: Bench) -> None:
    """Asked for this very one, twice: some clouds show nothing of what has ended."""
    await bench.begin(is_made=False)
    bench.change(lambda item: item["metadata"].pop("finalizers"))
    assert await bench.remove() == []
    assert len(await bench.remove(LATER)) == 1
    assert bench.node == {}


async def test_an_instance_that_lives_after_all_keeps_its_node(bench: Bench) -> None:
    """The record was told otherwise; and what the cloud said before its last word counts no more."""
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
    await bench.look()
    assert await bench.remove() == []
    assert await bench.remove(LATER) == []
    assert bench.is_kept

    bench.cloud.end_unexpectedly(living.provider_id)
    assert await bench.remove(2 * LATER) == [], "the first word"
    assert len(await bench.remove(3 * LATER)) == 1
    assert ended != living.provider_id


async def test_a_cloud_that_does_not_answer_says_nothing(bench: Bench) -> None:
    """Neither that it is gone, nor that it is there: it is asked again at the next tick."""
    await bench.begin()
    assert await bench.remove() == []
    bench.cloud.failure = "throttled"
    assert await bench.remove(LATER) == []
    assert bench.is_kept
    bench.cloud.failure = None
    assert len(await bench.remove(LATER + timedelta(seconds=5))) == 1


async def test_a_slow_cloud_holds_up_no_plan(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up within seconds, and said nothing."""

    async def never(_: ProviderId) -> None:
        await asyncio.Event().wait()

    await bench.begin()
    assert await bench.remove() == []
    monkeypatch.setattr(bench.cloud, "instance", never)
    async with asyncio.timeout(60):
        assert await bench.remove(LATER) == []
    assert bench.is_kept


async def test_a_storm_is_taken_in_parts(bench: Bench) -> None:
    """No more of them are asked about in one tick than the limit says; the others come next."""
    await bench.begin()
    asked: list[ProviderId] = []

    class Counting(FakeCapacity):
        async def instance(self, provider_id: ProviderId) -> None:
            asked.append(provider_id)

    ended_at = bench.at - timedelta(seconds=ORPHANED_SECONDS)
    seen = node_observed(await bench.here.kube.get(NODES, "", NAME), epoch=1)
    many = [
        msgspec.structs.replace(
            seen, name=f"n{number}", node_uid=NodeUid(f"u{number}"), provider_id=ProviderId(f"fake:///z/{number}")
        )
        for number in range(2 * NODES_PER_TICK_MAX + 1)
    ]
    over = [each.fact for each in bench.over(ended_at)]
    ends = [msgspec.structs.replace(over[0], provider_id=one.provider_id) for one in many]
    bench.state = given(tuple(Told(fact, ended_at) for fact in (*many, *ends)), as_of=bench.at)
    bench.orphaned_nodes = OrphanedNodes(bench.here.kube, Counting([offer()], installation=OURS, now=bench.here.clock.now))
    counts = []
    for _ in range(4):
        await bench.remove()
        counts.append(len(set(asked)))
    assert counts == [NODES_PER_TICK_MAX, 2 * NODES_PER_TICK_MAX, len(many), len(many)]
    assert len(asked) == len(many)


async def test_an_instance_of_somebody_else_keeps_its_node(bench: Bench) -> None:
    """Its tags say that it is not ours, whatever the node's label says: that one is looked at seldom."""
    await bench.begin(installation="another")
    for after in (timedelta(0), LATER, 2 * LATER, LONG, LONG + LATER):
        assert await bench.remove(after) == []
    assert bench.is_kept


async def test_a_node_that_is_back_stays(bench: Bench) -> None:
    """The record is a moment old; the node itself is looked at last."""
    await bench.begin()
    assert await bench.remove() == []
    bench.say(is_ready=True)
    assert await bench.remove(LATER) == []
    assert bench.is_kept


async def test_another_node_of_the_same_name_stays(bench: Bench) -> None:
    """Made anew on another instance, or on the same one."""
    await bench.begin()
    assert await bench.remove() == []
    bench.change(lambda item: item["spec"].update(providerID="fake:///zone-a/i-other"))
    assert await bench.remove(LATER) == []
    bench.change(lambda item: item["metadata"].pop("finalizers"))
    bench.here.world.api.delete(SERVED_NODES, NAME)
    bench.here.add_node(NAME, labels={ACTION_ID: "buy-1"})
    bench.change(lambda item: item["spec"].update(providerID=bench.provider_id))
    bench.say(is_ready=False)
    assert await bench.remove(2 * LATER) == []
    assert "deletionTimestamp" not in bench.node["metadata"]


async def test_what_changed_since_it_was_seen_is_not_deleted(bench: Bench) -> None:
    """The version that was looked at is a condition: a kubelet that reports in between is not overruled."""
    await bench.begin()
    seen = await bench.here.kube.get(NODES, "", NAME)
    bench.say(is_ready=True)
    assert not await bench.here.kube.delete_node(seen)
    assert "deletionTimestamp" not in bench.node["metadata"]
    assert await bench.here.kube.delete_node(await bench.here.kube.get(NODES, "", NAME))


async def test_a_provider_that_cannot_be_asked_about_one_removes_nothing(bench: Bench) -> None:
    """Karpenter's: it removes its nodes by itself."""
    await bench.begin()
    blind = OrphanedNodes(bench.here.kube, _Blind())  # type: ignore[arg-type]
    for after in (timedelta(0), LATER):
        assert await blind.remove(bench.state, policy(watch_age_seconds_max=86_400), bench.at + after) == []
    assert bench.is_kept


class _Blind:
    name = "blind"


async def test_a_restart_costs_a_minute_and_no_node(bench: Bench) -> None:
    """What was asked before is forgotten: the first word is asked for again."""
    await bench.begin()
    assert await bench.remove() == []
    bench.orphaned_nodes = OrphanedNodes(bench.here.kube, bench.cloud)
    assert await bench.remove(LATER) == []
    assert bench.is_kept
    assert len(await bench.remove(2 * LATER)) == 1

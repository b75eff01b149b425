"""The executor's steps: each once in effect, however often it is taken. A real API server and a cloud in memory."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.cluster import RunningCluster, running_cluster, until
from tests.support.kube_objects import Json, budget, pod
from tests.support.stories import Story, Told, given, offer, planned, purchase, record

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.scaling import (
    ScalingCheckpointRequested,
    ScalingDrainCancelled,
    ScalingDrainStarted,
    ScalingLaunchRefused,
    ScalingNodeDrained,
    ScalingNodeLaunched,
    ScalingNodeOrdered,
    ScalingNodeTerminated,
    ScalingPodEvicted,
)
from gpu_autoscaler.model.decisions import AnyDecision, CancelDrain, DrainNode, ReleaseInstance
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import ActionId, NodeUid
from gpu_autoscaler.model.reasons.drain import (
    BootTimedOut,
    DemandReturned,
    DrainReason,
    NodeIdle,
    NodeUnderused,
    SpotReclaim,
)
from gpu_autoscaler.providers.fake import FakeCapacity
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.scaler.checkpoint_notices import CheckpointNotices
from gpu_autoscaler_services.scaler.drains import Drains
from gpu_autoscaler_services.scaler.executor import Executor
from gpu_autoscaler_services.scaler.finalizers import Finalizers
from gpu_autoscaler_services.scaler.orphaned_nodes import OrphanedNodes
from gpu_autoscaler_services.scaler.purchases import Purchases

IDLE = NodeIdle(idle_seconds=700, idle_seconds_max=600)
UNDERUSED = NodeUnderused(pods=(), saving_micro_usd_per_hour=1)
RECLAIM = SpotReclaim(notice_id="n", kind="terminate", reclaim_at=None)
LATE_MAX = timedelta(seconds=1200)  # a minute on the wall: the clock is fast, and the machine may be busy


class Bench:
    """An executor with everything it acts on."""

    def __init__(self, here: RunningCluster, store: SqliteStore) -> None:
        self.here = here
        self.cloud = FakeCapacity([offer()], installation="uid", now=here.clock.now)
        self.view, kube = StateView(), here.kube
        purchases, drains = Purchases(self.view, self.cloud, "uid", here.clock.now), Drains(self.view, kube, here.clock)
        self._executor = Executor(
            purchases, drains, store, Finalizers(kube), CheckpointNotices(kube), OrphanedNodes(kube, self.cloud)
        )
        self._story: Story = ()

    def knows(self, *stories: Story) -> None:
        """The record says this from now on."""
        for story in stories:
            self._story = (*self._story, *story)
        self.view.advance(given(self._story, is_synced=False), {})

    def told(self, fact: Fact) -> None:
        """This was said just now."""
        self.knows((Told(fact, self.here.clock.now()),))

    async def step(self, fact: Fact) -> Outcome:
        """Take the step of this fact."""
        (recorded,) = record([Told(fact, self.here.clock.now())])
        outcome = await self._executor.step(recorded)
        return outcome if isinstance(outcome, Outcome) else Outcome(facts=tuple(outcome))

    async def begin(self, decision: AnyDecision) -> tuple[Fact, ...]:
        """Decide this, and take the first step."""
        story = planned(decision, plan_id=f"plan-{decision.action_id}", at=self.here.clock.now())
        self.knows(story)
        return (await self.step(story[0].fact)).facts


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """A bench with node gpu-a."""
    async with running_cluster() as here:
        here.add_node("gpu-a")
        store = await SqliteStore.open(tmp_path / "store.db")
        yield Bench(here, store)
        await store.close()


def drain(here: RunningCluster, reason: DrainReason, *, seconds: float) -> DrainNode:
    """The decision to drain gpu-a within so much cluster time."""
    return DrainNode(
        action_id=ActionId("drain-1"),
        node_uid=NodeUid(here.item("nodes", "gpu-a")["metadata"]["uid"]),
        node_name="gpu-a",
        provider_id=None,
        is_voluntary=not isinstance(reason, SpotReclaim),
        deadline_at=here.clock.now() + timedelta(seconds=seconds),
        reason=reason,
    )


async def ready(here: RunningCluster, *items: Json) -> None:
    """Add pods and wait until they run."""
    for item in items:
        here.add("pods", item)
    names = [item["metadata"]["name"] for item in items]
    await until(lambda: all(here.item("pods", name)["status"].get("phase") == "Running" for name in names))


def owned(name: str, **how: Any) -> Json:  # noqa: ANN401 - as `kube_objects.pod`
    """A pod that somebody would make again."""
    item = pod(name, **how)
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "rs-uid", "controller": True}
    item["metadata"]["ownerReferences"] = [owner]
    return item


def is_cordoned(here: RunningCluster) -> bool:
    """Whether gpu-a takes no new pods."""
    return bool(here.item("nodes", "gpu-a")["spec"].get("unschedulable"))


def kinds(facts: Iterable[Fact]) -> list[type[Fact]]:
    """What was said."""
    return [type(fact) for fact in facts]


async def drain_to_end(bench: Bench, started: Fact) -> list[Fact]:
    """Take the drain's passes until there are no more; return everything that was said."""
    said: list[Fact] = []
    async with asyncio.timeout(60):
        while True:
            outcome = await bench.step(started)
            said += outcome.facts
            if outcome.redeliver_after_seconds is None:
                return said
            await asyncio.sleep(outcome.redeliver_after_seconds)


# ---- buying


async def test_an_order_is_launched_once_whatever_happens_to_the_answer(bench: Bench) -> None:
    """The token makes the second try return the first instance."""
    decision = purchase("a", at=bench.here.clock.now())
    (ordered,) = await bench.begin(decision)
    assert isinstance(ordered, ScalingNodeOrdered)
    bench.cloud.lose_answers(1)
    with pytest.raises(TransientError):
        await bench.step(ordered)
    (launched,) = (await bench.step(ordered)).facts
    assert isinstance(launched, ScalingNodeLaunched)
    assert bench.cloud.launches_count == 1
    bench.told(launched)
    assert (await bench.step(ordered)).facts == ()


async def test_a_refusal_is_a_fact_and_no_retry(bench: Bench) -> None:
    """The next plan goes elsewhere; the order is not tried again."""
    (ordered,) = await bench.begin(purchase("a", at=bench.here.clock.now()))
    bench.cloud.refuse("*")
    (refused,) = (await bench.step(ordered)).facts
    assert isinstance(refused, ScalingLaunchRefused)
    assert (refused.code, refused.scope) == ("InsufficientInstanceCapacity", "offer")
    assert refused.retry_at - refused.refused_at == timedelta(seconds=180)


async def test_a_cloud_that_would_be_asked_again_at_once_is_left_alone_for_a_moment(bench: Bench) -> None:
    """Else every plan would ask it, as fast as plans are made."""
    (ordered,) = await bench.begin(purchase("a", at=bench.here.clock.now()))
    bench.cloud.refuse("*", retry_after_seconds=0.0)
    (refused,) = (await bench.step(ordered)).facts
    assert isinstance(refused, ScalingLaunchRefused)
    assert refused.retry_at - refused.refused_at == timedelta(seconds=10)


async def test_nothing_is_launched_for_an_order_that_is_over(bench: Bench) -> None:
    """Past its deadline, or given back before the executor came to it."""
    now = bench.here.clock.now()
    (late,) = await bench.begin(purchase("late", at=now, boot_seconds_max=0.0))
    assert (await bench.step(late)).facts == ()
    (released,) = await bench.begin(purchase("released", at=now))
    (ended,) = await bench.begin(release("released"))
    assert isinstance(ended, ScalingNodeTerminated)
    assert ended.provider_id is None  # it never was
    assert (await bench.step(released)).facts == ()
    assert bench.cloud.launches_count == 0


def release(order: str) -> ReleaseInstance:
    """The decision to give an order back."""
    return ReleaseInstance(
        action_id=ActionId(f"release-{order}"),
        provider_id=None,
        order_action_id=ActionId(order),
        reason=BootTimedOut(booting_seconds=901, boot_seconds_max=900),
    )


async def test_an_instance_that_nobody_heard_of_is_found_by_its_order(bench: Bench) -> None:
    """The launch was done and its answer lost for good: the cloud's list knows the tag."""
    (ordered,) = await bench.begin(purchase("a", at=bench.here.clock.now()))
    bench.cloud.lose_answers(1)
    with pytest.raises(TransientError):
        await bench.step(ordered)
    (ended,) = await bench.begin(release("a"))
    assert isinstance(ended, ScalingNodeTerminated)
    assert (ended.order_action_id, ended.provider_id is None) == ("a", False)
    assert [one.state for one in await bench.cloud.instances("uid")] == ["terminated"]


async def test_a_failing_decision_does_not_hold_up_the_others(bench: Bench) -> None:
    """The order is said at once, the release is tried again with the plan."""
    decisions = (release("gone"), purchase("b", at=bench.here.clock.now()))
    (story,) = planned(*decisions, at=bench.here.clock.now())
    bench.knows((story,))
    bench.cloud.lose_answers(1)
    outcome = await bench.step(story.fact)
    assert kinds(outcome.facts) == [ScalingNodeOrdered]
    assert outcome.redeliver_after_seconds is not None
    bench.told(outcome.facts[0])
    again = await bench.step(story.fact)
    assert kinds(again.facts) == [ScalingNodeTerminated]
    assert again.redeliver_after_seconds is None


# ---- removing


async def test_an_empty_node_is_cordoned_drained_and_ended(bench: Bench) -> None:
    """Cordon first; then nothing is left to evict."""
    (started,) = await bench.begin(drain(bench.here, IDLE, seconds=600))
    assert isinstance(started, ScalingDrainStarted)
    assert is_cordoned(bench.here)
    assert kinds(await drain_to_end(bench, started)) == [ScalingNodeDrained]


@pytest.mark.parametrize("reason", [IDLE, RECLAIM])
async def test_volumes_of_an_empty_node_are_waited_for_until_the_deadline(bench: Bench, reason: DrainReason) -> None:
    """Who comes next could not have them before; one that never detaches holds up nothing for good."""
    attached = {"attacher": "csi.example.com", "nodeName": "gpu-a", "source": {"persistentVolumeName": "pv"}}
    bench.here.add("attachments", {"metadata": {"name": "attached"}, "spec": attached})
    (started,) = await bench.begin(drain(bench.here, reason, seconds=120))
    waiting = await bench.step(started)
    assert (waiting.facts, waiting.redeliver_after_seconds is None) == ((), False)
    assert kinds(await drain_to_end(bench, started)) == [ScalingNodeDrained]
    assert bench.here.clock.now() >= started.deadline_at  # type: ignore[attr-defined]


async def test_a_node_that_is_not_idle_any_more_stays(bench: Bench) -> None:
    """A pod landed between the plan and the cordon: the node is uncordoned, the pod left alone."""
    await ready(bench.here, owned("new"))
    (cancelled,) = await bench.begin(drain(bench.here, IDLE, seconds=600))
    assert isinstance(cancelled, ScalingDrainCancelled)
    assert not is_cordoned(bench.here)
    assert bench.here.item("pods", "new")["metadata"].get("deletionTimestamp") is None


async def test_a_voluntary_drain_stops_at_a_protected_pod(bench: Bench) -> None:
    """do-not-disrupt is obeyed although the plan did not see it; an involuntary drain moves it all the same."""
    await ready(bench.here, owned("kept", annotations={"gpu-autoscaler.io/do-not-disrupt": "true"}))
    assert kinds(await bench.begin(drain(bench.here, UNDERUSED, seconds=600))) == [ScalingDrainCancelled]
    doomed = msgspec.structs.replace(drain(bench.here, RECLAIM, seconds=120), action_id=ActionId("drain-2"))
    _, started = await bench.begin(doomed)
    assert isinstance(started, ScalingDrainStarted)
    annotations = bench.here.item("pods", "kept")["metadata"]["annotations"]
    assert annotations["gpu-autoscaler.io/checkpoint-requested"] == doomed.deadline_at.isoformat()
    assert kinds(await drain_to_end(bench, started)) == [ScalingPodEvicted, ScalingNodeDrained]


async def test_a_budget_holds_a_voluntary_drain_until_it_is_given_up(bench: Bench) -> None:
    """429 means later; at the deadline the node is uncordoned and the pod still runs."""
    await ready(bench.here, owned("guarded", labels={"app": "train"}))
    bench.here.add("budgets", budget("one", "train"))
    await until(lambda: bench.here.item("budgets", "one")["status"].get("expectedPods"))
    (started,) = await bench.begin(drain(bench.here, UNDERUSED, seconds=100))
    first = await bench.step(started)
    assert first.facts == ()
    assert first.redeliver_after_seconds is not None
    assert kinds(await drain_to_end(bench, started)) == [ScalingDrainCancelled]
    assert not is_cordoned(bench.here)
    assert bench.here.item("pods", "guarded")["status"]["phase"] == "Running"


async def test_a_budget_does_not_outlive_an_involuntary_deadline(bench: Bench) -> None:
    """Evicted first, forced only when the pod's grace is all that is left, gone before the deadline."""
    await ready(bench.here, owned("guarded", labels={"app": "train"}))
    bench.here.add("budgets", budget("one", "train"))
    await until(lambda: bench.here.item("budgets", "one")["status"].get("expectedPods"))
    decision = drain(bench.here, RECLAIM, seconds=60)
    _, started = await bench.begin(decision)
    assert isinstance(started, ScalingDrainStarted)
    said = await drain_to_end(bench, started)
    assert kinds(said) == [ScalingPodEvicted, ScalingNodeDrained]
    forced, done = said
    assert isinstance(forced, ScalingPodEvicted)
    assert isinstance(done, ScalingNodeDrained)
    assert forced.is_forced
    assert forced.evicted_at >= decision.deadline_at - timedelta(seconds=5)  # the pod's grace period
    assert done.drained_at <= decision.deadline_at + LATE_MAX


async def test_pods_leave_in_the_order_of_their_eviction_priority(bench: Bench) -> None:
    """Low first, training last; each wave waits for the one before."""
    await ready(
        bench.here,
        owned("a-training", labels={"gpu-autoscaler.io/workload-type": "training"}),
        owned("b-plain"),
        owned("c-low", annotations={"gpu-autoscaler.io/eviction-priority": "low"}),
    )
    _, started = await bench.begin(drain(bench.here, RECLAIM, seconds=600))
    assert isinstance(started, ScalingDrainStarted)
    said = [one.pod for one in await drain_to_end(bench, started) if isinstance(one, ScalingPodEvicted)]
    assert said == ["default/c-low", "default/b-plain", "default/a-training"]


async def test_a_pod_that_can_save_is_left_to_it_until_it_has(bench: Bench) -> None:
    """Told with the deadline, it stays while it saves and goes when it has answered; others are not waited for."""
    await ready(bench.here, owned("saves", annotations={"gpu-autoscaler.io/checkpointed-at": ""}), owned("cannot"))
    decision = drain(bench.here, RECLAIM, seconds=3600)
    asked, started = await bench.begin(decision)
    assert isinstance(asked, ScalingCheckpointRequested)
    assert isinstance(started, ScalingDrainStarted)
    assert (asked.pods, asked.deadline_at) == (("default/cannot", "default/saves"), decision.deadline_at)
    evicted = [one for one in (await bench.step(started)).facts if isinstance(one, ScalingPodEvicted)]
    assert [one.pod for one in evicted] == ["default/cannot"]
    (pod_left,) = [one for one in await bench.here.kube.pods_on("gpu-a") if one.metadata.name == "saves"]
    answer = {"gpu-autoscaler.io/checkpointed-at": bench.here.clock.now().isoformat()}
    assert await bench.here.kube.annotate_pod(pod_left, answer)
    said = await drain_to_end(bench, started)
    assert [one.pod for one in said if isinstance(one, ScalingPodEvicted)] == ["default/saves"]


async def test_a_pod_that_never_answers_goes_when_its_grace_is_all_that_is_left(bench: Bench) -> None:
    """Who promises to save and does not is gone by the deadline all the same."""
    await ready(bench.here, owned("silent", annotations={"gpu-autoscaler.io/checkpointed-at": ""}))
    decision = drain(bench.here, RECLAIM, seconds=30)
    _, started = await bench.begin(decision)
    assert isinstance(started, ScalingDrainStarted)
    *_, done = await drain_to_end(bench, started)
    assert isinstance(done, ScalingNodeDrained)
    assert done.drained_at <= decision.deadline_at + LATE_MAX


def cancellation(of: DrainNode) -> CancelDrain:
    """What the plan says when demand is back."""
    return CancelDrain(
        action_id=ActionId("cancel-1"),
        drain_action_id=of.action_id,
        node_uid=of.node_uid,
        node_name="gpu-a",
        reason=DemandReturned(demand=()),
    )


async def test_a_cancelled_drain_leaves_the_rest_alone(bench: Bench) -> None:
    """The cancellation uncordons; the pass that comes after it does nothing."""
    await ready(bench.here, owned("stays", labels={"app": "train"}))
    decision = drain(bench.here, UNDERUSED, seconds=600)
    (started,) = await bench.begin(decision)
    assert kinds(await bench.begin(cancellation(decision))) == [ScalingDrainCancelled]
    assert not is_cordoned(bench.here)
    assert await bench.step(started) == Outcome()
    assert bench.here.item("pods", "stays")["metadata"].get("deletionTimestamp") is None


async def test_a_node_that_is_gone_is_drained(bench: Bench) -> None:
    """Another node of the same name is not the one that was meant."""
    decision = msgspec.structs.replace(drain(bench.here, IDLE, seconds=600), node_uid=NodeUid("other"))
    assert kinds(await bench.begin(decision)) == [ScalingNodeDrained]
    assert not is_cordoned(bench.here)


async def test_work_that_moves_by_choice_is_asked_to_save_first(bench: Bench) -> None:
    """Who can save is told, waited for, and goes once it has saved; nobody else is told anything."""
    await ready(bench.here, owned("saves", annotations={"gpu-autoscaler.io/checkpointed-at": ""}), owned("cannot"))
    asked, started = await bench.begin(drain(bench.here, UNDERUSED, seconds=600))
    assert isinstance(asked, ScalingCheckpointRequested)
    assert isinstance(started, ScalingDrainStarted)
    assert asked.pods == ("default/saves",)
    evicted = [one.pod for one in (await bench.step(started)).facts if isinstance(one, ScalingPodEvicted)]
    assert evicted == ["default/cannot"]
    (saves,) = [one for one in await bench.here.kube.pods_on("gpu-a") if one.metadata.name == "saves"]
    answer = {"gpu-autoscaler.io/checkpointed-at": bench.here.clock.now().isoformat()}
    assert await bench.here.kube.annotate_pod(saves, answer)
    said = await drain_to_end(bench, started)
    assert [one.pod for one in said if isinstance(one, ScalingPodEvicted)] == ["default/saves"]


async def test_work_that_does_not_save_is_not_moved_by_choice(bench: Bench) -> None:
    """It is never told to go unsaved: at the deadline the drain is given up, and the node stays."""
    await ready(bench.here, owned("slow", annotations={"gpu-autoscaler.io/checkpointed-at": ""}))
    _, started = await bench.begin(drain(bench.here, UNDERUSED, seconds=120))
    assert isinstance(started, ScalingDrainStarted)
    *said, last = await drain_to_end(bench, started)
    assert isinstance(last, ScalingDrainCancelled)
    assert [one for one in said if isinstance(one, ScalingPodEvicted)] == []

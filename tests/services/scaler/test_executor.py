"""The executor's steps are idempotent. A real API server and an in-memory cloud."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from tests.support.cluster import RunningCluster, running_cluster, until
from tests.support.fake_capacity import FakeCapacity
from tests.support.kube_objects import Json, budget, pod
from tests.support.stories import Story, TimedFact, given, offer, planned, purchase, record
from tests.support.upkeep import steps_of

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.scaling import (
    ScalingCheckpointRequested,
    ScalingDrainCancelled,
    ScalingDrainResynced,
    ScalingDrainStarted,
    ScalingLaunchRefused,
    ScalingNodeDrained,
    ScalingNodeLaunched,
    ScalingNodeOrdered,
    ScalingNodeTerminated,
    ScalingPlanMade,
    ScalingPodEvicted,
)
from gpu_autoscaler.model.decisions import AnyDecision, CancelDrain, DrainNode, ReleaseInstance
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import ActionId, NodeUid, ProviderId
from gpu_autoscaler.model.reasons.drain import (
    BootTimedOut,
    DemandReturned,
    DrainReason,
    NodeIdle,
    NodeUnderused,
    SpotReclaim,
)
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.publisher import as_outcome
from gpu_autoscaler.runtime.service import Outcome, Step
from gpu_autoscaler.runtime.steps import take_steps
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.scaler.drains import Drains
from gpu_autoscaler_services.scaler.executor import Executor
from gpu_autoscaler_services.scaler.living import living
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
        self.executor = Executor(purchases, drains, store, steps_of(kube, self.cloud, here.clock.now))
        self._story: Story = ()

    def record_story(self, *stories: Story) -> None:
        """Fold these stories."""
        for story in stories:
            self._story = (*self._story, *story)
        self.view.advance(given(self._story, is_synced=False), {})

    def record_fact(self, fact: Fact) -> None:
        """Fold this fact, published now."""
        self.record_story((TimedFact(fact, self.here.clock.now()),))

    async def step(self, fact: Fact) -> Outcome:
        """Take the step of this fact."""
        (recorded,) = record([TimedFact(fact, self.here.clock.now())])
        outcome = as_outcome(await self.executor.step(recorded))
        if not outcome.steps:
            return outcome
        facts: list[Fact] = []

        async def publish(part: Outcome) -> None:
            facts.extend(part.facts)

        async def call(step: Step) -> Outcome:
            return as_outcome(await step())

        again_seconds = await take_steps(outcome, call, publish)
        return Outcome(facts=tuple(facts), redeliver_after_seconds=again_seconds)

    async def begin(self, decision: AnyDecision) -> tuple[Fact, ...]:
        """Publish a plan with this decision, and take its first step."""
        story = planned(decision, plan_id=f"plan-{decision.action_id}", at=self.here.clock.now())
        self.record_story(story)
        return (await self.step(story[0].fact)).facts


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """A bench with node gpu-a."""
    async with running_cluster() as here:
        here.add_node("gpu-a")
        store = await SqliteStore.open(tmp_path / "store.db")
        yield Bench(here, store)
        await store.close()


def drain(here: RunningCluster, reason: DrainReason, *, seconds: float, node: str = "gpu-a") -> DrainNode:
    """Return a decision to drain this node within this many seconds of cluster time."""
    return DrainNode(
        action_id=ActionId("drain-1" if node == "gpu-a" else f"drain-{node}"),
        node_uid=NodeUid(here.item("nodes", node)["metadata"]["uid"]),
        node_name=node,
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
    """Return a pod with a controller that would replace it."""
    item = pod(name, **how)
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "rs-uid", "controller": True}
    item["metadata"]["ownerReferences"] = [owner]
    return item


def is_cordoned(here: RunningCluster) -> bool:
    """Return True if gpu-a is unschedulable."""
    return bool(here.item("nodes", "gpu-a")["spec"].get("unschedulable"))


def kinds(facts: Iterable[Fact]) -> list[type[Fact]]:
    """Return the types of the facts."""
    return [type(fact) for fact in facts]


async def drain_to_end(bench: Bench, started: Fact) -> list[Fact]:
    """Repeat the drain's pass until it ends; return all facts."""
    facts: list[Fact] = []
    async with asyncio.timeout(60):
        while True:
            outcome = await bench.step(started)
            facts += outcome.facts
            if outcome.redeliver_after_seconds is None:
                return facts
            await asyncio.sleep(outcome.redeliver_after_seconds)


# ---- buying


class HangingStore:
    """A store that does not answer until `answers` is set."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self.answers = asyncio.Event()

    async def record_plan(self, fact: ScalingPlanMade, *, made_at: datetime) -> bool:
        """Store the plan then."""
        await self.answers.wait()
        return await self._store.record_plan(fact, made_at=made_at)


async def test_a_node_under_notice_does_not_wait_for_the_store(bench: Bench, tmp_path: Path) -> None:
    """The others do: what is removed by choice is known after the loss of all streams."""
    bench.here.add_node("gpu-b")
    store = await SqliteStore.open(tmp_path / "hanging.db")
    hanging = HangingStore(store)
    bench.executor._store = cast("Store", hanging)
    by_notice, by_choice = drain(bench.here, RECLAIM, seconds=120), drain(bench.here, IDLE, seconds=120, node="gpu-b")
    story = planned(by_choice, by_notice, at=bench.here.clock.now())
    bench.record_story(story)
    stepping = asyncio.create_task(bench.step(story[0].fact))

    await until(lambda: bench.here.item("nodes", "gpu-a")["spec"].get("unschedulable"))
    assert not bench.here.item("nodes", "gpu-b")["spec"].get("unschedulable")
    hanging.answers.set()
    await stepping
    assert bench.here.item("nodes", "gpu-b")["spec"].get("unschedulable")
    assert (await store.plans()).rows
    await store.close()


async def test_order_with_lost_answer_is_launched_once(bench: Bench) -> None:
    """The token makes the retry return the first instance."""
    decision = purchase("a", at=bench.here.clock.now())
    (ordered,) = await bench.begin(decision)
    assert isinstance(ordered, ScalingNodeOrdered)
    bench.cloud.lose_answers(1)
    with pytest.raises(TransientError):
        await bench.step(ordered)
    (launched,) = (await bench.step(ordered)).facts
    assert isinstance(launched, ScalingNodeLaunched)
    assert bench.cloud.launches_count == 1
    bench.record_fact(launched)
    assert (await bench.step(ordered)).facts == ()


async def test_refused_launch_is_published_and_not_retried(bench: Bench) -> None:
    """The next plan buys another offer."""
    (ordered,) = await bench.begin(purchase("a", at=bench.here.clock.now()))
    bench.cloud.refuse("*")
    (refused,) = (await bench.step(ordered)).facts
    assert isinstance(refused, ScalingLaunchRefused)
    assert (refused.code, refused.scope) == ("InsufficientInstanceCapacity", "offer")
    assert refused.retry_at - refused.refused_at == timedelta(seconds=180)


async def test_refusal_without_retry_time_backs_off_ten_seconds(bench: Bench) -> None:
    """Otherwise every plan would retry it."""
    (ordered,) = await bench.begin(purchase("a", at=bench.here.clock.now()))
    bench.cloud.refuse("*", retry_after_seconds=0.0)
    (refused,) = (await bench.step(ordered)).facts
    assert isinstance(refused, ScalingLaunchRefused)
    assert refused.retry_at - refused.refused_at == timedelta(seconds=10)


async def test_late_or_released_order_is_not_launched(bench: Bench) -> None:
    """Past its deadline, or released before the executor reached it."""
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
    """Return the decision to release an order."""
    return ReleaseInstance(
        action_id=ActionId(f"release-{order}"),
        provider_id=None,
        order_action_id=ActionId(order),
        reason=BootTimedOut(booting_seconds=901, boot_seconds_max=900),
    )


async def test_unrecorded_instance_is_found_by_its_order(bench: Bench) -> None:
    """The launch succeeded and its answer was lost: the cloud's list has the tag."""
    (ordered,) = await bench.begin(purchase("a", at=bench.here.clock.now()))
    bench.cloud.lose_answers(1)
    with pytest.raises(TransientError):
        await bench.step(ordered)
    (ended,) = await bench.begin(release("a"))
    assert isinstance(ended, ScalingNodeTerminated)
    assert (ended.order_action_id, ended.provider_id is None) == ("a", False)
    assert [instance.state for instance in await bench.cloud.instances("uid")] == ["terminated"]


async def test_failing_decision_does_not_delay_others(bench: Bench) -> None:
    """The order is published at once; the release is retried with the plan."""
    decisions = (release("gone"), purchase("b", at=bench.here.clock.now()))
    (story,) = planned(*decisions, at=bench.here.clock.now())
    bench.record_story((story,))
    bench.cloud.lose_answers(1)
    outcome = await bench.step(story.fact)
    assert kinds(outcome.facts) == [ScalingNodeOrdered]
    assert outcome.redeliver_after_seconds is not None
    bench.record_fact(outcome.facts[0])
    again = await bench.step(story.fact)
    assert kinds(again.facts) == [ScalingNodeTerminated]
    assert again.redeliver_after_seconds is None


# ---- removing


async def test_empty_node_is_cordoned_and_drained(bench: Bench) -> None:
    """Cordon first; then there is nothing to evict."""
    (started,) = await bench.begin(drain(bench.here, IDLE, seconds=600))
    assert isinstance(started, ScalingDrainStarted)
    assert is_cordoned(bench.here)
    assert kinds(await drain_to_end(bench, started)) == [ScalingNodeDrained]


@pytest.mark.parametrize("reason", [IDLE, RECLAIM])
async def test_drain_awaits_volume_detachment_until_deadline(bench: Bench, reason: DrainReason) -> None:
    """Their next pods need them; a volume that never detaches does not block the drain."""
    attached = {"attacher": "csi.example.com", "nodeName": "gpu-a", "source": {"persistentVolumeName": "pv"}}
    bench.here.add("attachments", {"metadata": {"name": "attached"}, "spec": attached})
    (started,) = await bench.begin(drain(bench.here, reason, seconds=120))
    waiting = await bench.step(started)
    assert (waiting.facts, waiting.redeliver_after_seconds is None) == ((), False)
    assert kinds(await drain_to_end(bench, started)) == [ScalingNodeDrained]
    assert bench.here.clock.now() >= started.deadline_at  # type: ignore[attr-defined]


async def test_idle_drain_is_cancelled_by_new_pod(bench: Bench) -> None:
    """A pod was bound between plan and cordon: the node is uncordoned, the pod stays."""
    await ready(bench.here, owned("new"))
    (cancelled,) = await bench.begin(drain(bench.here, IDLE, seconds=600))
    assert isinstance(cancelled, ScalingDrainCancelled)
    assert not is_cordoned(bench.here)
    assert bench.here.item("pods", "new")["metadata"].get("deletionTimestamp") is None


async def test_protected_pod_stops_only_voluntary_drain(bench: Bench) -> None:
    """The executor honors do-not-disrupt that the plan did not see; an involuntary drain evicts the pod."""
    await ready(bench.here, owned("kept", annotations={"gpu-autoscaler.io/do-not-disrupt": "true"}))
    assert kinds(await bench.begin(drain(bench.here, UNDERUSED, seconds=600))) == [ScalingDrainCancelled]
    at_risk = msgspec.structs.replace(drain(bench.here, RECLAIM, seconds=120), action_id=ActionId("drain-2"))
    _, started = await bench.begin(at_risk)
    assert isinstance(started, ScalingDrainStarted)
    annotations = bench.here.item("pods", "kept")["metadata"]["annotations"]
    assert annotations["gpu-autoscaler.io/checkpoint-requested"] == at_risk.deadline_at.isoformat()
    assert kinds(await drain_to_end(bench, started)) == [ScalingPodEvicted, ScalingNodeDrained]


async def test_pdb_delays_voluntary_drain_until_it_is_abandoned(bench: Bench) -> None:
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


async def test_pdb_is_overridden_at_involuntary_deadline(bench: Bench) -> None:
    """Eviction first, deletion when only the pod's grace period is left, gone before the deadline."""
    await ready(bench.here, owned("guarded", labels={"app": "train"}))
    bench.here.add("budgets", budget("one", "train"))
    await until(lambda: bench.here.item("budgets", "one")["status"].get("expectedPods"))
    decision = drain(bench.here, RECLAIM, seconds=60)
    _, started = await bench.begin(decision)
    assert isinstance(started, ScalingDrainStarted)
    facts = await drain_to_end(bench, started)
    assert kinds(facts) == [ScalingPodEvicted, ScalingNodeDrained]
    forced, done = facts
    assert isinstance(forced, ScalingPodEvicted)
    assert isinstance(done, ScalingNodeDrained)
    assert forced.is_forced
    assert forced.evicted_at >= decision.deadline_at - timedelta(seconds=5)  # the pod's grace period
    assert done.drained_at <= decision.deadline_at + LATE_MAX


@pytest.mark.parametrize(
    "labels",
    [
        {"gpu-autoscaler.io/workload-type": "training"},
        {"workload-type": "training"},
        {"gpu-autoscaler.io/workload-type": "training", "workload-type": "batch"},
    ],
)
async def test_pods_are_evicted_by_priority(bench: Bench, labels: dict[str, str]) -> None:
    """Low first, training last; each wave waits for the one before. Our label precedes the plain one."""
    await ready(
        bench.here,
        owned("a-training", labels=labels),
        owned("b-plain"),
        owned("c-low", annotations={"gpu-autoscaler.io/eviction-priority": "low"}),
    )
    _, started = await bench.begin(drain(bench.here, RECLAIM, seconds=600))
    assert isinstance(started, ScalingDrainStarted)
    evicted = [fact.pod for fact in await drain_to_end(bench, started) if isinstance(fact, ScalingPodEvicted)]
    assert evicted == ["default/c-low", "default/b-plain", "default/a-training"]


async def test_pod_that_can_save_is_evicted_after_checkpoint(bench: Bench) -> None:
    """It is asked with the deadline and evicted once it has answered; others are not waited for."""
    await ready(bench.here, owned("saves", annotations={"gpu-autoscaler.io/checkpointed-at": ""}), owned("cannot"))
    decision = drain(bench.here, RECLAIM, seconds=3600)
    asked, started = await bench.begin(decision)
    assert isinstance(asked, ScalingCheckpointRequested)
    assert isinstance(started, ScalingDrainStarted)
    assert (asked.pods, asked.deadline_at) == (("default/cannot", "default/saves"), decision.deadline_at)
    evicted = [fact for fact in (await bench.step(started)).facts if isinstance(fact, ScalingPodEvicted)]
    assert [fact.pod for fact in evicted] == ["default/cannot"]
    (pod_left,) = [pod for pod in await bench.here.kube.pods_on("gpu-a") if pod.metadata.name == "saves"]
    answer = {"gpu-autoscaler.io/checkpointed-at": bench.here.clock.now().isoformat()}
    assert await bench.here.kube.annotate_pod(pod_left, answer)
    facts = await drain_to_end(bench, started)
    assert [fact.pod for fact in facts if isinstance(fact, ScalingPodEvicted)] == ["default/saves"]


async def test_pod_without_checkpoint_is_evicted_before_deadline(bench: Bench) -> None:
    """A pod that can save and does not is gone by the deadline."""
    await ready(bench.here, owned("silent", annotations={"gpu-autoscaler.io/checkpointed-at": ""}))
    decision = drain(bench.here, RECLAIM, seconds=30)
    _, started = await bench.begin(decision)
    assert isinstance(started, ScalingDrainStarted)
    *_, done = await drain_to_end(bench, started)
    assert isinstance(done, ScalingNodeDrained)
    assert done.drained_at <= decision.deadline_at + LATE_MAX


def cancellation(of: DrainNode) -> CancelDrain:
    """Return the decision to cancel a drain when demand returns."""
    return CancelDrain(
        action_id=ActionId("cancel-1"),
        drain_action_id=of.action_id,
        node_uid=of.node_uid,
        node_name="gpu-a",
        reason=DemandReturned(demand=()),
    )


async def test_cancelled_drain_evicts_nothing_more(bench: Bench) -> None:
    """The cancellation uncordons; the next pass does nothing."""
    await ready(bench.here, owned("stays", labels={"app": "train"}))
    decision = drain(bench.here, UNDERUSED, seconds=600)
    (started,) = await bench.begin(decision)
    assert kinds(await bench.begin(cancellation(decision))) == [ScalingDrainCancelled]
    assert not is_cordoned(bench.here)
    assert await bench.step(started) == Outcome()
    assert bench.here.item("pods", "stays")["metadata"].get("deletionTimestamp") is None


def repeated(bench: Bench) -> ScalingDrainResynced:
    """Return the only removal as the scaler publishes it again."""
    (fact,) = (fact for fact in living(bench.view.state) if isinstance(fact, ScalingDrainResynced))
    return fact


async def test_a_removal_continues_by_its_repeated_record(bench: Bench) -> None:
    """At each step: the stream may have discarded the plan, or the fact that led to the step."""
    decision = msgspec.structs.replace(drain(bench.here, RECLAIM, seconds=120), provider_id=ProviderId("sim://a"))
    bench.record_story(planned(decision, at=bench.here.clock.now()))
    for expected in (ScalingDrainStarted, ScalingNodeDrained):
        (fact,) = (await bench.step(repeated(bench))).facts
        assert isinstance(fact, expected)
        bench.record_fact(fact)
    assert is_cordoned(bench.here)
    (ended,) = (await bench.step(repeated(bench))).facts
    assert isinstance(ended, ScalingNodeTerminated)
    assert await bench.step(msgspec.structs.replace(repeated(bench), terminated=ended)) == Outcome()


async def test_a_cancellation_continues_by_the_repeated_record_of_its_drain(bench: Bench) -> None:
    """The node would stay cordoned for ever."""
    decision = drain(bench.here, UNDERUSED, seconds=600)
    (started,) = await bench.begin(decision)
    bench.record_fact(started)
    bench.record_story(planned(cancellation(decision), plan_id="plan-2", at=bench.here.clock.now()))
    assert kinds((await bench.step(repeated(bench))).facts) == [ScalingDrainCancelled]
    assert not is_cordoned(bench.here)


async def test_missing_node_counts_as_drained(bench: Bench) -> None:
    """Another node of the same name is not touched."""
    decision = msgspec.structs.replace(drain(bench.here, IDLE, seconds=600), node_uid=NodeUid("other"))
    assert kinds(await bench.begin(decision)) == [ScalingNodeDrained]
    assert not is_cordoned(bench.here)


async def test_voluntary_drain_awaits_checkpoint(bench: Bench) -> None:
    """Only pods that can save are asked; they are evicted once they have."""
    await ready(bench.here, owned("saves", annotations={"gpu-autoscaler.io/checkpointed-at": ""}), owned("cannot"))
    asked, started = await bench.begin(drain(bench.here, UNDERUSED, seconds=600))
    assert isinstance(asked, ScalingCheckpointRequested)
    assert isinstance(started, ScalingDrainStarted)
    assert asked.pods == ("default/saves",)
    evicted = [fact.pod for fact in (await bench.step(started)).facts if isinstance(fact, ScalingPodEvicted)]
    assert evicted == ["default/cannot"]
    (saves,) = [pod for pod in await bench.here.kube.pods_on("gpu-a") if pod.metadata.name == "saves"]
    answer = {"gpu-autoscaler.io/checkpointed-at": bench.here.clock.now().isoformat()}
    assert await bench.here.kube.annotate_pod(saves, answer)
    facts = await drain_to_end(bench, started)
    assert [fact.pod for fact in facts if isinstance(fact, ScalingPodEvicted)] == ["default/saves"]


async def test_voluntary_drain_without_checkpoint_is_abandoned(bench: Bench) -> None:
    """At the deadline the node stays, and the pod was never evicted."""
    slow = {"gpu-autoscaler.io/checkpointed-at": "", "simcluster.gpu-autoscaler.io/save-seconds": "900"}
    await ready(bench.here, owned("slow", annotations=slow))
    _, started = await bench.begin(drain(bench.here, UNDERUSED, seconds=120))
    assert isinstance(started, ScalingDrainStarted)
    *facts, last = await drain_to_end(bench, started)
    assert isinstance(last, ScalingDrainCancelled)
    assert [fact for fact in facts if isinstance(fact, ScalingPodEvicted)] == []

"""Pods on a node that Karpenter deletes are asked to save a checkpoint; the node is left to Karpenter."""

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import ClassVar

import pytest
import structlog
from prometheus_client import CollectorRegistry
from tests.support.cluster import RunningCluster, running_cluster
from tests.support.kube_objects import Json, pod
from tests.support.runners import Place, running, until
from tests.support.stories import HOUR, TimedFact, given, policy
from tests.support.upkeep import PlannedUpkeep, steps_of
from tests.unit.kube.test_checkpoint_hooks import HOOK, listening

from gpu_autoscaler.core.policy.disruption_settings import RemovalPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.scaling import ScalingCheckpointRequested
from gpu_autoscaler.kube.checkpoint_hooks import CheckpointHooks
from gpu_autoscaler.kube.protocol import NODES
from gpu_autoscaler.kube.translate.node import node_observed
from gpu_autoscaler.kube.translate.pod import pod_observed
from gpu_autoscaler.model.decisions import RequestJobCheckpoint, RequestPreemptionCheckpoint
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import ActionId, JobId, PlanId
from gpu_autoscaler.model.labels import (
    ACTION_ID,
    CHECKPOINT_REQUESTED,
    CHECKPOINT_REQUESTED_AT,
    CHECKPOINTED_AT,
    JOB_ID,
    KARPENTER_REGISTERED,
)
from gpu_autoscaler.model.reasons.preempt import PriorityPreempted
from gpu_autoscaler.model.reasons.upkeep import CheckpointDue
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.simcluster.kinds import NODES as SERVED_NODES
from gpu_autoscaler.simcluster.kinds import PODS as SERVED_PODS
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.pod_watcher.service import PodWatcher
from gpu_autoscaler_services.scaler.checkpoint_notices import JobRequest
from gpu_autoscaler_services.scaler.drains import Drains
from gpu_autoscaler_services.scaler.executor import Executor
from gpu_autoscaler_services.scaler.inventory import InstanceWatch
from gpu_autoscaler_services.scaler.purchases import Purchases
from gpu_autoscaler_services.scaler.recovery import DecisionRecovery
from gpu_autoscaler_services.scaler.service import Digests, Scaler

NODE = "gpu-a"
NO_FINALIZERS = policy(removal=RemovalPolicy(is_finalizer_on=False))


async def observed_state(here: RunningCluster) -> ClusterState:
    """Return the state that the pod watcher would have published by now."""
    now = here.clock.now()
    pods = [pod_observed(pod, epoch=1) for pod in await here.kube.pods_on(NODE)]
    facts = (node_observed(await here.kube.get(NODES, "", NODE), epoch=1), *pods)
    return given(tuple(TimedFact(fact, now) for fact in facts), as_of=now)


def delete_as_karpenter(here: RunningCluster) -> datetime:
    """Delete the node, held by Karpenter's finalizer; return since when."""
    here.world.api.modify(
        SERVED_NODES, NODE, lambda item: item["metadata"].update(finalizers=["karpenter.sh/termination"])
    )
    here.world.api.delete(SERVED_NODES, NODE)
    return datetime.fromisoformat(here.item("nodes", NODE)["metadata"]["deletionTimestamp"])


def add_pod_with_hook(here: RunningCluster, name: str, port: int) -> None:
    """Add a running pod to the node, with a hook at which this test listens."""
    item = pod(name, nodeName=NODE, terminationGracePeriodSeconds=30)
    item["metadata"]["annotations"] = {HOOK: f":{port}/save"}
    here.add("pods", item)

    def runs(thing: Json) -> None:
        thing["status"] |= {"phase": "Running", "podIP": "127.0.0.1"}

    here.world.api.modify(SERVED_PODS, f"default/{name}", runs)


async def test_pods_are_notified_once_and_node_stays() -> None:
    """With the end of their own grace period as deadline; no state notifies a pod again."""
    hooks = CheckpointHooks()
    async with listening() as (port, requests), running_cluster(clock_factor=1.0) as here:
        here.add_node(NODE, labels={ACTION_ID: "buy-1", KARPENTER_REGISTERED: "true"})
        add_pod_with_hook(here, "train", port)
        notices = PlannedUpkeep(here.kube, here.provider, hooks)
        assert await notices.take(await observed_state(here), NO_FINALIZERS, here.clock.now()) == []
        assert requests == [], "not deleted yet"

        ends_at = (delete_as_karpenter(here) + timedelta(seconds=30)).isoformat()
        before = await observed_state(here)
        published: list[Fact] = []
        for state in (before, before, await observed_state(here)):
            published += await notices.take(state, NO_FINALIZERS, here.clock.now())
        await hooks.flush()
        pod_metadata, node = here.item("pods", "train")["metadata"], here.item("nodes", NODE)
    await hooks.close()

    (requested,) = published
    assert isinstance(requested, ScalingCheckpointRequested)
    assert (requested.node_name, requested.pods) == (NODE, ("default/train",))
    assert requested.deadline_at.isoformat() == ends_at
    assert requests == [("/save", {"pod": "default/train", "deadline_at": ends_at})]
    assert pod_metadata["annotations"][CHECKPOINT_REQUESTED] == ends_at
    assert "deletionTimestamp" not in pod_metadata, "we evict no pod"
    assert not node["spec"].get("unschedulable")
    assert node["metadata"]["finalizers"] == ["karpenter.sh/termination"]


def periodic(now: datetime) -> RequestJobCheckpoint:
    """The job is due."""
    reason = CheckpointDue(last_saved_at=None, interval_seconds=900.0)
    return RequestJobCheckpoint(
        action_id=ActionId("a1"), retry_at=now + timedelta(minutes=10), job_id=JobId("train"), node_names=(NODE,),
        since=now - HOUR, requested_at=now, reason=reason,
    )  # fmt: skip


def before_preemption(now: datetime) -> RequestPreemptionCheckpoint:
    """The job ends for another one; its deadline is not the time of the next attempt."""
    reason = PriorityPreempted(for_job=JobId("urgent"), for_priority=900, priority=1, barred_by="gpus_limit")
    return RequestPreemptionCheckpoint(
        action_id=ActionId("a1"), retry_at=now + timedelta(seconds=15), job_id=JobId("train"), node_names=(NODE,),
        attempt=1, requested_at=now, deadline_at=now + timedelta(seconds=60), reason=reason,
    )  # fmt: skip


@pytest.mark.parametrize("decide", [periodic, before_preemption])
async def test_pods_of_a_job_are_asked_once(decide: Callable[[datetime], JobRequest]) -> None:
    """Those that save on request and run, on every node; by annotation and hook, with the deadline of the decision."""
    hooks = CheckpointHooks()
    async with listening() as (port, requests), running_cluster(clock_factor=1.0) as here:
        for name, of_job in (("train-0", "train"), ("other", "other"), ("quiet", "train")):
            add_pod_with_hook(here, name, port)
            own = {} if name == "quiet" else {CHECKPOINTED_AT: ""}

            def belongs(item: Json, of_job: str = of_job, own: dict[str, str] = own) -> None:
                item["metadata"].setdefault("labels", {})[JOB_ID] = of_job
                item["metadata"]["annotations"].update(own)

            here.world.api.modify(SERVED_PODS, f"default/{name}", belongs)
        now = here.clock.now()
        decision = decide(now)
        steps = steps_of(here.kube, here.provider, here.clock.now, hooks)
        facts = [fact for _ in range(2) for fact in await steps.take(decision, PlanId("p1"))]
        await hooks.flush()
        asked = {name: here.item("pods", name)["metadata"]["annotations"] for name in ("train-0", "other", "quiet")}
    await hooks.close()

    (requested,) = facts
    assert isinstance(requested, ScalingCheckpointRequested)
    assert (requested.pods, requested.job_ids, requested.node_name) == (("default/train-0",), ("train",), "")
    assert requests == [("/save", {"pod": "default/train-0", "deadline_at": decision.deadline_at.isoformat()})]
    assert asked["train-0"][CHECKPOINT_REQUESTED] == decision.deadline_at.isoformat()
    assert asked["train-0"][CHECKPOINT_REQUESTED_AT] == now.isoformat()
    assert [CHECKPOINT_REQUESTED in asked[name] for name in ("other", "quiet")] == [False, False]


async def test_refused_notice_is_logged_with_its_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises nothing: the other acts of the plan go on, and a later plan decides it again."""

    async def forbidden(*_: object) -> bool:
        raise PermanentError("pods is forbidden")

    with structlog.testing.capture_logs() as lines:
        async with running_cluster(clock_factor=1.0) as here:
            here.add_node(NODE, labels={ACTION_ID: "buy-1", KARPENTER_REGISTERED: "true"})
            add_pod_with_hook(here, "train", 1)
            delete_as_karpenter(here)
            monkeypatch.setattr(here.kube, "annotate_pod", forbidden)
            notices = PlannedUpkeep(here.kube, here.provider)
            at = here.clock.now()
            assert await notices.take(await observed_state(here), NO_FINALIZERS, at) == []
    (line,) = [line for line in lines if line["event"] == "upkeep failed, retried"]
    assert (line["decision"], line["attempts_count"]) == ("request_checkpoints", 1)
    assert (line["error"], line["retry_at"]) == ("pods is forbidden", (at + timedelta(seconds=5)).isoformat())


class _NoRegularTick(Scaler):
    """Ticks when it starts, and then only for urgent facts."""

    tick_seconds: ClassVar[float | None] = HOUR.total_seconds()


async def test_node_deletion_triggers_checkpoint_notice(tmp_path: Path) -> None:
    """Published by the pod watcher, handled by a scaler without regular ticks."""
    place, view, store = Place(), StateView(), await SqliteStore.open(tmp_path / "store.db")
    async with running_cluster(clock_factor=1.0) as here:
        here.add_node(NODE, labels={ACTION_ID: "buy-1", KARPENTER_REGISTERED: "true"})
        add_pod_with_hook(here, "train", 9)
        installation, metrics = here.cluster.installation, Metrics("scaler", CollectorRegistry())
        scaler = _NoRegularTick(
            view,
            policy(),
            Executor(
                Purchases(view, here.provider, installation, here.clock.now),
                Drains(view, here.kube, here.clock),
                store,
                steps_of(here.kube, here.provider, here.clock.now),
            ),
            DecisionRecovery(store, policy()),
            InstanceWatch(here.provider, installation, here.clock),
            digests=Digests(policy="p", core="c"),
            metrics=metrics,
        )
        watcher = PodWatcher(here.kube, here.cluster)
        async with running(place, watcher), running(place, scaler, view=view) as runner:
            await until(lambda: runner.readiness.is_ready and bool(view.state.nodes) and bool(view.state.pods))
            delete_as_karpenter(here)
            await until(lambda: CHECKPOINT_REQUESTED in here.item("pods", "train")["metadata"]["annotations"])
    await store.close()

"""Pods on a node that Karpenter ends are told to save, by annotation and hook; the node is left to Karpenter."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import ClassVar

import pytest
import structlog
from prometheus_client import CollectorRegistry
from tests.support.cluster import RunningCluster, running_cluster
from tests.support.kube_objects import Json, pod
from tests.support.runners import Place, running, until
from tests.support.stories import HOUR, Told, given, policy
from tests.unit.kube.test_checkpoint_hooks import HOOK, listening

from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.kube.checkpoint_hooks import Hooks
from gpu_autoscaler.kube.protocol import NODES
from gpu_autoscaler.kube.translate.node import node_observed
from gpu_autoscaler.kube.translate.pod import pod_observed
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.labels import ACTION_ID, CHECKPOINT_REQUESTED, KARPENTER_REGISTERED
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.simcluster.kinds import NODES as SERVED_NODES
from gpu_autoscaler.simcluster.kinds import PODS as SERVED_PODS
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.pod_watcher.service import PodWatcher
from gpu_autoscaler_services.scaler.checkpoint_notices import CheckpointNotices
from gpu_autoscaler_services.scaler.drains import Drains
from gpu_autoscaler_services.scaler.executor import Executor
from gpu_autoscaler_services.scaler.finalizers import Finalizers
from gpu_autoscaler_services.scaler.inventory import InstanceWatch
from gpu_autoscaler_services.scaler.orphaned_nodes import OrphanedNodes
from gpu_autoscaler_services.scaler.purchases import Purchases
from gpu_autoscaler_services.scaler.recovery import DecisionRecovery
from gpu_autoscaler_services.scaler.service import Digests, Scaler

NODE = "gpu-a"


async def seen(here: RunningCluster) -> ClusterState:
    """What the pod watcher would have said by now."""
    now = here.clock.now()
    pods = [pod_observed(one, epoch=1) for one in await here.kube.pods_on(NODE)]
    facts = (node_observed(await here.kube.get(NODES, "", NODE), epoch=1), *pods)
    return given(tuple(Told(fact, now) for fact in facts), as_of=now)


def karpenter_ends_it(here: RunningCluster) -> datetime:
    """It deletes the node, which its finalizer holds until the instance is gone; since when."""
    here.world.api.modify(
        SERVED_NODES, NODE, lambda item: item["metadata"].update(finalizers=["karpenter.sh/termination"])
    )
    here.world.api.delete(SERVED_NODES, NODE)
    return datetime.fromisoformat(here.item("nodes", NODE)["metadata"]["deletionTimestamp"])


def works_here(here: RunningCluster, name: str, port: int) -> None:
    """A pod with a hook that runs on the node, where this test listens."""
    item = pod(name, nodeName=NODE, terminationGracePeriodSeconds=30)
    item["metadata"]["annotations"] = {HOOK: f":{port}/save"}
    here.add("pods", item)

    def runs(thing: Json) -> None:
        thing["status"] |= {"phase": "Running", "podIP": "127.0.0.1"}

    here.world.api.modify(SERVED_PODS, f"default/{name}", runs)


async def test_pods_are_told_once_and_the_node_is_left_alone() -> None:
    """By when their own grace is over; a second look at the same state, or at a newer one, tells nobody again."""
    hooks = Hooks()
    async with listening() as (port, heard), running_cluster(clock_factor=1.0) as here:
        here.add_node(NODE, labels={ACTION_ID: "buy-1", KARPENTER_REGISTERED: "true"})
        works_here(here, "train", port)
        farewells = CheckpointNotices(here.kube, hooks)
        await farewells.tell(await seen(here))
        assert heard == [], "nobody ends it yet"

        ends_at = (karpenter_ends_it(here) + timedelta(seconds=30)).isoformat()
        before = await seen(here)
        for state in (before, before, await seen(here)):
            await farewells.tell(state)
        told, node = here.item("pods", "train")["metadata"], here.item("nodes", NODE)
    await hooks.close()

    assert heard == [("/save", {"pod": "default/train", "deadline_at": ends_at})]
    assert told["annotations"][CHECKPOINT_REQUESTED] == ends_at
    assert "deletionTimestamp" not in told, "nobody is evicted by us"
    assert not node["spec"].get("unschedulable")
    assert node["metadata"]["finalizers"] == ["karpenter.sh/termination"]


async def test_what_cannot_be_told_is_said_once_a_departure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at each look; and a node of the same name that goes later is another matter."""

    async def forbidden(*_: object) -> bool:
        raise PermanentError("pods is forbidden")

    with structlog.testing.capture_logs() as lines:
        async with running_cluster(clock_factor=1.0) as here:
            here.add_node(NODE, labels={ACTION_ID: "buy-1", KARPENTER_REGISTERED: "true"})
            works_here(here, "train", 1)
            farewells = CheckpointNotices(here.kube)
            stays = await seen(here)
            karpenter_ends_it(here)
            goes = await seen(here)
            monkeypatch.setattr(here.kube, "annotate_pod", forbidden)
            said = []
            for state in (goes, goes, stays, goes):
                await farewells.tell(state)
                said.append(sum(line["event"] == "pods not told that their node goes" for line in lines))
    assert said == [1, 1, 1, 2]


class _NoRegularTick(Scaler):
    """It ticks once when it starts, and then only for what is urgent."""

    tick_seconds: ClassVar[float | None] = HOUR.total_seconds()


async def test_pods_are_told_as_soon_as_the_node_is_seen_to_go(tmp_path: Path) -> None:
    """Seen by the pod watcher, told by the scaler, which has no regular tick to wait for."""
    place, view, store = Place(), StateView(), await SqliteStore.open(tmp_path / "store.db")
    async with running_cluster(clock_factor=1.0) as here:
        here.add_node(NODE, labels={ACTION_ID: "buy-1", KARPENTER_REGISTERED: "true"})
        works_here(here, "train", 9)
        installation, metrics = here.cluster.installation, Metrics("scaler", CollectorRegistry())
        scaler = _NoRegularTick(
            view,
            policy(),
            Executor(
                Purchases(view, here.provider, installation, here.clock.now),
                Drains(view, here.kube, here.clock),
                store,
                Finalizers(here.kube),
                CheckpointNotices(here.kube),
                OrphanedNodes(here.kube, here.provider),
            ),
            DecisionRecovery(store, policy()),
            InstanceWatch(here.provider, installation, here.clock),
            digests=Digests(policy="p", core="c"),
            figures=metrics,
        )
        watcher = PodWatcher(here.kube, here.cluster)
        async with running(place, watcher), running(place, scaler, view=view) as runner:
            await until(lambda: runner.readiness.is_ready and bool(view.state.nodes) and bool(view.state.pods))
            karpenter_ends_it(here)
            await until(lambda: CHECKPOINT_REQUESTED in here.item("pods", "train")["metadata"]["annotations"])
    await store.close()

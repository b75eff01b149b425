"""The executor checks again that an instance to release runs no work."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.services.scaler.test_executor import Bench, kinds, owned, ready, release
from tests.support.cluster import RunningCluster, running_cluster, until
from tests.support.kube_objects import Json
from tests.support.stories import purchase

from gpu_autoscaler.events.scaling import ScalingDrainCancelled, ScalingNodeLaunched, ScalingNodeTerminated
from gpu_autoscaler.kube.protocol import NODES
from gpu_autoscaler.kube.translate.node import node_observed
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.reasons.drain import GangAbandoned
from gpu_autoscaler.simcluster import kinds as served
from gpu_autoscaler.simcluster.objects import set_condition
from gpu_autoscaler.store.sqlite import SqliteStore

NODE = "gpu-b"
MAX_DELIVERIES_CONSUMER = msgspec.structs.replace(
    release("b"), reason=GangAbandoned(gang="job/train", defer_reason="nodes_limit")
)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """A bench whose order `b` is launched, and whose node came up since, which the record does not know."""
    async with running_cluster() as here:
        store = await SqliteStore.open(tmp_path / "store.db")
        bench = Bench(here, store)
        (ordered,) = await bench.begin(purchase("b", at=here.clock.now()))
        (launched,) = (await bench.step(ordered)).facts
        assert isinstance(launched, ScalingNodeLaunched)
        bench.record_fact(launched)
        here.add_node(NODE, labels={labels.ACTION_ID: "b"})
        yield bench
        await store.close()


async def state_of_instance(bench: Bench) -> str:
    """Return the cloud's state of the only instance."""
    (instance,) = await bench.cloud.instances("uid")
    return instance.state


def is_cordoned(here: RunningCluster) -> bool:
    """Return True if the node is unschedulable."""
    return bool(here.item("nodes", NODE)["spec"].get("unschedulable"))


@pytest.mark.parametrize("is_known", [False, True])
async def test_release_of_node_with_new_pods_is_cancelled(bench: Bench, *, is_known: bool) -> None:
    """The watch was late: the node is recorded as booting, or not at all. The cancellation is final."""
    if is_known:
        seen = await bench.here.kube.get(NODES, "", NODE)
        bench.record_fact(msgspec.structs.replace(node_observed(seen, epoch=1), is_ready=False, ready_since=None))
    await ready(bench.here, owned("work"))
    (cancelled,) = await bench.begin(MAX_DELIVERIES_CONSUMER)

    assert isinstance(cancelled, ScalingDrainCancelled)
    assert (cancelled.drain_action_id, cancelled.node_name) == (MAX_DELIVERIES_CONSUMER.action_id, NODE)
    assert cancelled.abandoned_because == "node is in use: pod default/work was scheduled to it"
    assert (await state_of_instance(bench), is_cordoned(bench.here)) == ("running", False)
    bench.record_fact(cancelled)
    (work,) = await bench.here.kube.pods_on(NODE)
    await bench.here.kube.delete_pod(work, grace_seconds=1)
    await until(lambda: not bench.here.item("pods", "work"))
    assert await bench.begin(MAX_DELIVERIES_CONSUMER) == ()
    assert await state_of_instance(bench) == "running"


async def test_pod_bound_before_cordon_cancels_release(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is bound after the first check and before the cordon: the node is uncordoned and stays."""
    kube, cordon = bench.here.kube, bench.here.kube.patch_node

    async def slow(name: str, patch: Mapping[str, Any]) -> core.Node:
        if not bench.here.item("pods", "work"):
            await ready(bench.here, owned("work"))
        return await cordon(name, patch)

    monkeypatch.setattr(kube, "patch_node", slow)
    assert kinds(await bench.begin(MAX_DELIVERIES_CONSUMER)) == [ScalingDrainCancelled]
    assert (await state_of_instance(bench), is_cordoned(bench.here)) == ("running", False)


async def test_release_of_node_without_work_terminates_it(bench: Bench) -> None:
    """DaemonSet pods are no work."""
    item = owned("agent")
    item["metadata"]["ownerReferences"][0]["kind"] = "DaemonSet"
    await ready(bench.here, item)
    assert kinds(await bench.begin(MAX_DELIVERIES_CONSUMER)) == [ScalingNodeTerminated]
    assert (await state_of_instance(bench), is_cordoned(bench.here)) == ("terminated", True)


async def test_cancelled_release_keeps_foreign_cordon(bench: Bench) -> None:
    """The node has work, and somebody else cordoned it."""
    await ready(bench.here, owned("work"))
    await bench.here.kube.patch_node(NODE, {"spec": {"unschedulable": True}})
    assert kinds(await bench.begin(MAX_DELIVERIES_CONSUMER)) == [ScalingDrainCancelled]
    assert (await state_of_instance(bench), is_cordoned(bench.here)) == ("running", True)


@pytest.mark.parametrize("is_up", [False, True])
async def test_release_of_late_node_depends_on_readiness(bench: Bench, *, is_up: bool) -> None:
    """Pods on a node that is not ready do not keep it: its boot timeout is over."""
    await ready(bench.here, owned("work"))

    def silent(item: Json) -> None:
        set_condition(item, bench.here.clock.now(), "Ready", status="Unknown", reason="NodeStatusUnknown", message="")

    if not is_up:
        bench.here.world.api.modify(served.NODES, NODE, silent)
    facts = await bench.begin(release("b"))
    assert kinds(facts) == [ScalingDrainCancelled if is_up else ScalingNodeTerminated]
    assert await state_of_instance(bench) == ("running" if is_up else "terminated")

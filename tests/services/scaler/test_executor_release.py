"""What the executor looks at once more before it ends an instance that was no use yet when that was decided."""

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
        bench.told(launched)
        here.add_node(NODE, labels={labels.ACTION_ID: "b"})
        yield bench
        await store.close()


async def state_of_instance(bench: Bench) -> str:
    """What the cloud says of the only instance."""
    (instance,) = await bench.cloud.instances("uid")
    return instance.state


def is_cordoned(here: RunningCluster) -> bool:
    """Whether the node takes no new pods."""
    return bool(here.item("nodes", NODE)["spec"].get("unschedulable"))


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_node_that_came_up_and_took_work_is_not_ended(bench: Bench, *, is_known: bool) -> None:
    """The watch was late: the node is known as booting, or not at all. Told so once, the decision is over."""
    if is_known:
        seen = await bench.here.kube.get(NODES, "", NODE)
        bench.told(msgspec.structs.replace(node_observed(seen, epoch=1), is_ready=False, ready_since=None))
    await ready(bench.here, owned("work"))
    (spared,) = await bench.begin(MAX_DELIVERIES_CONSUMER)

    assert isinstance(spared, ScalingDrainCancelled)
    assert (spared.drain_action_id, spared.node_name) == (MAX_DELIVERIES_CONSUMER.action_id, NODE)
    assert spared.abandoned_because == "pod default/work has come: it is in use"
    assert (await state_of_instance(bench), is_cordoned(bench.here)) == ("running", False)
    bench.told(spared)
    (work,) = await bench.here.kube.pods_on(NODE)
    await bench.here.kube.delete_pod(work, grace_seconds=1)
    await until(lambda: not bench.here.item("pods", "work"))
    assert await bench.begin(MAX_DELIVERIES_CONSUMER) == ()
    assert await state_of_instance(bench) == "running"


async def test_work_that_comes_at_that_moment_is_seen_by_the_second_look(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is bound after the first look and before the cordon: the node takes pods again, and stays."""
    kube, cordon = bench.here.kube, bench.here.kube.patch_node

    async def slow(name: str, patch: Mapping[str, Any]) -> core.Node:
        if not bench.here.item("pods", "work"):
            await ready(bench.here, owned("work"))
        return await cordon(name, patch)

    monkeypatch.setattr(kube, "patch_node", slow)
    assert kinds(await bench.begin(MAX_DELIVERIES_CONSUMER)) == [ScalingDrainCancelled]
    assert (await state_of_instance(bench), is_cordoned(bench.here)) == ("running", False)


async def test_a_node_without_work_is_cordoned_and_its_instance_ends(bench: Bench) -> None:
    """What stays with every node is no work."""
    item = owned("agent")
    item["metadata"]["ownerReferences"][0]["kind"] = "DaemonSet"
    await ready(bench.here, item)
    assert kinds(await bench.begin(MAX_DELIVERIES_CONSUMER)) == [ScalingNodeTerminated]
    assert (await state_of_instance(bench), is_cordoned(bench.here)) == ("terminated", True)


async def test_what_others_cordoned_stays_so(bench: Bench) -> None:
    """Work is there, and a hand wants no more of it to come."""
    await ready(bench.here, owned("work"))
    await bench.here.kube.patch_node(NODE, {"spec": {"unschedulable": True}})
    assert kinds(await bench.begin(MAX_DELIVERIES_CONSUMER)) == [ScalingDrainCancelled]
    assert (await state_of_instance(bench), is_cordoned(bench.here)) == ("running", True)


@pytest.mark.parametrize("is_up", [False, True])
async def test_a_late_node_is_spared_where_it_runs_something(bench: Bench, *, is_up: bool) -> None:
    """One that fell silent would keep what is bound to it for ever: its time to boot is over."""
    await ready(bench.here, owned("work"))

    def silent(item: Json) -> None:
        set_condition(item, bench.here.clock.now(), "Ready", status="Unknown", reason="NodeStatusUnknown", message="")

    if not is_up:
        bench.here.world.api.modify(served.NODES, NODE, silent)
    said = await bench.begin(release("b"))
    assert kinds(said) == [ScalingDrainCancelled if is_up else ScalingNodeTerminated]
    assert await state_of_instance(bench) == ("running" if is_up else "terminated")

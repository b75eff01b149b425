"""GPUs as nodes show them: late, cut, shared, or contradicting themselves. JSON -> pod watcher -> fold -> plan."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.services.pod_watcher.test_service import changed, listed, thing
from tests.support.kube_objects import READY, Json
from tests.support.kube_objects import node as node_json
from tests.support.kube_objects import pod as pod_json
from tests.support.purchases import bought, purchase
from tests.support.stories import EPOCH, MINUTE, T0, Story, Told, given, job, offer, on_sale, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.nodes.views import NodePhase, node_views
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.kube.protocol import NODES, PODS, Cluster
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, ReleaseInstance
from gpu_autoscaler.model.reasons.drain import BootTimedOut
from gpu_autoscaler.model.scheduling import Taint
from gpu_autoscaler_services.pod_watcher.service import PodWatcher

NAME, ACTION = "n1", "buy-n1"
PRODUCT = "NVIDIA-A100-SXM4-40GB"
STARTUP = Taint(key="startup-taint.gpu-autoscaler.io/driver", effect="NoSchedule")


@pytest.fixture
def watcher() -> PodWatcher:
    """A watcher that is handed its items; it never calls its client."""
    kube = KubeClient(Connection(base_url="http://127.0.0.1:9"), now=lambda: T0)
    return PodWatcher(kube, Cluster(installation="uid", epoch=EPOCH))


def gpu_node(amounts: Json, *, labels: Json | None = None, **spec: Any) -> Json:  # noqa: ANN401 - JSON
    """A ready node that shows these amounts of GPUs."""
    item = node_json(NAME, gpus=0, labels=labels)
    status = {"conditions": READY["status"]["conditions"]}
    for amount in ("capacity", "allocatable"):
        status[amount] = item["status"][amount] | amounts
    return {**item, "status": status, "spec": spec}


def ours(amounts: Json, **spec: Any) -> Json:  # noqa: ANN401 - JSON
    """The same, bought by us."""
    labels = {
        "gpu-autoscaler.io/action-id": ACTION,
        "gpu-autoscaler.io/pool": "default",
        "nvidia.com/gpu.product": PRODUCT,
        "node.kubernetes.io/instance-type": offer().instance_type,
    }
    return gpu_node(amounts, labels=labels, **spec)


async def seen(watcher: PodWatcher, *items: Json, version: int = 5, at: datetime = T0) -> Story:
    """What the watcher says of these nodes and pods."""
    told: list[Told] = []
    for item in items:
        kind = NODES if item["kind"] == "Node" else PODS
        namespace = {"namespace": ""} if kind is NODES else {}
        facts = await watcher.on_item(changed(kind, thing(kind, item, version, **namespace), at))
        told.extend(Told(fact, at) for fact in facts)
    return tuple(told)


def waiting(gpus: int, resource: str = "nvidia.com/gpu", **spec: Any) -> Json:  # noqa: ANN401 - JSON
    """A pod that Kubernetes cannot place."""
    item = pod_json("waits", **spec)
    item["spec"]["containers"][0]["resources"]["limits"] |= {resource: str(gpus)}
    at = "2026-11-21T11:00:00Z"
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "lastTransitionTime": at}
    return {**item, "status": {"phase": "Pending", "conditions": [condition]}}


def decided(state: ClusterState, at: datetime = T0, **changes: Any) -> tuple[AnyDecision, ...]:  # noqa: ANN401
    """What is decided, and nothing is wrong with it."""
    made = plan(state, policy(**changes), at)
    assert check(made, state, policy(**changes)) == ()
    return made.decisions


@pytest.mark.parametrize("amounts", [{}, {"nvidia.com/gpu": "0"}, {"nvidia.com/gpu": "7"}])
async def test_gpus_that_come_late_are_waited_for_and_not_bought_again(watcher: PodWatcher, amounts: Json) -> None:
    """A ready node of ours whose device plugin still starts is on its way, with all that was promised."""
    order = bought(purchase(ACTION))
    early = await seen(watcher, ours(amounts), waiting(8))
    state = given(order, early, on_sale())
    assert [view.phase for view in node_views(state, T0)] == [NodePhase.REGISTERED]
    assert decided(state) == ()
    late = await seen(watcher, ours({"nvidia.com/gpu": "8"}), version=6)
    assert [view.phase for view in node_views(given(order, early, late), T0)] == [NodePhase.READY]


@pytest.mark.parametrize(
    ("amounts", "taints", "said"),
    [
        ({}, [], "with 0 of 8 nvidia.com/gpu: driver or device plugin missing"),
        ({"nvidia.com/gpu": "6"}, [], "with 6 of 8 nvidia.com/gpu: driver or device plugin missing"),
        ({"nvidia.com/gpu": "8"}, [{"key": STARTUP.key, "effect": "NoSchedule"}], f"taint {STARTUP.key} was never"),
    ],
)
async def test_what_never_came_is_named_when_the_time_is_over(
    watcher: PodWatcher, amounts: Json, taints: list[Json], said: str
) -> None:
    """The reason of the release says which step it was, and where to look."""
    state = given(
        bought(purchase(ACTION, boot_seconds_max=900.0)),
        await seen(watcher, ours(amounts, taints=taints)),
        as_of=T0 + 16 * MINUTE,
    )
    (given_back,) = decided(state, T0 + 16 * MINUTE)
    assert isinstance(given_back, ReleaseInstance)
    assert said in given_back.reason.sentence()


async def test_a_node_that_never_registers_is_named_as_such() -> None:
    """Its console and its user data are where to look."""
    state = given(bought(purchase(ACTION)), as_of=T0 + 16 * MINUTE)
    (given_back,) = decided(state, T0 + 16 * MINUTE)
    assert isinstance(given_back.reason, BootTimedOut)
    assert given_back.reason.missing_step == "node"


async def test_taints_of_a_pool_that_vanish_are_ordered_and_waited_for(watcher: PodWatcher) -> None:
    """Pods need not tolerate them: they are planned onto the node as it will be."""
    pool = {"name": "default", "startup_taints": [{"key": STARTUP.key, "effect": "NoSchedule"}]}
    (buy,) = decided(given(await seen(watcher, waiting(8)), on_sale()), pools=[pool])
    assert isinstance(buy, BuyNode)
    assert (buy.taints, buy.startup_taints) == ((), (STARTUP,))
    comes = await seen(watcher, ours({"nvidia.com/gpu": "8"}, taints=[{"key": STARTUP.key, "effect": "NoSchedule"}]))
    state = given(bought(purchase(ACTION)), comes, await seen(watcher, waiting(8)), on_sale())
    assert decided(state, pools=[pool]) == ()


# ---- cut and shared by somebody else's device plugin


async def test_slices_by_their_names_take_the_pods_that_ask_for_them(watcher: PodWatcher) -> None:
    """Strategy `mixed`: each profile is a resource of its own, and a whole GPU is none of them."""
    node = gpu_node(
        {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.5gb": "7"},
        labels={"nvidia.com/gpu.product": PRODUCT, "nvidia.com/mig.strategy": "mixed"},
    )
    there = await seen(watcher, node)
    assert decided(given(there, await seen(watcher, waiting(1, "nvidia.com/mig-1g.5gb")), on_sale())) == ()
    (buy,) = decided(given(there, await seen(watcher, waiting(1), version=9), on_sale()))
    assert isinstance(buy, BuyNode)


@pytest.mark.parametrize(
    "labels",
    [
        {"nvidia.com/gpu.product": f"{PRODUCT}-MIG-1g.5gb", "nvidia.com/mig.strategy": "single"},
        {"nvidia.com/gpu.product": f"{PRODUCT}-SHARED", "nvidia.com/gpu.replicas": "7"},
    ],
)
async def test_what_only_counts_as_gpus_is_no_gpu_of_the_model(watcher: PodWatcher, labels: Json) -> None:
    """Strategy `single`, or replicas under the name of the whole: room for who asks for any, not for an A100."""
    there = await seen(watcher, gpu_node({"nvidia.com/gpu": "7"}, labels=labels))
    any_gpu = await seen(watcher, waiting(1))
    assert decided(given(there, any_gpu, on_sale())) == ()
    whole = given(there, job("train", gpus=1, model="A100"), on_sale())
    assert schedule(whole, policy(), T0).placements == ()
    (buy,) = decided(whole)
    assert isinstance(buy, BuyNode)


async def test_renamed_replicas_are_room_for_those_who_share(watcher: PodWatcher) -> None:
    """`nvidia.com/gpu.shared`, as the plugin writes with `renameByDefault`; whoever wants a whole GPU is bought one."""
    labels = {"nvidia.com/gpu.product": "Tesla-T4", "nvidia.com/gpu.replicas": "4"}
    there = await seen(watcher, gpu_node({"nvidia.com/gpu": "0", "nvidia.com/gpu.shared": "4"}, labels=labels))
    assert decided(given(there, await seen(watcher, waiting(4, "nvidia.com/gpu.shared")), on_sale())) == ()
    (buy,) = decided(given(there, await seen(watcher, waiting(1), version=9), on_sale()))
    assert isinstance(buy, BuyNode)


# ---- nodes that contradict themselves, and pods that nobody may be asked for


async def test_a_node_without_a_single_label_is_room_and_nothing_else(watcher: PodWatcher) -> None:
    """No instance type, zone or model: it takes who asks for any GPU, and is not ours to remove."""
    bare = gpu_node({"nvidia.com/gpu": "8"})
    bare["metadata"]["labels"] = {}
    state = given(await seen(watcher, bare), await seen(watcher, waiting(8)), on_sale())
    assert decided(state) == ()
    (view,) = node_views(state, T0)
    assert (view.phase, view.is_ours, view.instance_type, view.zone) == (NodePhase.READY, False, None, None)
    assert decided(given(await seen(watcher, bare), as_of=T0 + timedelta(hours=9)), T0 + timedelta(hours=9)) == ()


@pytest.mark.parametrize("amount", ["-1", "eight", "", "1e99999", "0x8"])
async def test_a_node_with_an_amount_that_is_none_is_not_seen(watcher: PodWatcher, amount: str) -> None:
    """It ends nothing: the others in the list are told, and the node once it makes sense."""
    odd, other = gpu_node({"nvidia.com/gpu": amount}), node_json("other")
    things = [thing(NODES, each, 5, namespace="") for each in (odd, other)]
    names = [getattr(fact, "name", None) for fact in await watcher.on_item(listed(NODES, *things))]
    assert names == ["other", None]
    (again,) = await seen(watcher, gpu_node({"nvidia.com/gpu": "8"}), version=6)
    assert again.fact.entity() == "node/n1"


async def test_a_part_of_a_gpu_is_no_gpu_on_a_node(watcher: PodWatcher) -> None:
    """`7500m` are seven whole ones; `1e3` are a thousand, as Kubernetes reads it."""
    for amount, count in (("7500m", 7), ("1e3", 1000), ("0.5", 0)):
        told, *_ = await seen(watcher, gpu_node({"nvidia.com/gpu": amount}), version=count + 10)
        assert isinstance(told.fact, NodeObserved)
        assert told.fact.allocatable.gpu_count == count


async def test_ready_and_unreachable_at_once_is_no_room(watcher: PodWatcher) -> None:
    """A condition that says ready beside the taint that says not: nothing is planned onto it."""
    taints = [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]
    there = await seen(watcher, gpu_node({"nvidia.com/gpu": "8"}, taints=taints))
    (buy,) = decided(given(there, await seen(watcher, waiting(8)), on_sale()))
    assert isinstance(buy, BuyNode)


async def test_two_nodes_of_one_order_are_counted_each(watcher: PodWatcher) -> None:
    """A label that was copied by hand makes no node vanish: both are room."""
    twin = ours({"nvidia.com/gpu": "8"})
    twin["metadata"] = {**twin["metadata"], "name": "n2"}
    state = given(bought(purchase(ACTION)), await seen(watcher, ours({"nvidia.com/gpu": "8"}), twin))
    assert [view.name for view in node_views(state, T0)] == ["n1", "n2"]


async def test_a_pod_of_another_scheduler_is_bought_for_once_that_one_cannot_place_it(watcher: PodWatcher) -> None:
    """Nobody's word is no demand: a scheduler that is not there says nothing, and nothing is bought on a guess."""
    silent = {**waiting(8, schedulerName="absent"), "status": {"phase": "Pending"}}
    assert decided(given(await seen(watcher, silent), on_sale())) == ()
    said = waiting(8, schedulerName="volcano")
    (buy,) = decided(given(await seen(watcher, said, version=9), on_sale()))
    assert isinstance(buy, BuyNode)

"""GPUs as nodes show them: late, sliced, shared, or contradictory. JSON -> pod watcher -> fold -> plan."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.support.accepted import accepted_plan
from tests.support.kube_objects import READY, Json
from tests.support.kube_objects import node as node_json
from tests.support.kube_objects import pod as pod_json
from tests.support.purchases import bought, purchase
from tests.support.stories import EPOCH, MINUTE, T0, Story, TimedFact, given, job, offer, on_sale, policy
from tests.support.watch_items import changed, decoded, listed

from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import node_views
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
    """A watcher that gets its items from the test; it never calls its client."""
    kube = KubeClient(Connection(base_url="http://127.0.0.1:9"), now=lambda: T0)
    return PodWatcher(kube, Cluster(installation="uid", epoch=EPOCH))


def gpu_node(amounts: Json, *, labels: Json | None = None, **spec: Any) -> Json:  # noqa: ANN401 - JSON
    """Return a ready node with these amounts of GPUs."""
    item = node_json(NAME, gpus=0, labels=labels)
    status = {"conditions": READY["status"]["conditions"]}
    for amount in ("capacity", "allocatable"):
        status[amount] = item["status"][amount] | amounts
    return {**item, "status": status, "spec": spec}


def ours(amounts: Json, **spec: Any) -> Json:  # noqa: ANN401 - JSON
    """Return the same node, bought by us."""
    labels = {
        "gpu-autoscaler.io/action-id": ACTION,
        "gpu-autoscaler.io/pool": "default",
        "nvidia.com/gpu.product": PRODUCT,
        "node.kubernetes.io/instance-type": offer().instance_type,
    }
    return gpu_node(amounts, labels=labels, **spec)


async def observed(watcher: PodWatcher, *items: Json, version: int = 5, at: datetime = T0) -> Story:
    """Return the story that the watcher publishes of these nodes and pods."""
    story: list[TimedFact] = []
    for item in items:
        kind = NODES if item["kind"] == "Node" else PODS
        namespace = {"namespace": ""} if kind is NODES else {}
        facts = await watcher.on_item(changed(kind, decoded(kind, item, version, **namespace), at))
        story.extend(TimedFact(fact, at) for fact in facts)
    return tuple(story)


def waiting(gpus: int, resource: str = "nvidia.com/gpu", **spec: Any) -> Json:  # noqa: ANN401 - JSON
    """Return a pod that Kubernetes cannot place."""
    item = pod_json("waits", **spec)
    item["spec"]["containers"][0]["resources"]["limits"] |= {resource: str(gpus)}
    at = "2026-11-21T11:00:00Z"
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "lastTransitionTime": at}
    return {**item, "status": {"phase": "Pending", "conditions": [condition]}}


def decided(state: ClusterState, at: datetime = T0, **changes: Any) -> tuple[AnyDecision, ...]:  # noqa: ANN401
    """Return the decisions of a plan that passes the plan check."""
    made = accepted_plan(state, policy(**changes), at)
    return made.decisions


@pytest.mark.parametrize("amounts", [{}, {"nvidia.com/gpu": "0"}, {"nvidia.com/gpu": "7"}])
async def test_late_gpus_are_awaited_and_not_bought_again(watcher: PodWatcher, amounts: Json) -> None:
    """A ready node whose device plugin still starts counts with its ordered GPUs."""
    order = bought(purchase(ACTION))
    early = await observed(watcher, ours(amounts), waiting(8))
    state = given(order, early, on_sale())
    assert [view.phase for view in node_views(state, T0)] == [NodePhase.REGISTERED]
    assert decided(state) == ()
    late = await observed(watcher, ours({"nvidia.com/gpu": "8"}), version=6)
    assert [view.phase for view in node_views(given(order, early, late), T0)] == [NodePhase.READY]


@pytest.mark.parametrize(
    ("amounts", "taints", "text"),
    [
        ({}, [], "is ready with 0 of 8 nvidia.com/gpu."),
        ({"nvidia.com/gpu": "6"}, [], "is ready with 6 of 8 nvidia.com/gpu."),
        (
            {"nvidia.com/gpu": "8"},
            [{"key": STARTUP.key, "effect": "NoSchedule"}],
            f"startup taint {STARTUP.key} was not removed",
        ),
    ],
)
async def test_boot_timeout_names_the_missing_step(
    watcher: PodWatcher, amounts: Json, taints: list[Json], text: str
) -> None:
    """The reason of the release says what is missing."""
    state = given(
        bought(purchase(ACTION, boot_seconds_max=900.0)),
        await observed(watcher, ours(amounts, taints=taints)),
        as_of=T0 + 16 * MINUTE,
    )
    (release,) = decided(state, T0 + 16 * MINUTE)
    assert isinstance(release, ReleaseInstance)
    assert text in release.reason.sentence()


async def test_boot_timeout_names_unregistered_node() -> None:
    """Its console output and user data are where to look."""
    state = given(bought(purchase(ACTION)), as_of=T0 + 16 * MINUTE)
    (release,) = decided(state, T0 + 16 * MINUTE)
    assert isinstance(release.reason, BootTimedOut)
    assert release.reason.missing_step == "node"


async def test_startup_taints_are_ordered_and_awaited(watcher: PodWatcher) -> None:
    """Pods need not tolerate them: they are planned onto the node without these taints."""
    pool = {"name": "default", "startup_taints": [{"key": STARTUP.key, "effect": "NoSchedule"}]}
    (buy,) = decided(given(await observed(watcher, waiting(8)), on_sale()), pools=[pool])
    assert isinstance(buy, BuyNode)
    assert (buy.taints, buy.startup_taints) == ((), (STARTUP,))
    comes = await observed(
        watcher, ours({"nvidia.com/gpu": "8"}, taints=[{"key": STARTUP.key, "effect": "NoSchedule"}])
    )
    state = given(bought(purchase(ACTION)), comes, await observed(watcher, waiting(8)), on_sale())
    assert decided(state, pools=[pool]) == ()


# ---- cut and shared by somebody else's device plugin


async def test_named_slices_take_pods_that_request_them(watcher: PodWatcher) -> None:
    """Strategy `mixed`: each profile is a resource of its own, and none is a whole GPU."""
    node = gpu_node(
        {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.5gb": "7"},
        labels={"nvidia.com/gpu.product": PRODUCT, "nvidia.com/mig.strategy": "mixed"},
    )
    there = await observed(watcher, node)
    assert decided(given(there, await observed(watcher, waiting(1, "nvidia.com/mig-1g.5gb")), on_sale())) == ()
    (buy,) = decided(given(there, await observed(watcher, waiting(1), version=9), on_sale()))
    assert isinstance(buy, BuyNode)


@pytest.mark.parametrize(
    "labels",
    [
        {"nvidia.com/gpu.product": f"{PRODUCT}-MIG-1g.5gb", "nvidia.com/mig.strategy": "single"},
        {"nvidia.com/gpu.product": f"{PRODUCT}-SHARED", "nvidia.com/gpu.replicas": "7"},
    ],
)
async def test_slices_counted_as_gpus_are_not_of_the_model(watcher: PodWatcher, labels: Json) -> None:
    """Strategy `single`, or replicas named like whole GPUs: capacity for any GPU, not for an A100."""
    there = await observed(watcher, gpu_node({"nvidia.com/gpu": "7"}, labels=labels))
    any_gpu = await observed(watcher, waiting(1))
    assert decided(given(there, any_gpu, on_sale())) == ()
    whole = given(there, job("train", gpus=1, model="A100"), on_sale())
    assert schedule(whole, policy(), T0).placements == ()
    (buy,) = decided(whole)
    assert isinstance(buy, BuyNode)


async def test_renamed_replicas_take_pods_that_share(watcher: PodWatcher) -> None:
    """`nvidia.com/gpu.shared`, from `renameByDefault`; a pod that requests a whole GPU gets a new node."""
    labels = {"nvidia.com/gpu.product": "Tesla-T4", "nvidia.com/gpu.replicas": "4"}
    there = await observed(watcher, gpu_node({"nvidia.com/gpu": "0", "nvidia.com/gpu.shared": "4"}, labels=labels))
    assert decided(given(there, await observed(watcher, waiting(4, "nvidia.com/gpu.shared")), on_sale())) == ()
    (buy,) = decided(given(there, await observed(watcher, waiting(1), version=9), on_sale()))
    assert isinstance(buy, BuyNode)


# ---- nodes that contradict themselves, and pods that nobody may be asked for


async def test_node_without_labels_is_capacity_only(watcher: PodWatcher) -> None:
    """It takes pods that request any GPU, and is not ours to remove."""
    bare = gpu_node({"nvidia.com/gpu": "8"})
    bare["metadata"]["labels"] = {}
    state = given(await observed(watcher, bare), await observed(watcher, waiting(8)), on_sale())
    assert decided(state) == ()
    (view,) = node_views(state, T0)
    assert (view.phase, view.is_ours, view.instance_type, view.zone) == (NodePhase.READY, False, None, None)
    assert decided(given(await observed(watcher, bare), as_of=T0 + timedelta(hours=9)), T0 + timedelta(hours=9)) == ()


@pytest.mark.parametrize("amount", ["-1", "eight", "", "1e99999", "0x8"])
async def test_node_with_invalid_amount_is_ignored(watcher: PodWatcher, amount: str) -> None:
    """The other nodes are published, and the node once its amount is valid."""
    odd, other = gpu_node({"nvidia.com/gpu": amount}), node_json("other")
    things = [decoded(NODES, item, 5, namespace="") for item in (odd, other)]
    names = [getattr(fact, "name", None) for fact in await watcher.on_item(listed(NODES, *things))]
    assert names == ["other", None]
    (again,) = await observed(watcher, gpu_node({"nvidia.com/gpu": "8"}), version=6)
    assert again.fact.entity() == "node/n1"


async def test_fractional_gpu_amounts_are_rounded_down(watcher: PodWatcher) -> None:
    """`7500m` is seven GPUs; `1e3` is a thousand, as Kubernetes reads it."""
    for amount, count in (("0.5", 0), ("7500m", 7), ("1e3", 1000)):
        recorded, *_ = await observed(watcher, gpu_node({"nvidia.com/gpu": amount}), version=count + 10)
        assert isinstance(recorded.fact, NodeObserved)
        assert recorded.fact.allocatable.gpu_count == count


async def test_ready_but_unreachable_node_is_no_capacity(watcher: PodWatcher) -> None:
    """A ready condition with an unreachable taint: nothing is planned onto it."""
    taints = [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]
    there = await observed(watcher, gpu_node({"nvidia.com/gpu": "8"}, taints=taints))
    (buy,) = decided(given(there, await observed(watcher, waiting(8)), on_sale()))
    assert isinstance(buy, BuyNode)


async def test_two_nodes_of_one_order_both_count(watcher: PodWatcher) -> None:
    """A label copied by hand hides no node."""
    twin = ours({"nvidia.com/gpu": "8"})
    twin["metadata"] = {**twin["metadata"], "name": "n2"}
    state = given(bought(purchase(ACTION)), await observed(watcher, ours({"nvidia.com/gpu": "8"}), twin))
    assert [view.name for view in node_views(state, T0)] == ["n1", "n2"]


async def test_pod_of_other_scheduler_is_demand_once_unschedulable(watcher: PodWatcher) -> None:
    """A scheduler that is not running reports nothing, and nothing is bought on a guess."""
    silent = {**waiting(8, schedulerName="absent"), "status": {"phase": "Pending"}}
    assert decided(given(await observed(watcher, silent), on_sale())) == ()
    unschedulable = waiting(8, schedulerName="volcano")
    (buy,) = decided(given(await observed(watcher, unschedulable, version=9), on_sale()))
    assert isinstance(buy, BuyNode)


async def test_a_list_of_a_server_that_lags_behind_undoes_nothing(watcher: PodWatcher) -> None:
    """It shows the node before its GPUs were allocatable. Published as new, they would count as lost."""
    await observed(watcher, gpu_node({"nvidia.com/gpu": "0"}), version=10)
    assert await observed(watcher, gpu_node({"nvidia.com/gpu": "4"}), version=20)

    facts = await watcher.on_item(listed(NODES, decoded(NODES, gpu_node({"nvidia.com/gpu": "0"}), 10, namespace="")))

    assert not [fact for fact in facts if isinstance(fact, NodeObserved)]
    assert await observed(watcher, gpu_node({"nvidia.com/gpu": "3"}), version=30)

"""Phases of nodes, their capacity, and how long they count."""

from datetime import datetime

import pytest
from tests.support.stories import (
    EPOCH,
    HOUR,
    MINUTE,
    SECOND,
    T0,
    Story,
    TimedFact,
    bought,
    drained,
    given,
    instance,
    node,
    notice,
    offer,
    planned,
    pod,
    policy,
    provider_id,
    purchase,
)

from gpu_autoscaler.core.nodes.correlation import INSTANCE_MISSING_SECONDS_MAX
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import NodeView, node_views
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.node import NodeGone, NodeInstanceListed
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.events.scaling import ScalingDrainCancelled, ScalingNodeDrained, ScalingNodeTerminated
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, NodeUid, PlanId, PodUid
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.drain import BootTimedOut, NodeLost
from gpu_autoscaler.model.scheduling import Taint

BUY = purchase("buy-n1", labels={"team": "research"}, taints=(Taint("gpu", "NoSchedule", "true"),))


def only(state: ClusterState, as_of: datetime) -> NodeView:
    """The only view of the state."""
    (view,) = node_views(state, as_of)
    return view


def terminated(
    action_id: str, *, node_name: str = "n1", is_known: bool = True, at: datetime = T0 + 2 * MINUTE
) -> Story:
    """Our step that closes the purchase `buy-<name>`."""
    fact = ScalingNodeTerminated(
        action_id=ActionId(action_id),
        plan_id=PlanId("plan-end"),
        provider_id=provider_id(f"buy-{node_name}") if is_known else None,
        order_action_id=ActionId(f"buy-{node_name}"),
        node_name=node_name,
        terminated_at=at,
    )
    return (TimedFact(fact, at),)


def node_deleted(node_name: str = "n1", at: datetime = T0 + 3 * MINUTE) -> Story:
    """The deletion of the Kubernetes node."""
    return (TimedFact(NodeGone(epoch=EPOCH, version=50, node_uid=NodeUid(f"uid-{node_name}"), name=node_name), at),)


def node_drained(name: str = "n1", at: datetime = T0 + MINUTE) -> Story:
    """No workload pod is left on the node of this name."""
    fact = ScalingNodeDrained(
        action_id=ActionId(f"drain-{name}"),
        plan_id=PlanId(f"plan-drain-{name}"),
        node_uid=NodeUid(f"uid-{name}"),
        node_name=name,
        provider_id=provider_id(f"buy-{name}"),
        drained_at=at,
    )
    return (TimedFact(fact, at),)


def test_an_instance_with_a_deleted_node_is_released() -> None:
    """With that reason, not as late."""
    late = T0 + HOUR
    state = given(node("n1"), node_deleted(), as_of=late)
    (decision,) = plan(state, policy(), late).decisions

    assert isinstance(decision, ReleaseInstance)
    assert decision.reason == NodeLost()


def test_a_drained_instance_is_not_released_twice() -> None:
    """Its node object was deleted before the instance terminated."""
    late = T0 + HOUR
    state = given(node("n1"), drained("n1"), node_drained(), node_deleted(), as_of=late)

    assert plan(state, policy(), late).decisions == ()
    (view,) = node_views(state, late)
    assert view.phase is NodePhase.TERMINATING
    assert view.is_counted


@pytest.mark.parametrize(
    ("story", "phase"),
    [
        (bought(BUY, is_ordered=False), NodePhase.PLANNED),
        (bought(BUY, is_launched=False), NodePhase.ORDERED),
        (bought(BUY), NodePhase.LAUNCHED),
        (node("n1", is_ready=False), NodePhase.REGISTERED),
        (node("n1", gpus_allocatable=0), NodePhase.REGISTERED),
        (node("n1", gpus_allocatable=7), NodePhase.REGISTERED),
        (node("n1"), NodePhase.READY),
        (node("n1", is_cordoned=True), NodePhase.CORDONED),
        (node("n1") + drained("n1", is_started=False), NodePhase.CORDONED),
        (node("n1") + drained("n1"), NodePhase.DRAINING),
        (node("n1") + drained("n1") + node_drained(), NodePhase.DRAINED),
        (node("n1", deleting_since=T0), NodePhase.TERMINATING),
        (node("n1") + drained("n1") + node_drained() + terminated("drain-n1"), NodePhase.TERMINATING),
        (node("n1") + node("n1", is_ready=False, version=2)[-1:], NodePhase.LOST),
        (node("n1") + node("n1", gpus_allocatable=6, version=2)[-1:], NodePhase.LOST),
        (node("n1") + node_deleted(), NodePhase.LOST),
        (node("n1") + instance(BUY, state="terminated"), NodePhase.LOST),
        (node("n1") + drained("n1") + instance(BUY, state="terminated"), NodePhase.TERMINATING),
    ],
)
def test_the_phase_follows_from_all_streams(story: Story, phase: NodePhase) -> None:
    """Five minutes into the story; still counted until its end is confirmed."""
    view = only(given(story, as_of=T0 + 5 * MINUTE), T0 + 5 * MINUTE)

    assert view.phase is phase
    assert view.is_ours
    is_ended = any(
        isinstance(told.fact, ScalingNodeTerminated) or getattr(told.fact, "state", "") == "terminated"
        for told in story
    )
    assert view.is_counted is not is_ended


@pytest.mark.parametrize(
    "story",
    [
        bought(BUY, is_refused=True),
        bought(BUY) + terminated("release-n1"),
        bought(BUY, is_launched=False) + terminated("release-n1", is_known=False),
        node("n1") + drained("n1") + node_drained() + terminated("drain-n1") + node_deleted(),
        instance(BUY, state="terminated"),
    ],
)
def test_closed_nodes_have_no_view(story: Story) -> None:
    """Refused, released, or drained and terminated."""
    assert node_views(given(story, as_of=T0 + 5 * MINUTE), T0 + 5 * MINUTE) == ()


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_failed_purchase_counts_but_is_no_capacity(*, is_launched: bool) -> None:
    """From its boot deadline until its end is confirmed."""
    story = bought(purchase("buy-n1", boot_seconds_max=600), is_launched=is_launched)
    before = only(given(story), T0 + 10 * MINUTE - SECOND)
    after = only(given(story), T0 + 10 * MINUTE)

    assert (before.is_schedulable, before.is_counted) == (True, True)
    assert (after.phase, after.is_schedulable, after.is_counted) == (NodePhase.FAILED, False, True)


def test_a_usable_node_never_fails_its_boot() -> None:
    """A kubelet that stops an hour later makes it lost."""
    view = only(given(node("n1"), node("n1", is_ready=False, version=2)[-1:], as_of=T0 + HOUR), T0 + HOUR)

    assert (view.phase, view.usable_since) == (NodePhase.LOST, T0)


@pytest.mark.parametrize(
    ("ending", "is_counted"), [(node_deleted(), True), (node_deleted() + instance(BUY, state="terminated"), False)]
)
def test_a_purchase_without_a_node_is_released(ending: Story, *, is_counted: bool) -> None:
    """Lost at first, then failed, so that the order is closed."""
    state = given(node("n1"), ending)

    assert only(state, T0 + 5 * MINUTE).phase is NodePhase.LOST
    late = only(state, T0 + HOUR)
    assert (late.phase, late.is_counted, late.is_schedulable) == (NodePhase.FAILED, is_counted, False)


def test_a_released_instance_is_terminating() -> None:
    """No capacity from the decision on; counted until its end is confirmed."""
    release = ReleaseInstance(
        action_id=ActionId("release-n1"),
        provider_id=None,
        order_action_id=BUY.action_id,
        reason=BootTimedOut(booting_seconds=900.0, boot_seconds_max=900.0),
    )
    view = only(given(bought(BUY), planned(release, plan_id="plan-release")), T0 + MINUTE)

    assert (view.phase, view.is_schedulable, view.is_counted, view.is_leaving) == (
        NodePhase.TERMINATING,
        False,
        True,
        True,
    )


def test_an_instance_of_a_refused_launch_has_a_view() -> None:
    """It is billed, so it must be terminated."""
    view = only(given(bought(BUY, is_refused=True), instance(BUY)), T0 + MINUTE)

    assert (view.phase, view.is_counted, view.is_schedulable) == (NodePhase.FAILED, True, False)


def test_an_instance_without_a_decision_has_a_view() -> None:
    """It has our tag: it counts, without an order."""
    view = only(given(instance(BUY)), T0)

    assert (view.order, view.is_counted, view.provider_id) == (None, True, provider_id("buy-n1"))


def test_an_instance_is_lost_after_ten_minutes_without_a_list() -> None:
    """Lists of clouds lag behind launches."""

    def listed(seconds: float) -> Story:
        at = T0 + seconds * SECOND
        return (TimedFact(NodeInstanceListed(provider_ids=(), listed_at=at), at),)

    late = listed(INSTANCE_MISSING_SECONDS_MAX)
    too_late = listed(INSTANCE_MISSING_SECONDS_MAX + 1)

    assert only(given(bought(BUY), late, is_synced=False), T0 + MINUTE).phase is NodePhase.LAUNCHED
    assert only(given(bought(BUY), too_late, is_synced=False), T0 + MINUTE).phase is NodePhase.LOST


def test_a_booting_node_has_the_promised_resources() -> None:
    """With labels and taints of the order; its own once it has its GPUs."""
    booting = only(given(bought(BUY), node("n1", gpus_allocatable=0, taints=(Taint("boot", "NoSchedule"),))[-1:]), T0)
    usable = only(given(bought(BUY), node("n1", labels={"a": "b"})[-1:]), T0)

    assert booting.allocatable == offer().resources
    assert booting.taints == BUY.taints
    assert (booting.labels["team"], booting.labels[labels.ZONE]) == ("research", "zone-a")
    assert booting.expected_at == T0 + 2 * MINUTE
    assert (usable.labels, usable.taints, usable.expected_at) == ({"a": "b"}, (), None)


def test_order_node_and_instance_are_one_view() -> None:
    """Price of the cloud, pool of the order, name of the node."""
    view = only(given(node("n1", offer(usd_per_hour=2.5), pool="spot-pool")), T0)

    assert (view.name, view.node_uid, view.action_id) == ("n1", "uid-n1", "buy-n1")
    assert (view.provider_id, view.pool, view.price_micro_usd_per_hour) == (
        provider_id("buy-n1"),
        "spot-pool",
        2_500_000,
    )
    assert (view.instance_type, view.zone, view.capacity_type) == ("p4d.24xlarge", "zone-a", CapacityType.SPOT)


def test_a_node_of_others_is_capacity() -> None:
    """It counts as a node, without a deadline, and waits for its GPUs."""
    view = only(given(node("n1", is_ours=False)), T0)
    starting = only(given(node("n1", is_ours=False, gpus_allocatable=0)), T0)

    assert (view.is_ours, view.is_counted, view.phase, view.usable_by) == (False, True, NodePhase.READY, None)
    assert starting.phase is NodePhase.REGISTERED


def test_views_are_sorted_by_name() -> None:
    """Equal states give equal views."""
    state = given(node("n2"), bought(purchase("buy-a")), node("n1"))

    assert [view.name for view in node_views(state, T0)] == ["buy-a", "n1", "n2"]


def test_the_earliest_active_notice_is_the_deadline() -> None:
    """A node under notice is no capacity."""
    state = given(
        node("n1"),
        notice("n1", event="1"),
        notice("n1", event="2", reclaim_at=T0 + 4 * MINUTE),
        notice("n1", event="3", reclaim_at=T0 + 2 * MINUTE),
    )
    view = only(state, T0)

    assert (view.reclaim_at, view.phase, view.is_schedulable) == (T0 + 2 * MINUTE, NodePhase.READY, False)


def test_empty_since_depends_on_workload_pods() -> None:
    """From the time it became usable, then from its last workload pod."""
    left = PodGone(epoch=EPOCH, version=9, pod_uid=PodUid("uid-a"), namespace="default", name="a", node_name="n1")
    busy = pod("a", on="n1", at=T0 + MINUTE)
    watcher = pod("exporter", on="n1", owner_kind="DaemonSet", at=T0 + 20 * MINUTE)
    after = (TimedFact(left, T0 + 9 * MINUTE),)

    assert only(given(node("n1")), T0).empty_since == T0
    assert only(given(node("n1"), watcher), T0).empty_since == T0
    assert only(given(node("n1"), busy, as_of=T0 + HOUR), T0 + HOUR).empty_since is None
    assert only(given(node("n1"), busy, after, is_synced=False), T0 + HOUR).empty_since == T0 + 9 * MINUTE
    assert only(given(node("n1", is_ready=False)), T0).empty_since is None


def test_a_node_with_finished_pods_is_empty() -> None:
    """Their objects may stay for hours."""
    ended = pod("a", on="n1", phase="succeeded", finished_at=T0 + 5 * MINUTE, at=T0 + 7 * MINUTE)

    assert only(given(node("n1"), ended), T0 + HOUR).empty_since == T0 + 5 * MINUTE


def test_a_canceled_drain_makes_the_node_capacity_again() -> None:
    """After the cancellation the node is room again."""
    cancelled = ScalingDrainCancelled(
        action_id=ActionId("cancel"),
        plan_id=PlanId("plan-cancel"),
        drain_action_id=ActionId("drain-n1"),
        node_uid=NodeUid("uid-n1"),
        node_name="n1",
        cancelled_at=T0 + MINUTE,
    )
    view = only(given(node("n1"), drained("n1"), (TimedFact(cancelled, T0 + MINUTE),)), T0 + MINUTE)

    assert (view.phase, view.drain, view.is_schedulable) == (NodePhase.READY, None, True)

"""Removals and what prevents them: idle nodes, late purchases, orphans, and consolidation."""

from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import pytest
from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    TimedFact,
    bought,
    budget,
    drained,
    given,
    instance,
    job,
    node,
    offer,
    on_sale,
    pod,
    policy,
    provider_id,
    purchase,
    synced,
)

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.disruption_settings import RemovalPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import DrainNode, Plan, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, NodeUid
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.base import IdleRule, Reason
from gpu_autoscaler.model.reasons.defer import (
    KeptAsBuffer,
    NodeProtected,
    NotYetIdle,
    PodProtected,
    PodsFitNowhere,
    SavingTooSmall,
    WatchStale,
)
from gpu_autoscaler.model.reasons.defer_limits import Cooldown, DisruptionBudgetReached, Frozen
from gpu_autoscaler.model.reasons.drain import BootTimedOut, NodeIdle, NodeOrphaned, NodeUnderused
from gpu_autoscaler.model.scheduling import LabelRequirement

R = TypeVar("R", bound=Reason)
NOW = T0 + HOUR


def drained_nodes(state: ClusterState, **changes: object) -> list[str]:
    """Names of the nodes that a plan made now drains."""
    return [decision.node_name for decision in plan(state, policy(**changes), NOW).drains]


def held(made: Plan, subject: str, reason: type[R]) -> R:
    """Return the only reason why the subject was deferred."""
    (found,) = [each.reason for each in made.deferred if each.subject == subject]
    assert isinstance(found, reason)
    return found


# ---- idle


# An hour of waiting that counts for more than any node: an empty one stays for all of `idle_seconds_max`.
PATIENT = RemovalPolicy(waiting_micro_usd_per_hour=10**12)
ALL_OF_IT = IdleRule(
    name="idle_seconds_max", boot_seconds=120.0, node_micro_usd_per_hour=10_100_000, waiting_micro_usd_per_hour=10**12
)


def test_an_idle_node_is_removed() -> None:
    """Ten minutes without work: drained by choice, and its instance ended."""
    (decision,) = plan(given(node("n1"), as_of=NOW), policy(removal=PATIENT), NOW).drains

    assert decision.is_voluntary
    assert decision.provider_id == provider_id("buy-n1")
    assert decision.reason == NodeIdle(idle_seconds=3600.0, idle_seconds_max=600.0, rule=ALL_OF_IT)


def test_a_recently_emptied_node_stays() -> None:
    """With the reason."""
    state = given(node("n1"), as_of=T0 + 5 * MINUTE)
    made = plan(state, policy(removal=PATIENT), T0 + 5 * MINUTE)

    assert made.decisions == ()
    expected = NotYetIdle(idle_seconds=300.0, idle_seconds_max=600.0, rule=ALL_OF_IT)
    assert held(made, "node/uid-n1", NotYetIdle) == expected


@pytest.mark.parametrize("owner_kind", ["Job", None])
def test_a_node_with_work_is_not_idle(owner_kind: str | None) -> None:
    """One pod is enough, even one without GPUs or without a controller."""
    assert drained_nodes(given(node("n1"), pod("a", on="n1", gpus=0, owner_kind=owner_kind), as_of=NOW)) == []


def test_pods_of_the_node_itself_are_no_work() -> None:
    """A DaemonSet's pod does not keep a node."""
    assert drained_nodes(given(node("n1"), pod("ds", on="n1", gpus=0, owner_kind="DaemonSet"), as_of=NOW)) == ["n1"]


def test_foreign_nodes_are_never_removed() -> None:
    """They are capacity only."""
    assert drained_nodes(given(node("n1", is_ours=False), as_of=NOW)) == []


def test_a_stale_list_removes_nothing() -> None:
    """A failed list is not an empty cluster."""
    made = plan(given(node("n1"), as_of=NOW), policy(), NOW + HOUR)

    assert made.decisions == ()
    assert held(made, "cluster", WatchStale).source == "nodes"


def test_a_missing_list_removes_nothing() -> None:
    """Nothing is known absent before the first list."""
    made = plan(given(node("n1"), as_of=NOW, is_synced=False), policy(), NOW)

    assert made.decisions == ()
    assert held(made, "cluster", WatchStale).age_seconds is None


def test_a_node_that_waiting_work_needs_stays() -> None:
    """A pod that is about to be bound keeps its node."""
    assert drained_nodes(given(node("n1"), pod("a", at=NOW), as_of=NOW)) == []


def test_a_node_stays_a_while_after_it_became_usable() -> None:
    """The cooldown counts from the first moment of use."""
    made = plan(given(node("n1"), as_of=NOW), policy(scale_down_cooldown_seconds=7200), NOW)

    assert held(made, "node/uid-n1", Cooldown).remaining_seconds == 3600.0


def test_an_annotated_node_stays() -> None:
    """cluster-autoscaler's annotation is respected."""
    state = given(node("n1", annotations={labels.SCALE_DOWN_DISABLED: "true"}), as_of=NOW)

    assert "scale-down-disabled" in held(plan(state, policy(), NOW), "node/uid-n1", NodeProtected).protection


def test_the_minimum_stays() -> None:
    """Of three idle nodes one may go when two are wanted."""
    state = given(node("n1"), node("n2"), node("n3"), on_sale(), as_of=NOW)

    assert drained_nodes(state, nodes_count_min=2, disruption_ratio_max=1) == ["n1"]


def test_few_nodes_are_removed_at_once_the_most_expensive_first() -> None:
    """A tenth of two, rounded up, is one."""
    state = given(node("n1"), node("n2", offer("big", usd_per_hour=20.0)), as_of=NOW)
    made = plan(state, policy(), NOW)

    assert [decision.node_name for decision in made.drains] == ["n2"]
    assert held(made, "node/uid-n1", DisruptionBudgetReached).disrupting_count == 1


def test_a_share_of_whole_nodes_is_not_rounded_up() -> None:
    """Seven of a hundred are seven, though 0.07 * 100 is a little more in floating point."""
    state = given(*(node(f"n{number:03}") for number in range(100)), as_of=NOW)
    limits = policy(disruption_ratio_max=0.07)

    made = plan(state, limits, NOW)
    assert len(made.drains) == 7
    assert check(made, state, limits) == ()
    assert any("by choice at once" in each for each in check(made, state, policy(disruption_ratio_max=0.06)))


def test_a_ratio_of_zero_removes_nothing() -> None:
    """Zero rounded up is zero."""
    assert drained_nodes(given(node("n1"), as_of=NOW), disruption_ratio_max=0) == []


def test_a_node_is_not_drained_twice() -> None:
    """The drain in progress is the only one."""
    assert drained_nodes(given(node("n1"), drained("n1", at=NOW), as_of=NOW)) == []


def test_a_frozen_policy_removes_nothing_by_choice() -> None:
    """The freeze is reported for each candidate."""
    made = plan(given(node("n1"), as_of=NOW), policy(is_frozen=True), NOW)

    assert made.decisions == ()
    assert held(made, "node/uid-n1", Frozen) == Frozen()


# ---- purchases that came to nothing


def test_a_late_purchase_is_released() -> None:
    """Not usable after fifteen minutes: the instance ends."""
    made = plan(given(bought(purchase("order")), as_of=NOW), policy(), NOW)

    (decision,) = made.decisions
    assert isinstance(decision, ReleaseInstance)
    assert (decision.order_action_id, decision.provider_id) == ("order", provider_id("order"))
    assert decision.reason == BootTimedOut(booting_seconds=3600.0, boot_seconds_max=900.0, missing_step="node")


def test_a_purchase_before_its_deadline_is_kept() -> None:
    """Fourteen minutes."""
    assert plan(given(bought(purchase("order")), as_of=T0 + 14 * MINUTE), policy(), T0 + 14 * MINUTE).decisions == ()


def test_an_orphaned_instance_is_released() -> None:
    """Our tag, no order, no node, for longer than a boot may take."""
    (decision,) = plan(given(instance(purchase("lost")), as_of=NOW), policy(), NOW).decisions

    assert isinstance(decision, ReleaseInstance)
    assert decision.reason == NodeOrphaned(seen_seconds=3600.0)


def test_an_orphaned_node_without_work_is_released() -> None:
    """Its order was lost with the stream, so it has no deadline; with work it stays."""
    said = tuple(each for each in node("n1", gpus_allocatable=0) if each.fact.domain() == "node")
    bare = (*said, *instance(purchase("buy-n1")))
    (decision,) = plan(given(bare, as_of=NOW), policy(), NOW).decisions
    assert isinstance(decision, ReleaseInstance)
    assert decision.reason == NodeOrphaned(seen_seconds=3600.0)
    assert plan(given(bare, pod("web-0", on="n1", gpus=0), as_of=NOW), policy(), NOW).decisions == ()


def test_orphans_need_a_fresh_list() -> None:
    """Only a fresh list of instances tells an orphan."""
    fresh = synced((), as_of=NOW)
    old = tuple(each for each in fresh if each.fact.subject_root() != "node.instance_listed")
    made = plan(given(instance(purchase("lost")), old, as_of=NOW, is_synced=False), policy(), NOW)

    assert made.decisions == ()
    assert held(made, "cluster", WatchStale).source == "instances"


def test_a_young_instance_is_no_orphan() -> None:
    """Its order may be on its way through the stream."""
    lost = instance(purchase("lost"), at=NOW - MINUTE)

    assert plan(given(lost, as_of=NOW), policy(), NOW).decisions == ()


# ---- consolidation


def service(name: str, **changes: Any) -> Story:  # noqa: ANN401 - arguments of `pod`
    """A pod that can be made again elsewhere without losing work."""
    return pod(name, owner_kind="ReplicaSet", **changes)


def two_nodes(*more: Story, on_first: Story | None = None) -> ClusterState:
    """One GPU is used on n1, two on n2; n1 can go."""
    first = service("a", on="n1") if on_first is None else on_first
    return given(node("n1"), node("n2"), first, service("b1", on="n2"), service("b2", on="n2"), *more, as_of=NOW)


def test_a_node_is_removed_when_its_pods_fit_elsewhere() -> None:
    """The node with the fewest pods."""
    (decision,) = plan(two_nodes(), policy(), NOW).drains

    assert decision.node_name == "n1"
    assert decision.reason == NodeUnderused(pods=("uid-a",), saving_micro_usd_per_hour=10_000_000)  # type: ignore[arg-type]


def test_a_plan_consolidates_one_node() -> None:
    """The next one is decided on the result."""
    state = given(*(node(f"n{n}") for n in range(4)), *(service(f"p{n}", on=f"n{n}") for n in range(4)), as_of=NOW)

    assert drained_nodes(state, disruption_ratio_max=1) == ["n0"]


@pytest.mark.parametrize(
    "protected",
    [
        service("a", on="n1", annotations={labels.DO_NOT_DISRUPT: "true"}),
        service("a", on="n1", annotations={labels.KARPENTER_DO_NOT_DISRUPT: "true"}),
        service("a", on="n1", annotations={labels.SAFE_TO_EVICT: "false"}),
        pod("a", on="n1", owner_kind=None),
        pod("a", on="n1", owner_kind="Job"),
        service("a", on="n1", has_local_storage=True),
        (*job("j", is_preemptible=False, placed_on=("n1",), is_running=True), *service("a", on="n1", job_id="j")),
    ],
)
def test_a_protected_pod_keeps_its_node(protected: Story) -> None:
    """The other node, with twice the pods, is removed instead."""
    made = plan(two_nodes(on_first=protected), policy(), NOW)

    assert held(made, "node/uid-n1", PodProtected).pod_uid == "uid-a"
    assert [decision.node_name for decision in made.drains] == ["n2"]


@pytest.mark.parametrize(("allowed_count", "going"), [(1, []), (2, ["n1"])])
def test_a_disruption_budget_must_allow_all_moves_together(allowed_count: int, going: list[str]) -> None:
    """Two pods of one budget move together, or neither does."""
    match = (LabelRequirement(key="app", operator="In", values=("x",)),)
    state = given(
        node("n1"),
        node("n2"),
        service("a1", on="n1", labels={"app": "x"}),
        service("a2", on="n1", labels={"app": "x"}),
        service("b", on="n2", gpus=5),
        budget("x", match=match, disruptions_allowed=allowed_count),
        as_of=NOW,
    )

    assert drained_nodes(state) == going


def test_pods_without_another_place_keep_their_node() -> None:
    """Three GPUs do not fit beside six."""
    state = given(node("n1"), node("n2"), service("a", on="n1", gpus=3), service("b", on="n2", gpus=6), as_of=NOW)
    made = plan(state, policy(), NOW)

    assert made.decisions == ()
    assert held(made, "node/uid-n1", PodsFitNowhere).pods == ("uid-a",)


def test_a_well_used_node_is_not_consolidated() -> None:
    """More than half of its GPUs are requested."""
    state = given(node("n1"), node("n2"), service("a", on="n1", gpus=5), service("b", on="n2", gpus=5), as_of=NOW)

    assert plan(state, policy(), NOW).deferred == ()


def test_the_plan_check_keeps_well_used_nodes_apart() -> None:
    """Five of eight GPUs are requested: a plan of another policy that merges the two is refused."""
    state = given(node("n1"), node("n2"), service("a", on="n1", gpus=5), service("b", on="n2", gpus=3), as_of=NOW)
    eager = plan(state, policy(consolidation_requested_ratio_max=1.0), NOW)
    merging = msgspec.structs.replace(eager, decisions=tuple(_of(drain, "n1") for drain in eager.drains))

    assert check(merging, state, policy(consolidation_requested_ratio_max=1.0)) == ()
    assert "5 of its 8 GPUs are requested" in str(check(merging, state, policy()))


def _of(drain: DrainNode, name: str) -> DrainNode:
    """The same drain, of another node."""
    return msgspec.structs.replace(
        drain, node_name=name, node_uid=NodeUid(f"uid-{name}"), provider_id=provider_id(f"buy-{name}")
    )


def test_a_small_saving_moves_nothing() -> None:
    """A cheap node beside an expensive one: too little of their price is saved."""
    cheap = offer("cheap", gpus=8, usd_per_hour=1.0)
    state = given(node("n1", cheap), node("n2"), service("a", on="n1"), service("b", on="n2", gpus=7), as_of=NOW)
    made = plan(state, policy(), NOW)

    assert made.decisions == ()
    assert held(made, "node/uid-n1", SavingTooSmall).saving_ratio == pytest.approx(1 / 11)


def test_a_paid_reservation_is_not_consolidated() -> None:
    """Its end saves nothing: the work of the other node could move to it."""
    reserved = offer("reserved", gpus=8, capacity_type=CapacityType.RESERVED)
    state = given(node("n1", reserved), node("n2"), service("a", on="n1"), service("b", on="n2", gpus=5), as_of=NOW)
    made = plan(state, policy(), NOW)

    assert made.drains == []
    assert held(made, "node/uid-n1", KeptAsBuffer).kept_for.startswith("reservation/")


def test_pods_are_not_moved_while_work_waits_for_nodes() -> None:
    """It may need the capacity."""
    assert drained_nodes(two_nodes(job("big", gpus=64), on_sale())) == []


def test_pods_are_not_moved_while_others_still_move() -> None:
    """One disruption after the other."""
    state = two_nodes(node("n3"), service("c", on="n3"), drained("n3", at=NOW - timedelta(seconds=10)))

    assert drained_nodes(state, disruption_ratio_max=1) == []


def test_consolidation_can_be_switched_off() -> None:
    """Then only empty nodes are removed."""
    assert drained_nodes(two_nodes(), is_consolidation_on=False) == []


def test_moved_pods_keep_their_requirements() -> None:
    """A node of another model does not fit."""
    t4 = offer("g4", gpus=8, model="T4", gpu_memory_gib=16)
    state = given(
        node("n1"), node("n2", t4), service("a", on="n1", model="A100"), service("b", on="n2", gpus=7), as_of=NOW
    )

    assert drained_nodes(state) == []


def test_a_cordoned_node_is_no_other_place() -> None:
    """Somebody wants nothing new there."""
    state = given(node("n1"), node("n2", is_cordoned=True), service("a", on="n1"), service("b", on="n2"), as_of=NOW)

    assert drained_nodes(state) == []


def test_capacity_for_waiting_work_is_not_used_for_moved_pods() -> None:
    """A pod is about to be bound to the underused node: it stays."""
    state = given(
        node("n1"), node("n2"), service("a", on="n1"), service("b", on="n2", gpus=7), service("c", gpus=2), as_of=NOW
    )

    assert drained_nodes(state) == []


def test_a_node_that_still_boots_is_no_other_place() -> None:
    """Pods move only to nodes where they can run now."""
    state = given(node("n1"), service("a", on="n1"), bought(purchase("order", at=NOW), at=NOW), as_of=NOW)

    assert drained_nodes(state) == []


def test_an_instance_that_has_a_node_is_adopted() -> None:
    """Its order has expired, but work runs there: it is no orphan."""
    *_, last = node("n1", is_ours=False)
    assert isinstance(last.fact, NodeObserved)
    fact = msgspec.structs.replace(last.fact, action_id=ActionId("lost"), provider_id=provider_id("lost"))
    state = given(instance(purchase("lost")), (TimedFact(fact, T0),), service("a", on="n1"), as_of=NOW)

    assert plan(state, policy(), NOW).decisions == ()


def test_a_canceled_drain_allows_another() -> None:
    """The A100 node has to stay for its pod, so the idle T4 node may be removed."""
    t4 = offer("g4", model="T4", gpu_memory_gib=16)
    state = given(
        node("n1", t4), node("n2"), service("a", on="n2", model="A100"), drained("n2", at=NOW - MINUTE), as_of=NOW
    )

    assert drained_nodes(state) == ["n1"]

"""Nodes that are unhealthy, expired or drifted are replaced, their work first."""

from datetime import datetime, timedelta

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    TimedFact,
    budget,
    drained,
    given,
    job,
    node,
    notice,
    on_sale,
    planned,
    pod,
    policy,
)

from gpu_autoscaler.core.policy.disruption_settings import RemovalPolicy
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.reasons.buy import ReplacesNodes
from gpu_autoscaler.model.reasons.defer import PodProtected, TooManyUnhealthy
from gpu_autoscaler.model.reasons.defer_limits import Cooldown, DisruptionBudgetReached
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected
from gpu_autoscaler.model.reasons.drain import NodeDrifted, NodeExpired, NodeUnhealthy
from gpu_autoscaler.model.scheduling import LabelRequirement, Taint

DAY = 24 * HOUR
NOW = T0 + 8 * DAY  # everything that came at T0 is a day too old
SAFE = {labels.SAFE_TO_EVICT: "true"}


def work(name: str, on: str = "n1", gpus: int = 8, **changes: object) -> Story:
    """A pod of a ReplicaSet that fills a node."""
    return pod(name, on=on, gpus=gpus, **changes)  # type: ignore[arg-type]


def made_of(state: ClusterState, rules: ScalingPolicy | None = None, as_of: datetime = NOW) -> Plan:
    """The plan, which the plan check finds nothing against."""
    return accepted_plan(state, rules, as_of)


def held(made: Plan, subject: str) -> object:
    """The reason for which the step held this back."""
    (found,) = [each.reason for each in made.deferred if each.subject == subject and each.step == "replace_drifted"]
    return found


# ---- age


def test_an_expired_node_is_removed_when_its_work_fits_elsewhere() -> None:
    """Seven days, and a little less by its name; the pod fits on the younger one."""
    week = T0 + 7 * DAY
    state = given(node("n1"), work("a"), node("n2", at=week - HOUR), on_sale(), as_of=week)
    (drain,) = made_of(state, as_of=week).drains

    assert drain.node_name == "n1"
    assert drain.is_voluntary
    assert isinstance(drain.reason, NodeExpired)
    assert 0.9 * 7 * DAY.total_seconds() <= drain.reason.age_seconds_max <= 7 * DAY.total_seconds()


def test_nodes_of_one_day_do_not_all_expire_at_once() -> None:
    """A tenth of the seven days lies between the first and the last of many."""
    ages = [
        each.reason.age_seconds_max
        for each in made_of(
            given(*(node(f"n{number}") for number in range(20)), as_of=NOW), policy(disruption_ratio_max=1)
        ).drains
        if isinstance(each.reason, NodeExpired)
    ]

    assert len(set(ages)) == 20
    assert max(ages) - min(ages) > 0.05 * 7 * DAY.total_seconds()


def test_a_replacement_allows_for_its_longest_work() -> None:
    """A job's hour was reserved alone, beside a service without an end, which exceeded a daily limit."""
    running = job("a", gpus=4, placed_on=("n1",), is_running=True, duration_seconds_max=3600.0)
    its_pod = work("a-0", gpus=4, job_id="a", annotations=SAFE, owner_kind="Job", at=T0 - HOUR)
    state = given(node("n1"), running, its_pod, work("service", gpus=4), on_sale(), as_of=NOW)
    (purchase,) = made_of(state).purchases

    assert isinstance(purchase.reason, ReplacesNodes)
    assert purchase.reason.demand == ("pod/uid-a-0", "pod/uid-service")
    assert purchase.work_seconds_max is None


def test_a_replacement_is_bought_and_waited_for_before_the_drain() -> None:
    """Without capacity for the pod a node is bought; n1 drains only when it is ready."""
    full = (node("n1"), work("a"), on_sale())
    first = made_of(given(*full, as_of=NOW))
    (purchase,) = first.purchases

    assert first.drains == []
    assert isinstance(purchase.reason, ReplacesNodes)
    assert (purchase.reason.cause, purchase.reason.node_names) == ("expired", ("n1",))
    ordered = planned(purchase, at=NOW)
    second = made_of(given(*full, ordered, as_of=NOW + MINUTE), as_of=NOW + MINUTE)
    assert second.decisions == ()
    assert isinstance(held(second, "node/uid-n1"), CapacityExpected)
    later = NOW + 5 * MINUTE
    third = made_of(given(*full, node("n2", at=later - MINUTE), as_of=later), as_of=later)
    assert [each.node_name for each in third.drains] == ["n1"]


def test_a_failed_replacement_is_not_bought_again_at_once() -> None:
    """The node waits for hours before the next try."""
    full = (node("n1"), work("a"), on_sale())
    (purchase,) = made_of(given(*full, as_of=NOW)).purchases
    came = node("n2", at=NOW)[-1].fact
    assert isinstance(came, NodeObserved)
    taken = (
        *planned(purchase, at=NOW),
        TimedFact(msgspec.structs.replace(came, action_id=purchase.action_id), NOW),
        *work("b", on="n2"),
    )
    late = NOW + HOUR

    made = made_of(given(*full, taken, as_of=late), as_of=late)
    assert made.decisions == ()
    assert isinstance(held(made, "node/uid-n1"), Cooldown)
    again = NOW + 7 * HOUR
    assert made_of(given(*full, taken, as_of=again), as_of=again).purchases


@pytest.mark.parametrize(
    "kept",
    [
        work("a", owner_kind="Job"),
        work("a", annotations={labels.DO_NOT_DISRUPT: "true"}),
        (*work("a"), *budget("all", match=(), disruptions_allowed=0)),
    ],
)
def test_protected_work_keeps_an_expired_node_for_the_grace_period(kept: Story) -> None:
    """A day later it is requested to save, and evicted by force at the drain's deadline."""
    week = T0 + 7 * DAY
    little = work("b", on="n2", gpus=0, owner_kind=None)
    story = (node("n1"), kept, node("n2", at=T0 + 6 * DAY), little, on_sale())
    made = made_of(given(*story, as_of=week), as_of=week)

    assert made.drains == []
    assert isinstance(held(made, "node/uid-n1"), PodProtected)
    late = NOW + 2 * DAY
    (drain,) = [each for each in made_of(given(*story, as_of=late), as_of=late).drains if each.node_name == "n1"]
    assert not drain.is_voluntary
    assert drain.deadline_at == late + timedelta(seconds=3600)


def test_expiry_can_be_switched_off() -> None:
    """No limit, no expiry."""
    rules = policy(removal=RemovalPolicy(expire_seconds_max=None))

    assert made_of(given(node("n1"), work("a"), on_sale(), as_of=NOW), rules).decisions == ()


def test_few_expired_nodes_are_replaced_at_a_time() -> None:
    """One of three; its replacement counts while it is on its way."""
    full = tuple(story for name in ("n1", "n2", "n3") for story in (node(name), work(f"on-{name}", on=name)))
    made = made_of(given(*full, on_sale(), as_of=NOW))

    assert len(made.purchases) == 1
    assert isinstance(held(made, "node/uid-n2"), DisruptionBudgetReached)


def test_budgets_count_all_pods_that_one_plan_moves() -> None:
    """One of two replicas may move: of two expired nodes one drains."""
    replicas = tuple(
        story
        for name in ("n1", "n2")
        for story in (node(name), pod(f"on-{name}", on=name, gpus=2, labels={"app": "a"}))
    )
    free_capacity = (node("n3", at=T0 + 6 * DAY), pod("c", on="n3", gpus=0, owner_kind=None))
    week, rules = T0 + 7 * DAY, policy(disruption_ratio_max=1)
    one_may = budget("a", match=(LabelRequirement(key="app", operator="In", values=("a",)),), disruptions_allowed=1)
    made = made_of(given(*replicas, one_may, *free_capacity, as_of=week), rules, week)

    assert [each.node_name for each in made.drains] == ["n1"]
    assert isinstance(held(made, "node/uid-n2"), PodProtected)


def test_pods_being_deleted_need_no_budget() -> None:
    """Their node may drain, though the budget allows nothing."""
    keep = {labels.DO_NOT_DISRUPT: "true"}
    told_at = T0 + 7 * DAY - MINUTE
    going = pod("a", on="n1", gpus=2, labels={"app": "a"}, annotations=keep, deleting_since=told_at)
    none_may = budget("a", match=(LabelRequirement(key="app", operator="In", values=("a",)),), disruptions_allowed=0)
    week = T0 + 7 * DAY

    assert [each.node_name for each in made_of(given(node("n1"), going, none_may, as_of=week), as_of=week).drains] == [
        "n1"
    ]


def test_a_stale_list_replaces_nothing() -> None:
    """A failed list is no reason to move anything."""
    state = given(node("n1"), work("a"), node("n2"), as_of=NOW)

    assert made_of(state, as_of=NOW + HOUR).decisions == ()


def test_a_freeze_keeps_expired_nodes() -> None:
    """Neither drained by choice nor by force."""
    state = given(node("n1"), work("a", owner_kind="Job"), node("n2"), on_sale(), as_of=NOW + 3 * DAY)

    assert made_of(state, policy(is_frozen=True), NOW + 3 * DAY).decisions == ()


def test_a_canceled_drain_is_not_repeated_at_once() -> None:
    """Five minutes of cool-down."""
    given_up = drained("n1", at=NOW - 2 * MINUTE, cancelled_at=NOW - MINUTE)
    state = given(node("n1"), given_up, work("a"), node("n2", at=NOW - HOUR), on_sale(), as_of=NOW)

    assert isinstance(held(made_of(state), "node/uid-n1"), Cooldown)


# ---- drift

YOUNG = T0 + HOUR


@pytest.mark.parametrize(
    ("pool", "difference"),
    [
        (NodePool(name="other"), "pool default no longer exists"),
        (NodePool(name="default", zones=("zone-b",)), "zone zone-a is no longer allowed"),
        (NodePool(name="default", instance_types=("g5.xlarge",)), "instance type"),
        (NodePool(name="default", gpu_models=("T4",)), "GPU model"),
        (NodePool(name="default", labels={"tier": "new"}), "label tier=new"),
        (NodePool(name="default", taints=(Taint(key="k", effect="NoSchedule"),)), "other taints"),
    ],
)
def test_a_drifted_node_is_replaced(pool: NodePool, difference: str) -> None:
    """Filters, labels and taints; its work fits on a node of another pool."""
    free_capacity = node("n2", pool="spare")
    rules = policy(pools=(pool, NodePool(name="spare")))
    (drain,) = made_of(given(node("n1"), work("a"), free_capacity, as_of=YOUNG), rules, YOUNG).drains

    assert (drain.node_name, drain.is_voluntary) == ("n1", True)
    assert isinstance(drain.reason, NodeDrifted)
    assert difference in drain.reason.difference


def test_drift_never_disturbs_protected_work() -> None:
    """However long."""
    rules = policy(pools=(NodePool(name="other"),), removal=RemovalPolicy(expire_seconds_max=None))
    state = given(node("n1"), work("a", owner_kind="Job"), node("n2", pool="other"), as_of=NOW)

    assert [each.node_name for each in made_of(state, rules).drains if each.node_name == "n1"] == []


def test_drift_can_be_switched_off() -> None:
    """A policy may change without any replacement."""
    rules = policy(pools=(NodePool(name="other"),), removal=RemovalPolicy(is_drift_on=False), is_consolidation_on=False)

    assert (
        made_of(given(node("n1"), work("a"), node("n2"), work("b", on="n2"), as_of=YOUNG), rules, YOUNG).decisions == ()
    )


# ---- sickness


def silent(name: str, at: object = YOUNG) -> Story:
    """A node that was ready from T0 on and fell silent."""
    return (*node(name), *node(name, is_ready=False, version=2, at=at)[-1:])  # type: ignore[arg-type]


def test_a_lost_node_is_drained() -> None:
    """After twenty minutes, by force, with an hour before it."""
    as_of = YOUNG + 20 * MINUTE
    (drain,) = made_of(given(silent("n1"), work("a"), node("n2"), as_of=as_of), as_of=as_of).drains

    assert (drain.node_name, drain.is_voluntary) == ("n1", False)
    assert drain.reason == NodeUnhealthy(evidence="not ready", unhealthy_seconds=1200.0, unhealthy_seconds_max=1200.0)


def test_a_node_that_lost_gpus_is_unhealthy() -> None:
    """Seven of eight are left, for as long."""
    seven = node("n1", gpus_allocatable=7, version=2, at=YOUNG)[-1:]
    as_of = YOUNG + 20 * MINUTE
    state = given(node("n1"), seven, work("a", gpus=7), node("n2"), as_of=as_of)
    (drain,) = made_of(state, as_of=as_of).drains

    assert isinstance(drain.reason, NodeUnhealthy)
    assert "fewer allocatable GPUs" in drain.reason.evidence


def test_a_short_outage_is_healthy() -> None:
    """A kubelet may restart; the time starts again."""
    as_of = YOUNG + 19 * MINUTE
    back = node("n2", version=3, at=as_of - MINUTE)[-1:]

    state = given(silent("n1"), silent("n2"), back, work("a"), work("b", on="n2"), node("n3"), on_sale(), as_of=as_of)
    assert made_of(state, as_of=as_of).drains == []


def test_when_many_nodes_are_unhealthy_nothing_is_drained() -> None:
    """Five of ten: the fault is probably elsewhere."""
    as_of = YOUNG + HOUR
    broken = tuple(silent(f"n{number}") for number in range(5))
    well = tuple(
        story for number in range(5, 10) for story in (node(f"n{number}"), work(f"p{number}", on=f"n{number}"))
    )
    made = made_of(given(*broken, *well, on_sale(), as_of=as_of), policy(disruption_ratio_max=1), as_of)

    assert made.drains == []
    assert held(made, "cluster") == TooManyUnhealthy(unhealthy_count=5, nodes_count=10, unhealthy_ratio_max=0.45)


def test_nodes_of_others_count_among_the_unhealthy() -> None:
    """Three of ours are few enough; a fourth that nobody bought says that the fault is elsewhere."""
    as_of = YOUNG + HOUR
    ours = tuple(silent(f"n{number}") for number in range(3))
    foreign = (*node("own", is_ours=False), *node("own", is_ours=False, is_ready=False, version=2))
    few = made_of(given(*ours, on_sale(), as_of=as_of), policy(disruption_ratio_max=1), as_of)
    many = made_of(given(*ours, foreign, on_sale(), as_of=as_of), policy(disruption_ratio_max=1), as_of)

    assert few.drains
    assert held(many, "cluster") == TooManyUnhealthy(unhealthy_count=4, nodes_count=4, unhealthy_ratio_max=0.45)


def test_a_notice_precedes_health() -> None:
    """An unhealthy node under notice is drained for the notice."""
    as_of = YOUNG + HOUR
    state = given(silent("n1"), notice("n1", reclaim_at=as_of + HOUR, at=as_of), as_of=as_of)

    assert [each.reason.tag() for each in made_of(state, as_of=as_of).drains] == ["spot_reclaim"]

"""Which empty nodes stay for work to come, by what arrived in the last two hours."""

from datetime import datetime, timedelta

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import HOUR, MINUTE, T0, Story, given, job, node, offer, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.disruption_settings import RemovalPolicy
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import DrainNode, Plan
from gpu_autoscaler.model.ids import ActionId, NodeUid
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.base import IdleRule
from gpu_autoscaler.model.reasons.defer import NotYetIdle
from gpu_autoscaler.model.reasons.drain import NodeIdle

NOW = T0 + 3 * HOUR
CHEAP = offer("g4dn.xlarge", gpus=1, model="T4", usd_per_hour=0.1)
LARGE = offer("g4dn.12xlarge", gpus=4, model="T4", usd_per_hour=1.9)
TWO_USD = policy(removal=RemovalPolicy(waiting_micro_usd_per_hour=2_000_000))  # an hour of waiting


def arrivals(*minutes_ago: float, gpus: int = 1, model: str | None = None) -> Story:
    """Pods that arrived so long ago and have ended since."""
    ends = (
        pod(f"past-{gpus}-{model}-{ago:g}", on="gone", gpus=gpus, at=NOW - ago * MINUTE, model=model, phase="succeeded")
        for ago in minutes_ago
    )
    return tuple(fact for story in ends for fact in story)


OFTEN = arrivals(*range(1, 121, 4))


def drained(state: ClusterState, rules: ScalingPolicy | None = None, at: datetime = NOW) -> dict[str, IdleRule]:
    """The rules by which nodes are drained as idle. The plan check accepts them."""
    made = accepted_plan(state, rules or TWO_USD, at)
    return {
        each.node_name: each.reason.rule
        for each in made.drains
        if isinstance(each.reason, NodeIdle) and each.reason.rule is not None
    }


def test_a_node_that_work_hardly_needs_leaves_before_break_even_and_its_least_age() -> None:
    """Two arrivals in two hours: after 15 s, although break-even and the least age are ten minutes."""
    state = given(node("n1", CHEAP, at=NOW - timedelta(seconds=15)), arrivals(110, 20), as_of=NOW)
    (rule,) = drained(state).values()

    assert (rule.name, rule.kept_seconds) == ("unneeded", 600.0)
    assert rule.uses_count is not None
    assert rule.starts_count is not None
    assert rule.uses_count < 0.6 * rule.starts_count
    assert "removal.unneeded_idle_seconds: replayed from" in rule.sentence()
    assert drained(state, at=NOW - timedelta(seconds=1)) == {}


def test_a_node_that_work_often_needs_is_kept_until_break_even() -> None:
    """An arrival every four minutes, ten minutes to break even."""
    state = given(node("n1", CHEAP, at=NOW - 5 * MINUTE), OFTEN, as_of=NOW)
    made = plan(state, policy(), NOW)

    (kept,) = (each.reason for each in made.deferred if isinstance(each.reason, NotYetIdle))
    assert kept.rule is not None
    assert kept.rule.name == "idle_seconds_max"
    assert drained(state) == {}


@pytest.mark.parametrize(
    "other",
    [
        arrivals(*range(1, 121, 4), gpus=8),
        arrivals(*range(1, 121, 4), model="A100"),
        (*node("n2", CHEAP, at=NOW - 5 * MINUTE), *pod("runs", on="n2", gpus=0, at=NOW), *arrivals(*range(1, 121, 40))),
    ],
    ids=["too large", "another model", "free GPUs on a node with work"],
)
def test_only_work_that_needs_the_node_keeps_it(other: Story) -> None:
    """Not work that it cannot run, nor work for which others have free GPUs."""
    assert set(drained(given(node("n1", CHEAP, at=NOW - 5 * MINUTE), other, as_of=NOW))) == {"n1"}


def test_jobs_that_never_run_on_spot_keep_no_spot_node() -> None:
    """Every arrival of the last two hours was a job on on-demand nodes."""
    sold = [msgspec.structs.replace(CHEAP, capacity_type=each) for each in (CapacityType.ON_DEMAND, CapacityType.SPOT)]
    placed = [
        job(f"j{ago}", gpus=1, at=NOW - ago * MINUTE, is_preemptible=False, placed_on=("gone",), is_running=True)
        for ago in range(1, 121, 4)
    ]
    kept, left = (drained(given(node("n1", each, at=NOW - 5 * MINUTE), *placed, as_of=NOW)) for each in sold)
    assert (set(kept), set(left)) == (set(), {"n1"})


def test_of_several_empty_nodes_the_cheapest_stay() -> None:
    """One arrival at a time needs one GPU: the large node leaves."""
    nodes = (node("n1", LARGE, at=NOW - 2 * MINUTE), node("n2", CHEAP, at=NOW - 2 * MINUTE))
    assert set(drained(given(*nodes, OFTEN, as_of=NOW))) == {"n1"}


def test_a_node_whose_time_is_over_takes_no_work_from_others() -> None:
    """It leaves in the same plan, so the other one is the node that work uses."""
    nodes = (node("n1", LARGE, at=NOW - 2 * MINUTE), node("n2", CHEAP, at=NOW - 12 * MINUTE))
    assert set(drained(given(*nodes, OFTEN, as_of=NOW))) == {"n2"}


@pytest.mark.parametrize("past", [(), arrivals(1, 8, 15)], ids=["nothing", "a quarter of an hour"])
def test_with_little_history_break_even_decides(past: Story) -> None:
    """Nothing is known of what arrives, so nothing says that the node is unneeded."""
    assert drained(given(node("n1", CHEAP, at=NOW - 5 * MINUTE), past, as_of=NOW)) == {}


@pytest.mark.parametrize(
    "rules",
    [
        policy(idle_seconds=600.0),
        policy(pools=(NodePool(name="default", idle_seconds=600.0),)),
        policy(removal=RemovalPolicy(unneeded_idle_seconds=600.0)),
    ],
    ids=["idle time of the policy", "of the pool", "switched off"],
)
def test_a_time_that_is_set_is_not_shortened(rules: ScalingPolicy) -> None:
    """The rule concerns break-even times only, and those above its own time."""
    assert drained(given(node("n1", CHEAP, at=NOW - 5 * MINUTE), arrivals(110, 20), as_of=NOW), rules) == {}


# ---- the plan check finds what the rule must not do


def with_reason(made: Plan, name: str, reason: NodeIdle) -> Plan:
    """The plan with this drain of the node added."""
    drain = DrainNode(
        action_id=ActionId("drain-1"),
        node_uid=NodeUid(f"uid-{name}"),
        node_name=name,
        provider_id=None,
        is_voluntary=True,
        deadline_at=NOW + 10 * MINUTE,
        reason=reason,
    )
    return msgspec.structs.replace(made, decisions=(drain,))


UNNEEDED = IdleRule(name="unneeded", starts_count=24, uses_count=0, kept_seconds=600.0)


@pytest.mark.parametrize(
    ("seconds", "past", "rules", "problem"),
    [
        (15.0, OFTEN, policy(), "work would likely use it soon"),
        (10.0, arrivals(110, 20), policy(), "before the policy allows it"),
        (900.0, arrivals(110, 20), policy(), "before its idle time is over"),
        (60.0, arrivals(110, 20), policy(idle_seconds=60.0), "its idle time is set"),
    ],
)
def test_the_plan_check_refuses_the_wrong_nodes(
    seconds: float, past: Story, rules: ScalingPolicy, problem: str
) -> None:
    """Needed nodes, and nodes that are drained too early."""
    state = given(node("n1", CHEAP, at=NOW - 5 * MINUTE), past, as_of=NOW)
    reason = NodeIdle(idle_seconds=300.0, idle_seconds_max=seconds, rule=UNNEEDED)
    found = check(with_reason(plan(state, rules, NOW), "n1", reason), state, rules)

    assert any(problem in each for each in found)

"""Directives: freeze, pause, override; attribution and expiry."""

from datetime import datetime

import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import HOUR, MINUTE, T0, Story, TimedFact, given, node, notice, offer, on_sale, pod, policy

from gpu_autoscaler.core.explain.status import StatusView, node_line, pod_line
from gpu_autoscaler.core.intake.directives import DIRECTIVES_COUNT_MAX, active_facts, violations_of
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.policy import PolicyDirectiveGiven, PolicyDirectiveLifted
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.directives import AnyDirective, Freeze, Override, PausePool
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.buy import BelowOverride
from gpu_autoscaler.model.reasons.defer_limits import Frozen, KeptByOverride, OverrideReached, PoolPaused
from gpu_autoscaler.model.reasons.drain import AboveOverride, NodeIdle, SpotReclaim

NOW = T0 + HOUR
TWO_POOLS = (
    NodePool(name="spot", priority=10, capacity_types=(CapacityType.SPOT,)),
    NodePool(name="sure", capacity_types=(CapacityType.ON_DEMAND,)),
)


def given_directive(
    directive: AnyDirective, *, at: datetime = T0, until: datetime = NOW + HOUR, why: str = "upkeep"
) -> Story:
    """A directive of a user."""
    fact = PolicyDirectiveGiven(directive=directive, reason=why, given_by="ada", given_at=at, until=until)
    return (TimedFact(fact, at),)


def lifted(key: str, at: datetime) -> Story:
    """The withdrawal of the directive."""
    return (TimedFact(PolicyDirectiveLifted(key=key, lifted_by="bo", lifted_at=at), at),)


def plan_of(*stories: Story, under: ScalingPolicy | None = None, at: datetime = NOW) -> tuple[Plan, ClusterState]:
    """The plan after the stories, accepted by the plan check."""
    state, rules = given(*stories, as_of=at), under or policy()
    result = accepted_plan(state, rules, at)
    return result, state


def removed(result: Plan) -> dict[str, object]:
    """What the plan removes, with reasons."""
    return {each.node_name: each.reason for each in result.drains}


def deferred_by(result: Plan, kind: type) -> list[str]:
    """Deferrals with this type of reason."""
    return [each.subject for each in result.deferred if isinstance(each.reason, kind)]


# ---- a freeze


def test_a_freeze_defers_purchases_and_removals() -> None:
    """With attribution; waiting work shows it too."""
    result, state = plan_of(given_directive(Freeze()), pod("a", gpus=16), node("n1"), on_sale(offer("big", gpus=16)))
    assert result.decisions == ()
    assert set(deferred_by(result, Frozen)) == {"pod/uid-a", "node/uid-n1"}
    reason = next(each.reason for each in result.deferred if isinstance(each.reason, Frozen))
    assert reason.attribution is not None
    assert (reason.attribution.by, reason.attribution.why, reason.attribution.until) == ("ada", "upkeep", NOW + HOUR)
    line = pod_line("a", StatusView.of(state, policy(), NOW, result))
    assert "Scaling was frozen by ada until 2026-11-21 14:00:00 UTC (upkeep)" in line
    assert "gpu-autoscaler resume freeze" in line


def test_an_interruption_notice_is_handled_under_a_freeze() -> None:
    """The node is drained by its deadline; no replacement is bought."""
    doomed = notice("n1", reclaim_at=NOW + MINUTE)
    result, _ = plan_of(given_directive(Freeze()), node("n1"), pod("a", on="n1"), doomed, on_sale())
    assert isinstance(removed(result)["n1"], SpotReclaim)
    assert not result.purchases
    assert "pod/uid-a" in deferred_by(result, Frozen)


@pytest.mark.parametrize(
    "after",
    [
        given_directive(Freeze(), until=NOW),
        (*given_directive(Freeze()), *lifted("freeze", T0 + MINUTE)),
        (*given_directive(Freeze()), *given_directive(Freeze(), at=T0 + MINUTE, until=NOW)),
    ],
    ids=["expired", "withdrawn", "replaced by a shorter one"],
)
def test_an_inactive_freeze_has_no_effect(after: Story) -> None:
    """Expired, withdrawn, or replaced by a newer directive."""
    result, _ = plan_of(after, pod("a"), on_sale())
    assert result.purchases


# ---- a pause


def test_a_paused_pool_is_unchanged() -> None:
    """Its empty node stays; work that only fits there waits with the attribution; other pools are used."""
    offerings = on_sale(offer(), offer(capacity_type=CapacityType.ON_DEMAND))
    pause = given_directive(PausePool(pool="spot"))
    result, _ = plan_of(pause, pod("a"), offerings, under=policy(pools=TWO_POOLS))
    assert {each.pool for each in result.purchases} == {"sure"}

    empty, state = plan_of(pause, node("n1", pool="spot"), offerings, under=policy(pools=TWO_POOLS))
    assert removed(empty) == {}
    assert deferred_by(empty, PoolPaused) == ["node/uid-n1"]
    line = node_line("n1", StatusView.of(state, policy(pools=TWO_POOLS), NOW, empty))
    assert "Pool spot was paused by ada until" in line

    only_spot, _ = plan_of(pause, pod("a"), on_sale(), under=policy(pools=TWO_POOLS))
    assert deferred_by(only_spot, PoolPaused) == ["pod/uid-a"]


# ---- overrides


def test_a_minimum_is_bought_and_kept() -> None:
    """By GPUs or nodes, in its scope; further idle nodes are removed."""
    want = given_directive(Override(gpu_model="A100", gpu_count_min=16))
    result, _ = plan_of(want, node("n1"), on_sale())
    assert [each.reason.count_min for each in result.purchases if isinstance(each.reason, BelowOverride)] == [16]
    assert removed(result) == {}
    assert deferred_by(result, KeptByOverride) == ["node/uid-n1"]

    enough, _ = plan_of(want, node("n1"), node("n2"), node("n3"), on_sale())
    assert not enough.purchases
    assert len(removed(enough)) == 1
    assert all(isinstance(reason, NodeIdle) for reason in removed(enough).values())


def test_the_minimum_of_a_pool_is_bought_in_that_pool() -> None:
    """Even if another pool has a higher priority."""
    offerings = on_sale(offer(), offer(capacity_type=CapacityType.ON_DEMAND))
    result, _ = plan_of(
        given_directive(Override(pool="sure", nodes_count_min=2)), offerings, under=policy(pools=TWO_POOLS)
    )
    assert [each.pool for each in result.purchases] == ["sure", "sure"]


def test_a_maximum_removes_empty_nodes_at_once() -> None:
    """Without idle time; nodes with work stay, and it overrides the minimum of the policy."""
    target = given_directive(Override(nodes_count_max=1))
    result, _ = plan_of(target, node("n1", at=NOW - 11 * MINUTE), pod("a", on="n1", at=NOW - MINUTE), pod("b", gpus=8),
                    node("n2", at=NOW - 11 * MINUTE), on_sale(), under=policy(nodes_count_min=2))  # fmt: skip
    assert not result.purchases
    assert deferred_by(result, OverrideReached) == []  # n2 takes pod b
    assert removed(result) == {}

    full, _ = plan_of(target, node("n1"), pod("a", on="n1", gpus=8), pod("b", gpus=8), on_sale())
    assert deferred_by(full, OverrideReached) == ["pod/uid-b"]

    young = NOW - 11 * MINUTE
    last_used = pod("c", on="n2", at=NOW - MINUTE, version=2, phase="succeeded", finished_at=NOW - MINUTE)
    idle, _ = plan_of(target, node("n1", at=young), node("n2", at=young), pod("a", on="n1"), last_used, on_sale(),
                   under=policy(nodes_count_min=2))  # fmt: skip
    assert isinstance(removed(idle)["n2"], AboveOverride)


# ---- validation


@pytest.mark.parametrize(
    ("directive", "why", "until", "field"),
    [
        (Freeze(), " ", NOW, "reason"),
        (Freeze(), "x" * 501, NOW, "reason"),
        (Freeze(), "x", T0, "until"),
        (Freeze(), "x", T0 + 31 * 24 * HOUR, "until"),
        (PausePool(pool="unknown"), "x", NOW, "directive.pool"),
        (Override(), "x", NOW, "directive"),
        (Override(nodes_count_min=-1), "x", NOW, "directive.nodes_count_min"),
        (Override(gpu_count_min=2, gpu_count_max=1), "x", NOW, "directive.gpu_count_min"),
        (Override(gpu_model="A1000", gpu_count_max=1), "x", NOW, "directive.gpu_model"),
    ],
)
def test_an_invalid_directive_is_not_folded(directive: AnyDirective, why: str, until: datetime, field: str) -> None:
    """One violation per field; a pause of an unknown pool has no effect."""
    fact = PolicyDirectiveGiven(directive=directive, reason=why, given_by="ada", given_at=T0, until=until)
    assert [violation.field for violation in violations_of(fact, ("default",))] == [field]
    state = given(given_directive(directive, until=until, why=why))
    assert (state.directives == {}) is (field != "directive.pool")


def test_the_newest_directive_of_a_key_wins() -> None:
    """In any order; a repeat of an older directive or withdrawal changes nothing."""
    old, new = given_directive(Freeze(), why="old"), given_directive(Freeze(), at=T0 + MINUTE, why="new")
    state = given(old, new, old, lifted("freeze", T0), lifted("pause/default", NOW))
    (stands,) = active_facts(state.directives.values(), NOW)
    assert stands.reason == "new"


def test_old_directives_are_pruned() -> None:
    """The state stays small."""
    state = given(
        given_directive(Freeze(), until=NOW),
        given_directive(PausePool(pool="default"), at=T0 + 24 * HOUR, until=T0 + 30 * HOUR),
    )
    assert list(state.directives) == ["pause/default"]


def test_the_number_of_directives_is_bounded() -> None:
    """Beyond the limit the one that ends first is removed."""
    pools = [f"p{number:03}" for number in range(DIRECTIVES_COUNT_MAX + 2)]
    ends = {pool: NOW + number * MINUTE for number, pool in enumerate(pools)}
    state = given(*(given_directive(PausePool(pool=pool), until=end) for pool, end in ends.items()))
    assert list(state.directives) == [f"pause/{pool}" for pool in pools[2:]]

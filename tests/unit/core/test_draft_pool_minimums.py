"""Paused pools and minimums of pools, beside directives."""

from datetime import datetime

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import HOUR, MINUTE, T0, Story, TimedFact, given, node, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.explain.status import StatusView, pod_line
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.policy.validation import policy_violations
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.policy import PolicyDirectiveGiven
from gpu_autoscaler.model.decisions import DrainNode, Plan
from gpu_autoscaler.model.directives import AnyDirective, Override, PausePool
from gpu_autoscaler.model.reasons.buy import BelowOverride
from gpu_autoscaler.model.reasons.defer_limits import KeptByOverride, PoolPaused

NOW = T0 + HOUR


def plan_of(*stories: Story, under: ScalingPolicy, at: datetime = NOW) -> tuple[Plan, ClusterState]:
    """The plan after the stories, accepted by the plan check."""
    state = given(*stories, as_of=at)
    result = accepted_plan(state, under, at)
    return result, state


def given_directive(directive: AnyDirective) -> Story:
    """A directive for an hour."""
    fact = PolicyDirectiveGiven(directive=directive, reason="upkeep", given_by="ada", given_at=T0, until=NOW + HOUR)
    return (TimedFact(fact, T0),)


def pools(**fields: object) -> ScalingPolicy:
    """A policy of one pool."""
    return policy(pools=(NodePool(name="default", **fields),))  # type: ignore[arg-type]


def test_the_minimum_of_a_pool_is_bought_without_work() -> None:
    """And kept when idle; further nodes are removed."""
    rules = pools(nodes_count_min=2)
    result, _ = plan_of(on_sale(), under=rules)
    bought = result.purchases
    assert [type(each.reason) for each in bought] == [BelowOverride] * 2

    idle = [node(name, at=NOW - 30 * MINUTE) for name in ("n1", "n2", "n3")]
    result, _ = plan_of(*idle, on_sale(), under=rules)
    assert [type(each) for each in result.decisions] == [DrainNode]
    assert any(isinstance(each.reason, KeptByOverride) for each in result.deferred)


def test_a_maximum_of_a_directive_overrides_the_minimum_of_a_pool() -> None:
    """Nothing is bought up to the least that somebody does not allow."""
    result, _ = plan_of(
        given_directive(Override(pool="default", nodes_count_max=1)), on_sale(), under=pools(nodes_count_min=3)
    )
    assert len(result.decisions) == 1


def test_a_limit_allows_a_part_of_the_minimum() -> None:
    """Two of three nodes are bought and the rest is deferred; the plan check accepts both."""
    result, _ = plan_of(on_sale(), under=msgspec.structs.replace(pools(nodes_count_min=3), gpu_count_max=16))
    assert len(result.decisions) == 2
    assert [(each.subject, each.reason.tag()) for each in result.deferred] == [("override/pool/default", "gpus_limit")]


def test_a_paused_pool_is_unchanged() -> None:
    """Nothing is bought or removed; the reason names the policy, without an end."""
    idle, _ = plan_of(node("n1", at=NOW - 30 * MINUTE), on_sale(), under=pools(is_paused=True))
    result, state = plan_of(
        node("n1"), pod("full", on="n1", gpus=8), pod("a", gpus=8), on_sale(), under=pools(is_paused=True)
    )
    assert idle.decisions == result.decisions == ()
    paused = [each.subject for each in (*idle.deferred, *result.deferred) if isinstance(each.reason, PoolPaused)]
    assert paused == ["node/uid-n1", "pod/uid-a"]
    line = pod_line("a", StatusView.of(state, pools(is_paused=True), NOW, result))
    assert "paused by the policy (" in line
    assert "9999" not in line


@pytest.mark.parametrize(
    ("directive", "reason"),
    [(PausePool(pool="default"), PoolPaused), (Override(pool="default", nodes_count_min=2), KeptByOverride)],
)
def test_a_directive_keeps_a_node_that_misses_its_gpus_and_has_pods(
    directive: AnyDirective, reason: type[PoolPaused | KeptByOverride]
) -> None:
    """As every other node of the pool that runs work; without the directive it is drained."""
    late = (node("n1", gpus_allocatable=0), pod("web-0", on="n1", gpus=0), node("n2"), pod("full", on="n2", gpus=8))
    result, _ = plan_of(*late, given_directive(directive), under=pools())
    assert [each.subject for each in result.deferred if isinstance(each.reason, reason)] == ["node/uid-n1"]
    assert result.decisions == ()
    drained, _ = plan_of(*late, under=pools())
    assert [type(each) for each in drained.decisions] == [DrainNode]


def test_the_plan_check_reads_pools_itself() -> None:
    """A plan made without them is rejected."""
    state = given(node("n1", at=NOW - 30 * MINUTE), on_sale(), as_of=NOW)
    result = plan(state, pools(), NOW)
    assert result.decisions
    assert any("the policy paused" in each for each in check(result, state, pools(is_paused=True)))


def test_minimums_of_pools_must_fit_the_cluster() -> None:
    """In total."""
    two = policy(
        pools=(NodePool(name="a", nodes_count_min=3), NodePool(name="b", nodes_count_min=3)), nodes_count_max=5
    )
    assert any("adds up to 6" in violation for violation in policy_violations(two))

"""What a policy's pools want always: a pause, at least so many nodes; and a person's word beside it."""

from datetime import datetime

from tests.support.stories import HOUR, MINUTE, T0, Story, Told, given, node, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.explain.status import StatusView, pod_line
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.policy.validation import policy_violations
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.policy import PolicyDirectiveGiven
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan
from gpu_autoscaler.model.directives import AnyDirective, Override
from gpu_autoscaler.model.reasons.buy import BelowOverride
from gpu_autoscaler.model.reasons.defer_limits import KeptByOverride, PoolPaused

NOW = T0 + HOUR


def made(*stories: Story, under: ScalingPolicy, at: datetime = NOW) -> tuple[Plan, ClusterState]:
    """The plan after the stories, which the second opinion has nothing against."""
    state = given(*stories, as_of=at)
    found = plan(state, under, at)
    assert check(found, state, under) == ()
    return found, state


def said(directive: AnyDirective) -> Story:
    """Somebody's word for an hour."""
    fact = PolicyDirectiveGiven(directive=directive, reason="upkeep", given_by="ada", given_at=T0, until=NOW + HOUR)
    return (Told(fact, T0),)


def pools(**said: object) -> ScalingPolicy:
    """A policy of one pool."""
    return policy(pools=(NodePool(name="default", **said),))  # type: ignore[arg-type]


def test_a_pool_has_its_least_without_work() -> None:
    """Bought for nobody, and kept when it is idle; what is more goes."""
    rules = pools(nodes_count_min=2)
    found, _ = made(on_sale(), under=rules)
    bought = [each for each in found.decisions if isinstance(each, BuyNode)]
    assert [type(each.reason) for each in bought] == [BelowOverride] * 2

    idle = [node(name, at=NOW - 30 * MINUTE) for name in ("n1", "n2", "n3")]
    found, _ = made(*idle, on_sale(), under=rules)
    assert [type(each) for each in found.decisions] == [DrainNode]
    assert any(isinstance(each.reason, KeptByOverride) for each in found.deferred)


def test_a_persons_most_goes_before_a_pools_least() -> None:
    """Nothing is bought up to the least that somebody does not allow."""
    found, _ = made(said(Override(pool="default", nodes_count_max=1)), on_sale(), under=pools(nodes_count_min=3))
    assert len(found.decisions) == 1


def test_a_pool_that_is_switched_off_is_left_as_it_is() -> None:
    """Nothing is bought, nothing idle goes, and the reason names the policy and no end."""
    idle, _ = made(node("n1", at=NOW - 30 * MINUTE), on_sale(), under=pools(is_paused=True))
    found, state = made(
        node("n1"), pod("full", on="n1", gpus=8), pod("a", gpus=8), on_sale(), under=pools(is_paused=True)
    )
    assert idle.decisions == found.decisions == ()
    paused = [each.subject for each in (*idle.deferred, *found.deferred) if isinstance(each.reason, PoolPaused)]
    assert paused == ["node/uid-n1", "pod/uid-a"]
    line = pod_line("a", StatusView.of(state, pools(is_paused=True), NOW, found))
    assert "paused by the policy: the pool is switched off" in line
    assert "9999" not in line


def test_the_second_opinion_reads_the_pools_by_itself() -> None:
    """A plan that was made without them is refused under them."""
    state = given(node("n1", at=NOW - 30 * MINUTE), on_sale(), as_of=NOW)
    found = plan(state, pools(), NOW)
    assert found.decisions
    assert any("the policy paused" in each for each in check(found, state, pools(is_paused=True)))


def test_pools_cannot_want_more_than_the_cluster_may_have() -> None:
    """Their least is added up."""
    two = policy(
        pools=(NodePool(name="a", nodes_count_min=3), NodePool(name="b", nodes_count_min=3)), nodes_count_max=5
    )
    assert any("add up to 6" in each for each in mistakes(two))

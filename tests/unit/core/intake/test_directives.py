"""What people overrule for a while: a freeze, a pause, an override; who said it, and when it is over."""

from datetime import datetime

import pytest
from tests.support.stories import HOUR, MINUTE, T0, Story, Told, given, node, notice, offer, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.explain.status import StatusView, node_line, pod_line
from gpu_autoscaler.core.intake.directives import active_facts, violations_of
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.policy import PolicyDirectiveGiven, PolicyDirectiveLifted
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan
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


def said(directive: AnyDirective, *, at: datetime = T0, until: datetime = NOW + HOUR, why: str = "upkeep") -> Story:
    """Somebody's word."""
    fact = PolicyDirectiveGiven(directive=directive, reason=why, given_by="ada", given_at=at, until=until)
    return (Told(fact, at),)


def lifted(key: str, at: datetime) -> Story:
    """The word is taken back."""
    return (Told(PolicyDirectiveLifted(key=key, lifted_by="bo", lifted_at=at), at),)


def made(*stories: Story, under: ScalingPolicy | None = None, at: datetime = NOW) -> tuple[Plan, ClusterState]:
    """The plan after the stories, which the second opinion has nothing against."""
    state, rules = given(*stories, as_of=at), under or policy()
    found = plan(state, rules, at)
    assert check(found, state, rules) == ()
    return found, state


def bought(found: Plan) -> list[BuyNode]:
    """What the plan buys."""
    return [each for each in found.decisions if isinstance(each, BuyNode)]


def gone(found: Plan) -> dict[str, object]:
    """What goes, with why."""
    return {each.node_name: each.reason for each in found.decisions if isinstance(each, DrainNode)}


def held(found: Plan, kind: type) -> list[str]:
    """What is held back for this kind of reason."""
    return [each.subject for each in found.deferred if isinstance(each.reason, kind)]


# ---- a freeze


def test_a_freeze_holds_purchases_and_removals_and_says_who() -> None:
    """With why and until when; what waits is told to its owner."""
    found, state = made(said(Freeze()), pod("a", gpus=16), node("n1"), on_sale(offer("big", gpus=16)))
    assert found.decisions == ()
    assert set(held(found, Frozen)) == {"pod/uid-a", "node/uid-n1"}
    reason = next(each.reason for each in found.deferred if isinstance(each.reason, Frozen))
    assert reason.attribution is not None
    assert (reason.attribution.by, reason.attribution.why, reason.attribution.until) == ("ada", "upkeep", NOW + HOUR)
    line = pod_line("a", StatusView.of(state, policy(), NOW, found))
    assert "everything is frozen by ada until 2026-11-21 14:00:00 UTC: upkeep" in line
    assert "gpu-autoscaler resume freeze" in line


def test_a_notice_is_answered_under_a_freeze() -> None:
    """The node drains by its deadline; no other is bought in its place."""
    doomed = notice("n1", reclaim_at=NOW + MINUTE)
    found, _ = made(said(Freeze()), node("n1"), pod("a", on="n1"), doomed, on_sale())
    assert isinstance(gone(found)["n1"], SpotReclaim)
    assert not bought(found)
    assert "pod/uid-a" in held(found, Frozen)


@pytest.mark.parametrize(
    "after",
    [
        said(Freeze(), until=NOW),
        (*said(Freeze()), *lifted("freeze", T0 + MINUTE)),
        (*said(Freeze()), *said(Freeze(), at=T0 + MINUTE, until=NOW)),
    ],
    ids=["over", "lifted", "said again, shorter"],
)
def test_a_freeze_that_is_over_holds_nothing(after: Story) -> None:
    """By itself, by somebody's word, or by a newer word."""
    found, _ = made(after, pod("a"), on_sale())
    assert bought(found)


# ---- a pause


def test_a_paused_pool_is_left_as_it_is_and_others_are_bought_from() -> None:
    """Its empty node stays; work that only it could take waits, and says for whom."""
    offerings = on_sale(offer(), offer(capacity_type=CapacityType.ON_DEMAND))
    pause = said(PausePool(pool="spot"))
    found, _ = made(pause, pod("a"), offerings, under=policy(pools=TWO_POOLS))
    assert {each.pool for each in bought(found)} == {"sure"}

    empty, state = made(pause, node("n1", pool="spot"), offerings, under=policy(pools=TWO_POOLS))
    assert gone(empty) == {}
    assert held(empty, PoolPaused) == ["node/uid-n1"]
    line = node_line("n1", StatusView.of(state, policy(pools=TWO_POOLS), NOW, empty))
    assert "Pool spot is paused by ada until" in line

    only_spot, _ = made(pause, pod("a"), on_sale(), under=policy(pools=TWO_POOLS))
    assert held(only_spot, PoolPaused) == ["pod/uid-a"]


# ---- overrides


def test_at_least_is_bought_and_kept() -> None:
    """In its scope, by GPUs or nodes; idle nodes beyond it go as always."""
    want = said(Override(gpu_model="A100", gpu_count_min=16))
    found, _ = made(want, node("n1"), on_sale())
    assert [each.reason.count_min for each in bought(found) if isinstance(each.reason, BelowOverride)] == [16]
    assert gone(found) == {}
    assert held(found, KeptByOverride) == ["node/uid-n1"]

    enough, _ = made(want, node("n1"), node("n2"), node("n3"), on_sale())
    assert not bought(enough)
    assert len(gone(enough)) == 1
    assert all(isinstance(reason, NodeIdle) for reason in gone(enough).values())


def test_at_least_in_a_pool_is_bought_from_that_pool() -> None:
    """Although another pool goes first for work."""
    offerings = on_sale(offer(), offer(capacity_type=CapacityType.ON_DEMAND))
    found, _ = made(said(Override(pool="sure", nodes_count_min=2)), offerings, under=policy(pools=TWO_POOLS))
    assert [each.pool for each in bought(found)] == ["sure", "sure"]


def test_at_most_is_not_passed_and_what_is_empty_beyond_it_goes_at_once() -> None:
    """Not after its idle time; nodes with work stay, and the policy's least gives way."""
    target = said(Override(nodes_count_max=1))
    found, _ = made(target, node("n1", at=NOW - 11 * MINUTE), pod("a", on="n1", at=NOW - MINUTE), pod("b", gpus=8),
                    node("n2", at=NOW - 11 * MINUTE), on_sale(), under=policy(nodes_count_min=2))  # fmt: skip
    assert not bought(found)
    assert held(found, OverrideReached) == []  # n2 takes pod b
    assert gone(found) == {}

    full, _ = made(target, node("n1"), pod("a", on="n1", gpus=8), pod("b", gpus=8), on_sale())
    assert held(full, OverrideReached) == ["pod/uid-b"]

    young = NOW - 11 * MINUTE
    last_used = pod("c", on="n2", at=NOW - MINUTE, version=2, phase="succeeded", finished_at=NOW - MINUTE)
    idle, _ = made(target, node("n1", at=young), node("n2", at=young), pod("a", on="n1"), last_used, on_sale(),
                   under=policy(nodes_count_min=2))  # fmt: skip
    assert isinstance(gone(idle)["n2"], AboveOverride)


# ---- words that cannot be meant


@pytest.mark.parametrize(
    ("directive", "why", "until", "field"),
    [
        (Freeze(), " ", NOW, "reason"),
        (Freeze(), "x" * 501, NOW, "reason"),
        (Freeze(), "x", T0, "until"),
        (Freeze(), "x", T0 + 31 * 24 * HOUR, "until"),
        (PausePool(pool="nobody's"), "x", NOW, "directive.pool"),
        (Override(), "x", NOW, "directive"),
        (Override(nodes_count_min=-1), "x", NOW, "directive.nodes_count_min"),
        (Override(gpu_count_min=2, gpu_count_max=1), "x", NOW, "directive.gpu_count_min"),
        (Override(gpu_model="A1000", gpu_count_max=1), "x", NOW, "directive.gpu_model"),
    ],
)
def test_what_cannot_be_meant_is_named_and_not_kept(
    directive: AnyDirective, why: str, until: datetime, field: str
) -> None:
    """Each by its field; pools are the policy's to know, and a pause of none does nothing."""
    fact = PolicyDirectiveGiven(directive=directive, reason=why, given_by="ada", given_at=T0, until=until)
    assert [mistake.field for mistake in violations_of(fact, ("default",))] == [field]
    state = given(said(directive, until=until, why=why))
    assert (state.directives == {}) is (field != "directive.pool")


def test_of_one_key_the_newest_word_counts_in_whichever_order_it_comes() -> None:
    """A repeat of an older word, or of its end, changes nothing."""
    old, new = said(Freeze(), why="old"), said(Freeze(), at=T0 + MINUTE, why="new")
    state = given(old, new, old, lifted("freeze", T0), lifted("pause/default", NOW))
    (stands,) = active_facts(state.directives.values(), NOW)
    assert stands.reason == "new"


def test_what_was_over_long_ago_is_forgotten() -> None:
    """The state stays small."""
    state = given(said(Freeze(), until=NOW), said(PausePool(pool="default"), at=T0 + 24 * HOUR, until=T0 + 30 * HOUR))
    assert list(state.directives) == ["pause/default"]

"""Nodes that somebody deletes by hand: held by a finalizer, emptied by a deadline, let go last of all."""

from datetime import datetime, timedelta

import msgspec
import pytest
from tests.support.stories import HOUR, MINUTE, T0, Story, Told, given, node, notice, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.disruption.deleted_nodes import finalizer_changes
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.disruption_settings import RemovalPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.node import NodeInstanceListed, NodeInstanceObserved, NodeObserved
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut, DrainNode
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler.model.reasons.drain import NodeDeleted
from gpu_autoscaler.model.scheduling import Taint

NOW = T0 + HOUR
OFF = policy(removal=RemovalPolicy(is_finalizer_on=False))


def held(story: Story, **changes: object) -> Story:
    """The same node, held by our finalizer."""
    return tuple(
        Told(msgspec.structs.replace(each.fact, is_guarded=True, **changes), each.at)
        if isinstance(each.fact, NodeObserved)
        else each
        for each in story
    )


def deleted(name: str = "n1", at: datetime = NOW, **more: object) -> Story:
    """A node of ours that somebody deleted at this instant."""
    return held(node(name, deleting_since=at, **more))  # type: ignore[arg-type]


def drains(*stories: Story, under: ScalingPolicy | None = None, at: datetime = NOW) -> list[DrainNode]:
    """What the plan drains, which the second opinion has nothing against."""
    state, rules = given(*stories, as_of=at), under or policy()
    found = plan(state, rules, at)
    assert check(found, state, rules) == ()
    return [each for each in found.decisions if isinstance(each, DrainNode)]


def wanted(*stories: Story, under: ScalingPolicy | None = None) -> list[tuple[str, bool]]:
    """Node and whether the finalizer is to be there, where it is not as it is to be."""
    due = finalizer_changes(given(*stories, as_of=NOW), under or policy(), NOW)
    return [(each.view.name, each.is_wanted) for each in due]


# ---- emptied


def test_what_karpenter_holds_waits_for_no_finalizer_of_ours() -> None:
    """Each would wait for the other: it ends the instance only when the node object is gone."""
    registered = {"karpenter.sh/registered": "true"}
    fresh = node("n2", taints=(Taint("karpenter.sh/unregistered", "NoExecute"),))
    assert wanted(node("n1", labels=registered), fresh) == []
    assert wanted(held(node("n1", labels=registered))) == [("n1", False)]
    assert drains(node("n1", labels=registered, deleting_since=NOW), pod("p", on="n1")) == []


def test_a_node_deleted_by_hand_is_emptied_with_a_deadline() -> None:
    """Its pods are asked first and forced at last, whatever protects them from our choices."""
    (drain,) = drains(deleted(), pod("p", on="n1", annotations={"gpu-autoscaler.io/do-not-disrupt": "true"}))
    assert isinstance(drain.reason, NodeDeleted)
    assert (drain.is_voluntary, drain.deadline_at) == (False, NOW + timedelta(seconds=policy().drain_seconds_max))
    assert drain.provider_id is not None
    assert "deleted the node by hand" in drain.reason.sentence()


def test_a_freeze_does_not_keep_what_a_user_deletes() -> None:
    """It is their word as well."""
    assert drains(deleted(), under=policy(is_frozen=True))


def test_who_was_away_gives_work_a_moment_to_save_all_the_same() -> None:
    """The deadline has long passed; nobody was told."""
    (drain,) = drains(deleted(at=NOW - 10 * HOUR))
    assert drain.deadline_at == NOW + timedelta(seconds=policy().notice_seconds_default)


def test_the_clouds_own_deadline_is_kept_as_well() -> None:
    """A notice beside it: what comes first."""
    (drain,) = drains(deleted(), notice("n1", reclaim_at=NOW + MINUTE))
    assert drain.deadline_at == NOW + MINUTE


@pytest.mark.parametrize(
    "story",
    [
        node("n1", deleting_since=NOW),  # not held: it goes by itself
        held(node("n1", deleting_since=NOW, is_ours=False)),
        held(node("n1")),
    ],
)
def test_what_is_not_ours_or_not_deleted_is_left_alone(story: Story) -> None:
    """Nothing is drained."""
    assert all(not isinstance(each.reason, NodeDeleted) for each in drains(story, on_sale()))


def test_it_is_decided_once() -> None:
    """The next plan knows the drain."""
    state = given(deleted(), as_of=NOW)
    first = plan(state, policy(), NOW)
    made = ScalingPlanMade(
        plan_id=PlanId("p"), plan=first, cut=Cut(), policy_digest="", core_digest="", service_version=""
    )
    assert drains(deleted(), (Told(made, NOW),)) == []


# ---- held


def test_nodes_of_ours_are_held_and_those_of_others_are_not() -> None:
    """From the moment they show; what is held already is left as it is."""
    assert wanted(node("n1"), held(node("n2")), node("theirs", is_ours=False)) == [("n1", True)]
    assert wanted(node("n1", deleting_since=NOW)) == []  # it cannot be put any more


def test_the_finalizer_goes_when_the_instance_has_ended_and_not_before() -> None:
    """The cloud says so, or its lists have left it out for long."""
    assert wanted(deleted()) == []
    seen = next(each.fact for each in deleted() if isinstance(each.fact, NodeInstanceObserved))
    over = msgspec.structs.replace(seen, state="terminated", version=seen.version + 9, terminated_at=NOW)
    assert wanted(deleted(), (Told(over, NOW),)) == [("n1", False)]
    assert drains(deleted(), (Told(over, NOW),)) == []

    listed = (Told(NodeInstanceListed(provider_ids=(), listed_at=NOW + 11 * MINUTE), NOW + 11 * MINUTE),)
    assert wanted(deleted(at=NOW), listed) == [("n1", False)]


def test_switched_off_every_finalizer_is_taken_away() -> None:
    """As before an uninstall: nobody would be there to take them away later."""
    assert wanted(held(node("n1")), deleted("n2"), node("n3"), under=OFF) == [("n1", False), ("n2", False)]

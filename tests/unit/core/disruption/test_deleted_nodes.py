"""Nodes that a user deletes: held by a finalizer, drained by a deadline."""

from datetime import datetime, timedelta

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import HOUR, MINUTE, T0, Story, TimedFact, given, node, notice, on_sale, pod, policy

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
        TimedFact(msgspec.structs.replace(each.fact, has_finalizer=True, **changes), each.at)
        if isinstance(each.fact, NodeObserved)
        else each
        for each in story
    )


def deleted(name: str = "n1", at: datetime = NOW, **more: object) -> Story:
    """A node of ours that somebody deleted at this instant."""
    return held(node(name, deleting_since=at, **more))  # type: ignore[arg-type]


def drains(*stories: Story, under: ScalingPolicy | None = None, at: datetime = NOW) -> list[DrainNode]:
    """What the plan drains, which the plan check has nothing against."""
    state, rules = given(*stories, as_of=at), under or policy()
    found = accepted_plan(state, rules, at)
    return found.drains


def wanted(*stories: Story, under: ScalingPolicy | None = None) -> list[tuple[str, bool]]:
    """Node and whether the finalizer is to be there, where it is not as it is to be."""
    due = finalizer_changes(given(*stories, as_of=NOW), under or policy(), NOW)
    return [(each.view.name, each.is_wanted) for each in due]


# ---- emptied


def test_nodes_of_karpenter_get_no_finalizer() -> None:
    """Each would wait for the other: Karpenter ends the instance only when the Node object is gone."""
    registered = {"karpenter.sh/registered": "true"}
    fresh = node("n2", taints=(Taint("karpenter.sh/unregistered", "NoExecute"),))
    assert wanted(node("n1", labels=registered), fresh) == []
    assert wanted(held(node("n1", labels=registered))) == [("n1", False)]
    assert drains(node("n1", labels=registered, deleting_since=NOW), pod("p", on="n1")) == []


def test_a_node_deleted_by_a_user_is_drained_with_a_deadline() -> None:
    """Its pods are evicted, by force at the end, whatever protects them from disruption by choice."""
    (drain,) = drains(deleted(), pod("p", on="n1", annotations={"gpu-autoscaler.io/do-not-disrupt": "true"}))
    assert isinstance(drain.reason, NodeDeleted)
    assert (drain.is_voluntary, drain.deadline_at) == (False, NOW + timedelta(seconds=policy().drain_seconds_max))
    assert drain.provider_id is not None
    assert "The node object was deleted at" in drain.reason.sentence()


def test_a_freeze_does_not_keep_a_deleted_node() -> None:
    """It is their word as well."""
    assert drains(deleted(), under=policy(is_frozen=True))


def test_after_an_outage_work_still_gets_time_to_save() -> None:
    """The deadline has long passed."""
    (drain,) = drains(deleted(at=NOW - 10 * HOUR))
    assert drain.deadline_at == NOW + timedelta(seconds=policy().notice_seconds_default)


def test_the_deadline_of_a_notice_applies_as_well() -> None:
    """The earlier one."""
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
def test_foreign_or_undeleted_nodes_are_not_drained(story: Story) -> None:
    """Nothing is drained."""
    assert all(not isinstance(each.reason, NodeDeleted) for each in drains(story, on_sale()))


def test_it_is_decided_once() -> None:
    """The next plan sees the drain."""
    state = given(deleted(), as_of=NOW)
    first = plan(state, policy(), NOW)
    made = ScalingPlanMade(
        plan_id=PlanId("p"), plan=first, cut=Cut(), policy_digest="", core_digest="", service_version=""
    )
    assert drains(deleted(), (TimedFact(made, NOW),)) == []


# ---- held


def test_only_managed_nodes_get_a_finalizer() -> None:
    """From their registration; existing finalizers stay."""
    assert wanted(node("n1"), held(node("n2")), node("theirs", is_ours=False)) == [("n1", True)]
    assert wanted(node("n1", deleting_since=NOW)) == []  # it cannot be put any more


def test_the_finalizer_is_removed_when_the_instance_has_ended() -> None:
    """By the cloud's report, or missing from its lists for long."""
    assert wanted(deleted()) == []
    seen = next(each.fact for each in deleted() if isinstance(each.fact, NodeInstanceObserved))
    over = msgspec.structs.replace(seen, state="terminated", version=seen.version + 9, terminated_at=NOW)
    assert wanted(deleted(), (TimedFact(over, NOW),)) == [("n1", False)]
    assert drains(deleted(), (TimedFact(over, NOW),)) == []

    listed = (TimedFact(NodeInstanceListed(provider_ids=(), listed_at=NOW + 11 * MINUTE), NOW + 11 * MINUTE),)
    assert wanted(deleted(at=NOW), listed) == [("n1", False)]


def test_switched_off_every_finalizer_is_removed() -> None:
    """As before an uninstall."""
    assert wanted(held(node("n1")), deleted("n2"), node("n3"), under=OFF) == [("n1", False), ("n2", False)]

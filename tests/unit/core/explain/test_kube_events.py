"""What users find on their pods and nodes: a reason they know, and the words of `why`."""

from datetime import datetime, timedelta

import pytest
from tests.support.stories import (
    HOUR,
    MINUTE,
    SECOND,
    T0,
    Story,
    bought,
    budget,
    drained,
    evicted,
    given,
    node,
    notice,
    on_sale,
    pod,
    policy,
    purchase,
)
from tests.unit.core.disruption.test_orphaned_nodes import DUE, ended, left

from gpu_autoscaler.core.explain.kube_events import MESSAGE_LENGTH_MAX, Announcement, announcements
from gpu_autoscaler.core.explain.status import StatusView
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.drain import NodeDeleted
from gpu_autoscaler.model.scheduling import LabelRequirement


def told(
    *stories: Story, under: ScalingPolicy | None = None, at: datetime = T0, has_plan: bool = True
) -> list[Announcement]:
    """What is to be said after the stories and the plan that is made of them."""
    state, rules = given(*stories, as_of=at), under or policy()
    return list(announcements(StatusView.of(state, rules, at, plan(state, rules, at) if has_plan else None)))


def wants(key: str) -> UnmetDemand:
    """The reason of a purchase for this."""
    return UnmetDemand(demand=(key,), offers_considered=1, price_micro_usd_per_hour=1)


@pytest.mark.parametrize(
    ("rules", "gpus", "reason"),
    [
        (policy(), 16, "InsufficientCapacity"),
        (policy(nodes_count_max=0), 8, "ScaleUpBlocked"),
        (policy(is_frozen=True), 8, "ScaleUpBlocked"),
    ],
)
def test_a_waiting_pod_says_why_and_what_would_help(rules: ScalingPolicy, gpus: int, reason: str) -> None:
    """A warning under a name that users know; the sentence says what it waits for and when it starts."""
    (said,) = told(pod("train-0", gpus=gpus), on_sale(), under=rules)

    assert (said.kind, said.namespace, said.name, said.uid) == ("Pod", "default", "train-0", "uid-train-0")
    assert (said.reason, said.is_warning) == (reason, True)
    assert said.message.startswith("Waiting because ")
    assert "it starts when " in said.message
    assert len(said.message) <= MESSAGE_LENGTH_MAX


def test_a_pod_whose_node_is_coming_says_which() -> None:
    """No warning: something is under way."""
    order = purchase("buy", reason=wants("pod/uid-train-0"))
    (said,) = (one for one in told(pod("train-0", gpus=8), on_sale(), bought(order)) if one.kind == "Pod")

    assert (said.reason, said.is_warning) == ("ScaleUpTriggered", False)
    assert "on the way" in said.message


def test_nobody_speaks_of_a_pod_that_no_plan_has_spoken_of() -> None:
    """Nor of one that runs: its scheduler has said what there is to say."""
    assert told(pod("train-0", gpus=8), on_sale(), has_plan=False) == []
    assert [one for one in told(pod("train-0", on="n1", gpus=8), node("n1")) if one.kind == "Pod"] == []


def test_who_waits_longest_is_told_first() -> None:
    """What one tick cannot say comes with the next, and nobody is passed over for ever."""
    pods = [pod(f"p{number}", gpus=16, unschedulable_since=T0 - number * MINUTE) for number in (1, 3, 2)]

    assert [one.name for one in told(*pods, on_sale())] == ["p3", "p2", "p1"]


def test_our_nodes_say_why_they_are_there_and_when_they_go() -> None:
    """Registered, then whatever becomes of them; nodes of others are none of our business."""
    story = (node("n1"), node("theirs", is_ours=False), on_sale())
    (here,) = told(*story)
    (going,) = told(*story, notice("n1"))

    assert (here.kind, here.namespace, here.name, here.reason) == ("Node", "", "n1", "NodeRegistered")
    assert "Nothing runs on it." in here.message
    assert (going.reason, going.is_warning) == ("SpotInterruption", True)
    assert told(*story, at=T0 + HOUR)


def test_an_evicted_pod_says_who_told_it_to_go_why_and_until_when() -> None:
    """Also after it is gone, for a while, and once; where it had to be forced that is a warning."""
    leaving = drained("n1", reason=NodeDeleted(deleted_at=T0), is_voluntary=False, seconds_max=60.0)
    story = (node("n1"), on_sale(), leaving, evicted("a", off="n1"), evicted("b", off="n1", is_forced=True))
    asked, forced = (one for one in told(*story, at=T0 + MINUTE) if one.reason == "Evicted")

    assert (asked.kind, asked.namespace, asked.name, asked.uid) == ("Pod", "default", "a", "uid-a")
    assert asked.message.startswith("Evicted by gpu-autoscaler from node n1, which goes when it is empty, by ")
    assert "Somebody deleted the node by hand" in asked.message
    assert (asked.is_warning, asked.is_once, forced.is_warning, forced.is_once) == (False, True, True, True)
    assert "its eviction was not allowed in time" in forced.message
    assert [one for one in told(*story, at=T0 + HOUR) if one.reason == "Evicted"] == []


@pytest.mark.parametrize(("after", "said_count"), [(5 * SECOND, 0), (20 * SECOND, 1)])
def test_a_drain_that_does_not_get_on_names_who_is_in_the_way(after: timedelta, said_count: int) -> None:
    """Once it is more than the moment that pods take to go one after the other."""
    app = (LabelRequirement(key="app", operator="In", values=("a",)),)
    story = (
        node("n1"),
        pod("a", on="n1", gpus=1, labels={"app": "a"}),
        budget("never", match=app, disruptions_allowed=0),
        drained("n1", reason=NodeDeleted(deleted_at=T0), is_voluntary=False, seconds_max=600.0),
    )
    said = [one for one in told(*story, at=T0 + after) if one.reason == "FailedDraining"]

    assert len(said) == said_count
    for one in said:
        assert (one.kind, one.name, one.uid, one.is_warning) == ("Node", "n1", "uid-n1", True)
        assert "default/a (disruption budget default/never allows no disruption)" in one.message
        assert "they are deleted with what grace is left" in one.message


def test_a_drain_whose_pods_save_is_no_failure_before_half_of_its_time() -> None:
    """Nobody is in the way: they were asked to save, and are waited for."""
    story = (node("n1"), pod("a", on="n1", gpus=1), drained("n1", seconds_max=600.0))

    assert [one for one in told(*story, at=T0 + 4 * MINUTE) if one.reason == "FailedDraining"] == []
    (slow,) = (one for one in told(*story, at=T0 + 6 * MINUTE) if one.reason == "FailedDraining")
    assert "1 pod not gone yet: default/a; at " in slow.message
    assert "the drain is given up" in slow.message


def test_a_drain_that_was_given_up_says_why() -> None:
    """One that a plan called back is no failure."""
    why = "pod default/a is protected: annotation x=true"
    over = drained("n1", cancelled_at=T0 + MINUTE, abandoned_because=why)
    (said,) = (one for one in told(node("n1"), over, at=T0 + MINUTE) if one.reason == "FailedDraining")

    assert said.message == f"Its drain was given up, as {why}. It takes pods again."
    assert said.is_once
    called_back = told(node("n1"), drained("n1", cancelled_at=T0 + MINUTE), at=T0 + MINUTE)
    assert [one for one in called_back if one.reason == "FailedDraining"] == []


def test_a_node_whose_instance_is_gone_says_that_it_is_removed() -> None:
    """Under the name that cloud controllers use for it; before it is due nothing of the kind is said."""
    late, early = DUE, DUE - MINUTE
    (said,) = told(left(), ended(), at=late)
    assert (said.kind, said.name, said.reason, said.is_warning) == ("Node", "n1", "DeletingNode", False)
    assert "Its instance is gone" in said.message
    assert [one.reason for one in told(left(), ended(), at=early)] == ["NodeRegistered"]

"""Kubernetes Events on pods and nodes: a reason that users know, and the text of `why`."""

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
from gpu_autoscaler.model.labels import IDLE_ALLOWED, IDLE_ENDS_AT
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.drain import NodeDeleted
from gpu_autoscaler.model.scheduling import LabelRequirement


def announced(
    *stories: Story, under: ScalingPolicy | None = None, at: datetime = T0, has_plan: bool = True
) -> list[Announcement]:
    """The announcements after the stories and the plan that follows from them."""
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
def test_a_waiting_pod_shows_the_reason_and_the_remedy(rules: ScalingPolicy, gpus: int, reason: str) -> None:
    """A warning under a known reason; the message says what the pod waits for and the next step."""
    (event,) = announced(pod("train-0", gpus=gpus), on_sale(), under=rules)

    assert (event.kind, event.namespace, event.name, event.uid) == ("Pod", "default", "train-0", "uid-train-0")
    assert (event.reason, event.is_warning) == (reason, True)
    assert event.message.startswith("Waiting: ")
    assert any(step in event.message for step in ("Request less", "Raise nodes_count_max", "Set is_frozen to false"))
    assert len(event.message) <= MESSAGE_LENGTH_MAX


def test_a_pod_whose_node_is_being_launched_names_it() -> None:
    """No warning: a node is on its way."""
    order = purchase("buy", reason=wants("pod/uid-train-0"))
    (event,) = (one for one in announced(pod("train-0", gpus=8), on_sale(), bought(order)) if one.kind == "Pod")

    assert (event.reason, event.is_warning) == ("ScaleUpTriggered", False)
    assert "which was bought for it, is expected" in event.message
    assert "uid-" not in event.message


def test_a_pod_that_no_plan_covers_gets_no_event() -> None:
    """Nor does one that runs: the Kubernetes scheduler has written its own."""
    assert announced(pod("train-0", gpus=8), on_sale(), has_plan=False) == []
    assert [one for one in announced(pod("train-0", on="n1", gpus=8), node("n1")) if one.kind == "Pod"] == []


def test_pods_waiting_longest_come_first() -> None:
    """What one tick has no room for follows in the next, so none starves."""
    pods = [pod(f"p{number}", gpus=16, unschedulable_since=T0 - number * MINUTE) for number in (1, 3, 2)]

    assert [one.name for one in announced(*pods, on_sale())] == ["p3", "p2", "p1"]


def test_an_idle_pod_shows_when_its_workload_ends() -> None:
    """From the announcement on its pods until minutes after the end; once, with what keeps it."""
    marks = {IDLE_ENDS_AT: (T0 + 10 * MINUTE).isoformat()}
    idle = (pod("a", on="n1", annotations=marks), pod("b", on="n1"), pod("c", annotations={IDLE_ENDS_AT: "soon"}))
    (event,) = [told for told in announced(*idle) if told.reason == "GPUIdle"]
    assert (event.kind, event.name, event.is_warning, event.is_once) == ("Pod", "a", True, True)
    assert "its workload ends at 2026-11-21 12:10:00 UTC" in event.message
    assert f"annotate its pods {IDLE_ALLOWED}=true" in event.message
    assert [told for told in announced(*idle, at=T0 + 16 * MINUTE) if told.reason == "GPUIdle"] == []


def test_our_nodes_say_why_they_exist_and_when_they_are_removed() -> None:
    """Registered, then interrupted; nodes that are not ours get no events."""
    story = (node("n1"), node("theirs", is_ours=False), on_sale())
    (here,) = announced(*story)
    (going,) = announced(*story, notice("n1"))

    assert (here.kind, here.namespace, here.name, here.reason) == ("Node", "", "n1", "NodeRegistered")
    assert "No pod uses the node." in here.message
    assert (going.reason, going.is_warning) == ("SpotInterruption", True)
    assert announced(*story, at=T0 + HOUR)


def test_an_evicted_pod_shows_who_evicted_it_why_and_until_when() -> None:
    """Also after it is gone, for a while, and once; where it had to be forced that is a warning."""
    leaving = drained("n1", reason=NodeDeleted(deleted_at=T0), is_voluntary=False, seconds_max=60.0)
    story = (node("n1"), on_sale(), leaving, evicted("a", off="n1"), evicted("b", off="n1", is_forced=True))
    asked, forced = (one for one in announced(*story, at=T0 + MINUTE) if one.reason == "Evicted")

    assert (asked.kind, asked.namespace, asked.name, asked.uid) == ("Pod", "default", "a", "uid-a")
    assert asked.message.startswith("Evicted by gpu-autoscaler: node n1 is removed once it is empty, by ")
    assert "The node object was deleted at" in asked.message
    assert (asked.is_warning, asked.is_once, forced.is_warning, forced.is_once) == (False, True, True, True)
    assert "because its eviction was not allowed in time" in forced.message
    assert [one for one in announced(*story, at=T0 + HOUR) if one.reason == "Evicted"] == []


@pytest.mark.parametrize(("after", "said_count"), [(5 * SECOND, 0), (20 * SECOND, 1)])
def test_a_stalled_drain_names_what_blocks_it(after: timedelta, said_count: int) -> None:
    """Once it takes longer than evicting pods one after the other."""
    app = (LabelRequirement(key="app", operator="In", values=("a",)),)
    story = (
        node("n1"),
        pod("a", on="n1", gpus=1, labels={"app": "a"}),
        budget("never", match=app, disruptions_allowed=0),
        drained("n1", reason=NodeDeleted(deleted_at=T0), is_voluntary=False, seconds_max=600.0),
    )
    event = [one for one in announced(*story, at=T0 + after) if one.reason == "FailedDraining"]

    assert len(event) == said_count
    for one in event:
        assert (one.kind, one.name, one.uid, one.is_warning) == ("Node", "n1", "uid-n1", True)
        assert "default/a (disruption budget default/never allows no disruption)" in one.message
        assert "they are deleted with the grace period that is left" in one.message


def test_a_drain_whose_pods_save_a_checkpoint_may_take_half_of_its_time() -> None:
    """Nothing blocks it: the pods were asked to save and are waited for."""
    story = (node("n1"), pod("a", on="n1", gpus=1), drained("n1", seconds_max=600.0))

    assert [one for one in announced(*story, at=T0 + 4 * MINUTE) if one.reason == "FailedDraining"] == []
    (slow,) = (one for one in announced(*story, at=T0 + 6 * MINUTE) if one.reason == "FailedDraining")
    assert "The drain waits for 1 pod: default/a; at " in slow.message
    assert "the drain is abandoned" in slow.message


def test_an_abandoned_drain_shows_the_reason() -> None:
    """One that a plan canceled is no failure."""
    why = "pod default/a is protected: annotation x=true"
    over = drained("n1", cancelled_at=T0 + MINUTE, abandoned_because=why)
    (event,) = (one for one in announced(node("n1"), over, at=T0 + MINUTE) if one.reason == "FailedDraining")

    assert event.message == f"The drain of the node was abandoned: {why}. The node accepts pods again."
    assert event.is_once
    called_back = announced(node("n1"), drained("n1", cancelled_at=T0 + MINUTE), at=T0 + MINUTE)
    assert [one for one in called_back if one.reason == "FailedDraining"] == []


def test_a_node_whose_instance_is_gone_gets_a_removal_event() -> None:
    """Under the reason that cloud controllers use; not before it is due."""
    late, early = DUE, DUE - MINUTE
    (event,) = announced(left(), ended(), at=late)
    assert (event.kind, event.name, event.reason, event.is_warning) == ("Node", "n1", "DeletingNode", False)
    assert "Its instance is terminated" in event.message
    assert [one.reason for one in announced(left(), ended(), at=early)] == ["NodeRegistered"]

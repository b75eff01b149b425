"""What users find on their pods and nodes: a reason they know, and the words of `why`."""

from datetime import datetime

import pytest
from tests.support.stories import HOUR, MINUTE, T0, Story, bought, given, node, notice, on_sale, pod, policy, purchase

from gpu_autoscaler.core.announcements import MESSAGE_LENGTH_MAX, Announcement, announcements
from gpu_autoscaler.core.headline import Sight
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.model.reasons import UnmetDemand


def told(
    *stories: Story, under: ScalingPolicy | None = None, at: datetime = T0, has_plan: bool = True
) -> list[Announcement]:
    """What is to be said after the stories and the plan that is made of them."""
    state, rules = given(*stories, as_of=at), under or policy()
    return list(announcements(Sight.of(state, rules, at, plan(state, rules, at) if has_plan else None)))


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
